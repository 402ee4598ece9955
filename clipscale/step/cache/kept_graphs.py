"""Graphs that are kept from the first pass, so that their chunks need no second pass; and the bytes of one graph."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clipscale.common.keep import KeepBudget
from clipscale.step.cache.chunk_output import ChunkOutput

# A graph is kept only if the free memory is this many times its bytes. `cache.keep=auto` leaves a tenth of the memory
# free, so its graphs always fit.
HEADROOM = 1.1


@dataclass
class GraphMeter:
    """The bytes of one chunk's graph. The first step at a batch size measures them."""

    # Bytes of a full chunk's graph, the largest of all ranks; 0: not measured.
    bytes_each: int = 0
    _rows: int = 0
    # The graphs measured in this step; None: it measures none.
    _measured: list[int] | None = None

    def start_step(self, rows: int, *, wanted: bool) -> None:
        """Prepare for a step of `rows` samples. It measures the bytes if they are `wanted` and not known.

        All ranks pass the same values, since `agree_on_size` is a collective.
        """
        if rows != self._rows:
            self._rows = rows
            self.bytes_each = 0
        self._measured = [] if wanted and not self.bytes_each else None

    @property
    def measures(self) -> bool:
        """Whether this step measures graphs."""
        return self._measured is not None

    def encode(self, encode: Callable[[], ChunkOutput], *, on_gpu: bool) -> Tensor:
        """The representations of a chunk, without a graph. Measures its graph if this step does."""
        if self._measured is None:
            with torch.no_grad():
                return encode().representations
        with measured_graph(on_gpu) as size:
            out = encode()
        self._measured.append(size())
        return out.representations.detach()

    def agree_on_size(self, device: torch.device) -> None:
        """After the first pass: all ranks agree on the largest measured graph. A collective if this step measures."""
        if self._measured is None:
            return
        # Skip the first of several chunks: it also allocates what later chunks reuse, such as gathered weights.
        self.bytes_each = max(1, largest_of_ranks(max(self._measured[len(self._measured) > 2 :]), device))


@dataclass
class KeptGraphs:
    """The graphs that a tower keeps in a step, of its first chunks.

    All ranks keep the same number. A rank without memory for them keeps none. Where the memory is limited, the first
    step at a batch size keeps none: it measures the bytes of a graph.
    """

    # The outputs of the kept chunks, in order; they hold the graphs.
    outputs: list[ChunkOutput] = field(default_factory=list)
    # Number of chunks to keep in this step.
    count: int = 0
    # Number of chunks whose graphs all ranks meant to keep when the step began.
    planned: int = 0
    meter: GraphMeter = field(default_factory=GraphMeter)
    # Whether a graph did not fit in this step.
    out_of_memory: bool = False
    _on_gpu: bool = False

    def start_step(self, rows: int, num_chunks: int, keep: KeepBudget, *, on_gpu: bool) -> None:
        """Prepare for a step of `rows` samples, of which `num_chunks` chunks have a second pass.

        `keep`: for this tower's graphs. Its `measures` is the same on all ranks, also on those that keep none.
        `on_gpu`: see `measured_graph`.
        """
        self.meter.start_step(rows, wanted=keep.needs_measurement and num_chunks > 0)
        self.outputs = []
        self.count = self.planned = keep.graphs(num_chunks, self.meter.bytes_each)
        self.out_of_memory = False
        self._on_gpu = on_gpu

    def output(self, i: int, encode: Callable[[], ChunkOutput], *, is_collective: bool) -> Tensor:
        """The representations of chunk i, detached. Its graph is kept, or measured and dropped, or not built.

        `is_collective`: the pass is one, so this rank alone cannot repeat it when it runs out of memory. Therefore:

        - It looks at the memory before the pass, and keeps no more graphs if there is too little.
        - It still builds the graphs of all `planned` chunks, and discards them, because the other ranks build them:
          with a graph an encoder may gather more weights (see `ChunkOutput`).

        DDP's pass is none. It is tried and repeated, because all ranks have to build its first graph: DDP then rebuilds
        its buckets together.
        """
        if is_collective and i < self.count and not self._has_memory():
            self.count = i
            self.out_of_memory = True
        if i < self.count:
            out = encode()
            self.outputs.append(out)
            return out.representations.detach()
        if is_collective and i < self.planned:
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
                return encode().representations.detach()
        return self.meter.encode(encode, on_gpu=self._on_gpu)

    def _has_memory(self) -> bool:
        """Whether one more graph fits. On a CPU it is not known, and assumed."""
        return not self._on_gpu or free_gpu_memory() >= HEADROOM * self.meter.bytes_each

    def builds(self, i: int) -> bool:
        """Whether the first pass of chunk i builds a graph."""
        return i < self.count or self.meter.measures

    def drop(self) -> None:
        """Drop the kept graphs, and keep no more in this step. Their chunks get a second pass."""
        self.outputs.clear()
        self.count = 0
        self.out_of_memory = True


def largest_of_ranks(value: int, device: torch.device) -> int:
    """The largest value of all ranks; this process's own without a process group. A collective."""
    largest = torch.tensor(int(value), device=device)
    if dist.is_initialized():
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def free_gpu_memory() -> int:
    """Bytes for new tensors on the current GPU: what the driver has, and what torch's allocator holds unused."""
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
