"""Which graphs are kept from the first pass, so that their chunks need no second pass; and the bytes of one graph."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clipscale.batch.keep_budget import KeepBudget
from clipscale.step.cache.chunk_output import ChunkOutput

# A graph is kept only if the free memory is this many times its bytes. The graphs of `cache.keep=auto` always fit,
# because that setting leaves a tenth of the memory free.
HEADROOM = 1.1


@dataclass
class GraphMeter:
    """The bytes of one chunk's graph. The first step at a batch size measures them."""

    # Bytes of a full chunk's graph, the largest of all ranks; 0 before it is measured.
    bytes_each: int = 0
    _rows: int = 0
    # The bytes of the graphs that this step has measured; None in a step that measures none.
    _measured: list[int] | None = None

    def start_step(self, rows: int, *, measure: bool) -> None:
        """Prepare for a step of `rows` samples. `measure`: whether the step measures bytes that are not known.

        All ranks pass the same values, since `agree_on_size` is a collective.
        """
        if rows != self._rows:
            self._rows = rows
            self.bytes_each = 0
        self._measured = [] if measure and not self.bytes_each else None

    @property
    def is_measuring(self) -> bool:
        """Whether this step measures graphs."""
        return self._measured is not None

    @contextmanager
    def measuring(self, *, on_gpu: bool) -> Iterator[None]:
        """Around a chunk's pass with a graph: notes the graph's bytes. `on_gpu`: see `measured_graph`."""
        assert self._measured is not None
        with measured_graph(on_gpu) as size:
            yield
        self._measured.append(size())

    def agree_on_size(self, device: torch.device) -> None:
        """After the first pass, set `bytes_each` to the largest graph of all ranks.

        A collective if the step measures.
        """
        if self._measured is None:
            return
        graphs = self._measured
        if len(graphs) > 2:
            # Leaves out the first chunk, which also allocates what later ones reuse, such as gathered weights. Of two
            # chunks the first one counts, because the second may be shorter.
            graphs = graphs[1:]
        self.bytes_each = max(1, largest_of_ranks(max(graphs), device))


class OnShortMemory(Enum):
    """What a first pass does if there may be no memory for a graph that is to be kept."""

    # Look at the free memory before the pass. If it is short, this rank keeps no more graphs. A pass that is a
    # collective does this, because no rank may fail in it or repeat it.
    ASK_FIRST = "ask first"
    # Try the pass. If it fails, drop the tower's graphs and repeat the pass without a graph. DDP uses this and not
    # ASK_FIRST: every rank must build a graph in the first step, because all ranks then rebuild DDP's buckets together.
    RETRY = "retry"
    # Try the pass. If it fails, raise OutOfMemoryError. A pass that updates statistics does this, because a repeated
    # one would update them twice.
    RAISE = "raise"


class GraphPolicy(Enum):
    """What a chunk's first pass does with its graph."""

    # The graph is kept: the chunk needs no second pass.
    KEEP = "keep"
    # The graph is built, measured, and dropped.
    MEASURE = "measure"
    # The graph is built without the tensors that its backward pass would need, and dropped. This rank has no memory for
    # them, but must communicate as often as the ranks that build whole graphs.
    DISCARD = "discard"
    # No graph is built.
    NO_GRAPH = "no graph"

    @property
    def builds_whole_graph(self) -> bool:
        """Whether the graph is built with all that its backward pass needs."""
        return self in (GraphPolicy.KEEP, GraphPolicy.MEASURE)


@dataclass
class KeptGraphs:
    """The graphs of a tower's first chunks, which it keeps in a step.

    All ranks plan to keep the same number, unless one of them ran short of memory in an earlier tower of this step.

    first step at a batch size, memory limited:   MEASURE every chunk; all ranks agree on a graph's bytes
    later steps, n graphs fit:                    KEEP chunks 0 to n - 1; NO_GRAPH for the others
    a graph does not fit after all:               see `OnShortMemory`: the step goes on without it, with
                                                  `is_out_of_memory` true, and `GradCache` keeps none from then on;
                                                  or the error is raised
    """

    # The outputs of the kept chunks, in order; they hold the graphs.
    outputs: list[ChunkOutput] = field(default_factory=list)
    # Number of chunks whose graphs this rank keeps in this step.
    num_kept: int = 0
    # Number of chunks whose graphs this rank meant to keep when the tower's first pass began.
    num_planned: int = 0
    meter: GraphMeter = field(default_factory=GraphMeter)
    on_short_memory: OnShortMemory = OnShortMemory.RAISE
    # Whether a graph did not fit in this step.
    is_out_of_memory: bool = False
    _on_gpu: bool = False

    def start_step(
        self, rows: int, num_keepable: int, keep_budget: KeepBudget, on_short_memory: OnShortMemory, *, on_gpu: bool
    ) -> None:
        """Prepare for a step of `rows` samples, whose first `num_keepable` chunks have graphs that may be kept.

        `keep_budget`: for this tower's graphs. Its `needs_measurement` is the same on all ranks, even if a rank keeps
        none. `on_gpu`: see `measured_graph`.
        """
        self.meter.start_step(rows, measure=keep_budget.needs_measurement and num_keepable > 0)
        self.outputs = []
        self.num_planned = keep_budget.graphs(num_keepable, self.meter.bytes_each)
        self.num_kept = self.num_planned
        self.on_short_memory = on_short_memory
        self.is_out_of_memory = False
        self._on_gpu = on_gpu

    def choose_policy(self, i: int) -> GraphPolicy:
        """Choose what becomes of the graph of chunk i, the next one to be encoded.

        With ASK_FIRST it looks at the free memory. If that is short, this rank keeps no more graphs in this step.
        """
        if i < self.num_kept and self.on_short_memory is OnShortMemory.ASK_FIRST and not self._has_memory():
            self.num_kept = i
            self.is_out_of_memory = True
        return self.planned_policy(i)

    def planned_policy(self, i: int) -> GraphPolicy:
        """What becomes of the graph of chunk i by `num_kept` and `num_planned`. Does not look at the free memory.

        A collective pass builds the graphs of all planned chunks even if this rank keeps fewer. With a graph a
        captioner also runs its decoder, and gathers its weights; all ranks must gather equally often.
        """
        if i < self.num_kept:
            return GraphPolicy.KEEP
        if i < self.num_planned and self.on_short_memory is OnShortMemory.ASK_FIRST:
            return GraphPolicy.DISCARD
        return GraphPolicy.MEASURE if self.meter.is_measuring else GraphPolicy.NO_GRAPH

    def _has_memory(self) -> bool:
        """Whether one more graph fits. Always true on a CPU, where it is not known."""
        return not self._on_gpu or free_gpu_memory() >= HEADROOM * self.meter.bytes_each

    @contextmanager
    def building(self, policy: GraphPolicy) -> Iterator[None]:
        """Around a first pass: builds, measures or discards its graph."""
        match policy:
            case GraphPolicy.KEEP:
                yield
            case GraphPolicy.MEASURE:
                with self.meter.measuring(on_gpu=self._on_gpu):
                    yield
            case GraphPolicy.DISCARD:
                with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
                    yield
            case GraphPolicy.NO_GRAPH:
                with torch.no_grad():
                    yield

    def give_up(self) -> None:
        """Drop the kept graphs, whose chunks then have a second pass, and keep no more in this step."""
        self.outputs.clear()
        self.num_kept = 0
        self.is_out_of_memory = True


def largest_of_ranks(value: int, device: torch.device) -> int:
    """A collective: the largest value of all ranks; this process's own without a process group.

    Uses the default group: this folder is a library, and has no `World` with a CPU group.
    """
    largest = torch.tensor(int(value), device=device)
    if dist.is_initialized():
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def free_gpu_memory() -> int:
    """Bytes for new tensors on the current GPU: what the driver has, and what torch's allocator holds unused."""
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


@contextmanager
def measured_graph(on_gpu: bool = False) -> Iterator[Callable[[], int]]:
    """Measures the graph that is built inside: by the current GPU's allocator, or by the tensors that it saves."""
    bytes_of_storage: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            storage = tensor.untyped_storage()
            bytes_of_storage[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an operation that saves its own output would otherwise keep the graph alive for ever

    if on_gpu:
        before = torch.cuda.memory_allocated()
        yield lambda: torch.cuda.memory_allocated() - before
    else:
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            yield lambda: sum(bytes_of_storage.values())
