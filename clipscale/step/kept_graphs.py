"""Graphs that wait between the two passes, so that their chunks need no second pass: how many, in how much memory."""

import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clipscale.common.phases import Phases
from clipscale.common.units import parse_memory
from clipscale.data.loader.memory import free_memory
from clipscale.distributed.world import World

log = logging.getLogger(__name__)

MARGIN = {"cuda": 0.9, "cpu": 0.5}
"""Share of the free memory that a step may use. Fragmentation costs the rest; a CPU's memory has other users."""
HOST_LEFT = 4 << 30
"""Bytes of a host that are always left to others."""
MEASURE = 1
"""A budget in bytes with which a step measures its graphs and keeps none."""


@dataclass
class KeptGraphs:
    """The graphs that one tower keeps of a step's first chunks: as many as memory holds, equally many on all ranks.

    A finite budget needs the bytes of a graph. The first step at a batch size measures them and keeps none.
    """

    outputs: list[Tensor] = field(default_factory=list)
    """Of the kept chunks, in their order."""
    count: int = 0
    """Chunks to keep in this step."""
    bytes_each: int = 0
    """Of a full chunk's graph, the largest of all ranks; 0: not measured."""
    exhausted: bool = False
    """A graph did not fit: no others are kept in this run."""
    _rows: int = 0
    _measured: list[int] | None = None

    def begin(self, rows: int, chunks: int, budget: float) -> None:
        """A step of `rows` samples begins, of which `chunks` have a second pass; `budget`: bytes for this tower."""
        if rows != self._rows:
            self._rows = rows
            self.bytes_each = 0
        self._measured = [] if chunks and 0 < budget < math.inf and not self.bytes_each else None
        fitting = 0
        if budget == math.inf:
            fitting = chunks
        elif self.bytes_each:
            fitting = int(budget // self.bytes_each)
        self.outputs = []
        self.count = min(chunks, fitting)

    def first_pass(self, i: int, encode: Callable[[], Tensor]) -> Tensor:
        """The output of chunk i, without its graph; this is kept, or measured and dropped."""
        if i < self.count:
            out = encode()
            self.outputs.append(out)
            return out.detach()
        if self._measured is None:
            with torch.no_grad():
                return encode()
        with graph_bytes() as size:
            out = encode()
        self._measured.append(size())
        return out.detach()

    def give_up(self) -> None:
        """Drop the graphs of this step, whose chunks have a second pass then."""
        log.warning("cache.keep: out of memory in a kept graph; this process keeps none from now on")
        self.outputs.clear()
        self.count = 0
        self.exhausted = True

    def end(self, device: torch.device) -> None:
        """The first pass has ended: all ranks agree on what it has measured."""
        if self._measured is None:
            return
        # Of several chunks not the first, which also sets aside what stays for all, such as gathered weights.
        largest = torch.tensor(max(self._measured[len(self._measured) > 2 :]), device=device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        self.bytes_each = max(1, int(largest))


@contextmanager
def graph_bytes() -> Iterator[Callable[[], int]]:
    """Measures the graph that is built inside: the allocator's bytes on a GPU, else the bytes of its saved tensors."""
    saved: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an operation that saved its own result would hold itself, and so the graph, for ever

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        before = torch.cuda.memory_allocated()
        yield lambda: torch.cuda.memory_allocated() - before
    else:
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            yield lambda: sum(saved.values())


class KeepBudget:
    """The bytes for kept graphs in each step: `cache.keep` is `none`, a number of bytes, or `auto`.

    `auto` keeps none in the first step, which measures a graph and its peak beyond what it leaves. Later steps may
    keep graphs in the rest of the free memory, less a margin.
    """

    def __init__(self, setting: str, world: World) -> None:
        self._world = world
        self._bytes = parse_memory("cache.keep", setting)
        """None: not measured yet."""

    @property
    def bytes(self) -> int:
        """For the next step."""
        return MEASURE if self._bytes is None else self._bytes

    def after_step(self, phases: Phases) -> None:
        """Take in what the step has needed. All ranks call it."""
        if self._bytes is None:
            device = self._world.device
            rest = usable_bytes(device) - phases.working_bytes()
            self._bytes = -self._world.highest(-max(0, rest))[0]  # the least of all ranks


def usable_bytes(device: torch.device) -> int:
    """Free memory that a step may use, of a host this process's share."""
    if device.type == "cpu":
        free = free_memory()
        usable = min(int(MARGIN["cpu"] * free), free - HOST_LEFT)
        return usable // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free, _ = torch.cuda.mem_get_info(device)
    reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(MARGIN["cuda"] * (free + reserve))
