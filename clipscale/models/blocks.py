"""Finds the identical blocks of a tower, so that one of them can be measured for all."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from torch import nn


def repeated_blocks(tower: nn.Module) -> tuple[Any, list[int]]:
    """The list of blocks with the longest run of identical consecutive blocks, and their indices.

    The last block is left out: it may compute less.
    """
    best: tuple[Any, list[int]] = [], []
    for blocks in tower.modules():
        if isinstance(blocks, nn.ModuleList | nn.Sequential):
            looks = [
                [type(block), [(name, p.shape, p.requires_grad) for name, p in block.named_parameters()]]
                for block in blocks
            ]
            for _, alike in groupby(range(len(looks) - 1), looks.__getitem__):
                best = max(best, (blocks, list(alike)), key=lambda candidate: len(candidate[1]))
    return best


@contextmanager
def two_blocks(tower: nn.Module) -> Iterator[tuple[nn.Module | None, int]]:
    """Inside, the tower has only two of its identical blocks. Yields the second block, and how many blocks it stands
    for; None and 1 if there are no more than two.

    The first block stands for itself alone: its input may need no gradient. A decoder keeps all its blocks, because it
    has two lists of blocks, which it calls in pairs.
    """
    blocks, alike = repeated_blocks(tower)
    names = [name for name, _ in blocks.named_children()] if alike else []
    others = [m for m in tower.modules() if isinstance(m, nn.ModuleList) and m is not blocks and len(m) == len(blocks)]
    if len(alike) <= 2 or others or names != [str(index) for index in range(len(names))]:
        yield None, 1
        return
    every = [*blocks]
    for index in reversed(alike[2:]):
        del blocks[index]
    try:
        yield blocks[alike[1]], len(alike) - 1
    finally:
        del blocks[:]
        blocks.extend(every)
