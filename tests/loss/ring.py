"""What a rank of the ring sends, counted hop by hop for any number of ranks, without the other ranks; and when, in a profiler's trace.

`python -m tests.loss.ring` prints the table of docs/loss.md, `python -m tests.loss.ring timeline` its timeline. torch's fake process
group completes transfers without doing them.

Letters: P ranks, B pairs of all ranks, D feature width.
"""

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # registers collectives for tensors without memory
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from clipscale.config.sections import LossConfig
from clipscale.loss.api import configured_loss
from clipscale.loss.block import RowBlock
from clipscale.loss.exchange import GRAD, LSE, Communicator, Hop, Ring, Transfer
from clipscale.loss.triton.tuning import PASSES, tiles_for
from clipscale.plan.memory_tracker import DryMachine, cuda_autocast, without_memory
from tests.support.ranks import run_ranks

NODE = 8
COLS = 2
"""Columns of a rank while counting."""


@dataclass
class Sent:
    """One transfer of a rank."""

    to: int
    bytes: int
    is_sums: bool


@contextmanager
def fake_group(size: int, rank: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sent_by(
    rank: int, size: int, per_node: int | None, width: int, blocks: int = 1, sigmoid: bool = False
) -> list[Sent]:
    """What a rank sends in a step with bfloat16 features: the softmax's two sweeps, or the sigmoid's one."""
    found: list[Sent] = []
    post = Communicator.post

    def noting(self: Communicator, tensors: list[Tensor], hop: Hop, tag: int = 0) -> Transfer:
        found.append(Sent(hop[0], sum(x.nbytes for x in tensors), tag == 1))
        return post(self, tensors, hop, tag)

    cols = RowBlock(torch.zeros(COLS, width, dtype=torch.bfloat16), weight=None if sigmoid else torch.ones(COLS))
    with fake_group(size, rank), mock.patch.object(Communicator, "post", noting):
        ring = Ring(Communicator(None), per_node)
        ring.join(blocks)
        if not sigmoid:
            cols.lse = ring.sweep(cols, LSE, lambda *_: None)
        ring.sweep(cols, GRAD, lambda *_: None)
    return found


def blocks_at_once(cols: int, multiprocessors: int = 132) -> int:
    """As the loss asks for on an H200, for so many rows and columns of a rank."""
    tile = tiles_for(90, PASSES[0], "half")
    return math.ceil(multiprocessors / (math.ceil(cols / tile.rows) * math.ceil(cols / tile.cols)))


def leaves_the_node(rank: int, sent: list[Sent]) -> int:
    return sum(one.bytes for one in sent if one.to // NODE != rank // NODE)


def line(size: int, pairs: int, width: int) -> str:
    """A row of the table, of the last rank of a node, which in one ring sends all that leaves the node."""
    cols, gib, last = pairs // size, pairs // size / COLS / 2**30, NODE - 1
    one_ring, levels = sent_by(last, size, None, width), sent_by(last, size, NODE, width, blocks_at_once(cols))
    features, gradient = (max(one.bytes for one in levels if one.is_sums == is_sums) for is_sums in (False, True))
    step, *out = sum(x.bytes for x in levels), *(leaves_the_node(last, sent) for sent in (one_ring, levels))
    cells = [
        f"{size:,}", f"{cols:,}", f"{len(levels):,}", f"{1024 * gib * features:,.2f}", f"{1024 * gib * gradient:,.2f}",
        f"{gib * step:.2f}", *(f"{gib * x:.3f}" for x in out),
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def memory_of(size: int, pairs: int, width: int) -> int:
    """Bytes that a rank of a two-level ring takes beyond bfloat16 features and gradients, by the memory tracker, on an H200."""
    n = pairs // size
    with fake_group(size, 0), without_memory() as memory, cuda_autocast():
        u, v = (torch.empty(n, width, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
        scale = torch.tensor(10.0).requires_grad_()
        before = memory.live
        memory.take_peak()
        config = LossConfig(exchange="ring", ranks_per_node=NODE)
        configured_loss(u, v, scale, None, config, check=False, machine=DryMachine(90)).backward()
        return memory.take_peak() - before - u.nbytes - v.nbytes


Span = tuple[str, float, float]
"""Name, first and last millisecond."""


def timeline(group: dist.ProcessGroup | None, mebibytes: int, block_s: float) -> list[Span]:
    """The blocks, waits and transfers of a sweep with gradients, each block taking so many seconds without using a processor."""
    cols = RowBlock(torch.zeros(256 * mebibytes, 1024))
    ring = Ring(Communicator(group))
    ring.sweep(cols, GRAD, lambda *_: None)  # connects
    dist.barrier(group)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        ring.sweep(cols, GRAD, lambda *_: time.sleep(block_s))
    wanted = ("contrastive_loss", "gloo:")
    events = [(event.name, event.time_range) for event in found.events() if event.name.startswith(wanted)]
    first = min(span.start for _, span in events)
    return sorted([(name, (s.start - first) / 1e3, (s.end - first) / 1e3) for name, s in events], key=lambda x: x[1])


def _timeline_of_all(rank: int, world: int, mebibytes: int, block_s: float) -> list[Span]:
    return timeline(None, mebibytes, block_s)


if __name__ == "__main__" and "timeline" in sys.argv:
    for seconds in (0.0, 0.3):
        print(f"rank 0 of 4, 16 MiB a block, {1e3 * seconds:.0f} ms a block")
        for name, start, end in run_ranks(_timeline_of_all, 4, 16, seconds)[0]:
            print(f"  {name:26s} {start:7.1f} to {end:7.1f} ms")
elif __name__ == "__main__":
    heading = [
        "ranks", "pairs of a rank", "transfers", "features a hop, MiB", "gradient a hop, MiB", "sent a step, GiB",
        "out of the node, one ring, GiB", "two levels, GiB",
    ]  # fmt: skip
    print("| " + " | ".join(heading) + " |\n|" + "---|" * len(heading))
    for power in range(3, 13):
        print(line(2**power, 2**20, 768), flush=True)
