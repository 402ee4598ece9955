"""Graphs that are kept from the first pass, so that their chunks need no second pass; and the bytes of one graph."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clipscale.common.keep import Keep
from clipscale.step.chunk_output import ChunkOutput

# Free memory that a graph needs, in graphs. A budget leaves a tenth of the memory free, so it never asks for more.
ROOM = 1.1


@dataclass
class GraphMeter:
    """The bytes of one chunk's graph, which the first step at a batch size measures."""

    # Bytes of a full chunk's graph, the largest of all ranks; 0: not measured.
    bytes_each: int = 0
    _rows: int = 0
    # The graphs measured in this step; None: it measures none.
    _measured: list[int] | None = None

    def start_step(self, rows: int, *, wanted: bool) -> None:
        """Prepare for a step of `rows` samples, of which a graph is measured if it is `wanted` and not known. The same
        on all ranks, since `end` is a collective."""
        if rows != self._rows:
            self._rows = rows
            self.bytes_each = 0
        self._measured = [] if wanted and not self.bytes_each else None

    def encode(self, encode: Callable[[], ChunkOutput], *, on_gpu: bool) -> Tensor:
        """The representations of a chunk, without a graph. Measures its graph if this step does."""
        if self._measured is None:
            with torch.no_grad():
                return encode().representations
        with measured_graph(on_gpu) as size:
            out = encode()
        self._measured.append(size())
        return out.representations.detach()

    def end(self, device: torch.device) -> None:
        """End the first pass: all ranks agree on the largest measured graph."""
        if self._measured is None:
            return
        # Skip the first of several chunks: it also allocates what later chunks reuse, such as gathered weights.
        self.bytes_each = max(1, largest_of_ranks(max(self._measured[len(self._measured) > 2 :]), device))


@dataclass
class KeptGraphs:
    """The graphs a tower keeps: those of a step's first chunks. All ranks keep the same number, except a rank without
    memory for them, which keeps none.

    A limit of memory needs the bytes of a graph: the first step at a batch size measures them and keeps none.
    """

    # The outputs of the kept chunks, in order; they hold the graphs.
    outputs: list[ChunkOutput] = field(default_factory=list)
    # Number of chunks to keep in this step.
    count: int = 0
    # Number of chunks that all ranks meant to keep in this step.
    planned: int = 0
    meter: GraphMeter = field(default_factory=GraphMeter)
    # A graph did not fit in this step.
    full: bool = False
    _on_gpu: bool = False

    def start_step(self, rows: int, num_chunks: int, keep: Keep, *, on_gpu: bool) -> None:
        """Prepare for a step of `rows` samples, of which `num_chunks` chunks have a second pass.

        `keep`: for this tower's graphs; its `measures` is the same on all ranks, even those that keep none. `on_gpu`:
        see `measured_graph`.
        """
        self.meter.start_step(rows, wanted=keep.measures and num_chunks > 0)
        self.outputs = []
        self.count = self.planned = keep.graphs(num_chunks, self.meter.bytes_each)
        self.full = False
        self._on_gpu = on_gpu

    def first_pass(self, i: int, encode: Callable[[], ChunkOutput], asks: bool) -> Tensor:
        """The representations of chunk i, detached. Its graph is kept, measured and dropped, or not built.

        `asks`: keep it only if the GPU has room, for a pass that cannot be repeated alone. DDP's can, and must be
        tried: the first with a graph is a collective, which renews its buckets. A pass that cannot be repeated runs
        what a kept one runs: with a graph an encoder may gather more weights (see `ChunkOutput`).
        """
        if asks and self._on_gpu and i < self.count and free_gpu_memory() < ROOM * self.meter.bytes_each:
            self.count = i
            self.full = True
        if i < self.count:
            out = encode()
            self.outputs.append(out)
            return out.representations.detach()
        if asks and i < self.planned:
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
                return encode().representations.detach()
        return self.meter.encode(encode, on_gpu=self._on_gpu)

    def give_up(self) -> None:
        """Drop the kept graphs. Their chunks get a second pass."""
        self.outputs.clear()
        self.count = 0
        self.full = True


def largest_of_ranks(value: int, device: torch.device) -> int:
    """The largest value of all ranks; this process's own without a process group. A collective."""
    largest = torch.tensor(int(value), device=device)
    if dist.is_initialized():
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def free_gpu_memory() -> int:
    """Bytes that the current GPU has for new tensors, those that torch's allocator holds unused included."""
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


@contextmanager
def measured_graph(on_gpu: bool = False) -> Iterator[Callable[[], int]]:
    """Measures the graph that is built inside: on the current GPU by the allocator, else by the tensors it saves."""
    saved: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an operation that saves its own output would otherwise keep the graph alive for ever

    if on_gpu:
        before = torch.cuda.memory_allocated()
        yield lambda: torch.cuda.memory_allocated() - before
    else:
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            yield lambda: sum(saved.values())
