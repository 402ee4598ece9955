"""Finds the identical blocks of a tower, so that one of them can be measured for all."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby

from torch import nn


def repeated_blocks(tower: nn.Module) -> tuple[nn.ModuleList | nn.Sequential, list[int]]:
    """The list of blocks with the longest run of identical consecutive blocks, and their indices.

    The last block is left out: it may compute less. Both are empty for a tower without such blocks.
    """
    best: tuple[nn.ModuleList | nn.Sequential, list[int]] = nn.ModuleList(), []
    for blocks in tower.modules():
        if isinstance(blocks, nn.ModuleList | nn.Sequential):
            signatures = [
                [type(block), [(name, p.shape, p.requires_grad) for name, p in block.named_parameters()]]
                for block in blocks
            ]
            for _, identical in groupby(range(len(signatures) - 1), signatures.__getitem__):
                best = max(best, (blocks, list(identical)), key=lambda candidate: len(candidate[1]))
    return best


@contextmanager
def two_blocks(tower: nn.Module) -> Iterator[tuple[nn.Module | None, int]]:
    """In this context, the tower has only two of its identical blocks. Yields the second block, and how many blocks it
    stands for; None and 1 if there are no more than two.

    The first block stands for itself alone: its input may need no gradient. A decoder keeps all its blocks, because it
    has two lists of blocks, which it calls in pairs.
    """
    blocks, identical = repeated_blocks(tower)
    names = [name for name, _ in blocks.named_children()] if identical else []
    others = [m for m in tower.modules() if isinstance(m, nn.ModuleList) and m is not blocks and len(m) == len(blocks)]
    if len(identical) <= 2 or others or names != [str(index) for index in range(len(names))]:
        yield None, 1
        return
    every = [*blocks]
    for index in reversed(identical[2:]):
        del blocks[index]
    try:
        yield blocks[identical[1]], len(identical) - 1
    finally:
        del blocks[:]
        blocks.extend(every)
