"""Kept graphs: which chunks keep their graph from the first pass, and in how much memory.

A chunk with a kept graph needs no second pass.

With a number of bytes for them (`max_bytes` of `GraphBudget`), as many graphs are kept as fit:

- First step: `GraphBudget.plan` keeps none and has every chunk's graph measured (MEASURE). After the first pass all
  ranks agree on the bytes of one (`KeptGraphs.agree_on_size`). A later step whose full chunks have another number of
  rows measures again.
- Later steps: `GraphBudget.plan` finds that n graphs fit: KEEP for chunks 0 to n - 1, NO_GRAPH for the others. The
  replay takes the kept ones from `KeptGraphs.outputs`.
- No memory for a graph: by `ShortMemoryPolicy` the step goes on without it and sets `KeptGraphs.is_out_of_memory`, or
  the error is raised. Before the replay, `GraphBudget.disable_if_memory_short` drops the step's graphs. Later steps
  keep none.

With 0 bytes none is kept, and with math.inf all; neither measures. A budget that `awaits_limit` measures, and keeps
none until the caller sets its bytes.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clipscale.step.cache.batch_norm import batch_norms
from clipscale.step.cache.encoder_io import ChunkOutput
from clipscale.step.cache.gradient_sync import is_collective

log = logging.getLogger(__name__)

# With CHECK_FIRST a graph is kept only if the free memory is at least this many times its bytes. `cache.keep=auto`
# leaves a tenth of the memory free, so this rarely refuses one.
HEADROOM = 1.1


class ShortMemoryPolicy(Enum):
    """What a first pass does if there may be no memory for a graph that is to be kept."""

    # Look at the free memory before the pass. If it is short, this rank keeps no more graphs. A pass that is a
    # collective does this, because no rank may fail in it or repeat it.
    CHECK_FIRST = "check first"
    # Try the pass. If it fails, drop the tower's graphs and repeat the pass without a graph. DDP uses this and not
    # CHECK_FIRST: every rank must build a graph in the first step, because all ranks then rebuild DDP's buckets
    # together.
    RETRY = "retry"
    # Try the pass. If it fails, raise OutOfMemoryError. A pass that updates the statistics of batch normalisation does
    # this, because a repeated one would update them twice.
    RAISE = "raise"


def short_memory_policy(encoder: Callable[..., object]) -> ShortMemoryPolicy:
    """What the encoder's first pass does where the memory is short for a graph."""
    if is_collective(encoder):
        return ShortMemoryPolicy.CHECK_FIRST
    return ShortMemoryPolicy.RAISE if batch_norms(encoder) else ShortMemoryPolicy.RETRY


class GraphPolicy(Enum):
    """What the first pass of a chunk does with its graph."""

    # The graph is kept: the chunk needs no second pass.
    KEEP = "keep"
    # The graph is built, measured, and dropped.
    MEASURE = "measure"
    # The forward pass runs with gradients enabled, but saves no tensors. A rank that has no memory for them does
    # this: it takes part in the same collectives as the ranks that build whole graphs.
    DISCARD = "discard"
    # No graph is built.
    NO_GRAPH = "no graph"

    @property
    def builds_whole_graph(self) -> bool:
        """Whether the graph is built with all that its backward pass needs."""
        return self in (GraphPolicy.KEEP, GraphPolicy.MEASURE)


@dataclass
class KeptGraphs:
    """The graphs of one tower in one step."""

    # Rows of a full chunk.
    chunk_rows: int = 0
    # Bytes of a full chunk's graph, the largest of all ranks; 0 before it is measured.
    graph_bytes: int = 0
    # The plan before the first pass: this rank keeps the graphs of the first `num_planned` chunks. The same number on
    # all ranks, unless one of them has run short of memory in an earlier tower of this step.
    num_planned: int = 0
    # The number of graphs that this rank does keep: fewer if its memory runs short.
    num_kept: int = 0
    # The outputs of the kept chunks that are still to be backpropagated, in order; they hold the graphs.
    outputs: list[ChunkOutput] = field(default_factory=list)
    # Whether the graphs of this step are measured, and the bytes of those measured so far.
    is_measuring: bool = False
    measured_bytes: list[int] = field(default_factory=list)
    memory_policy: ShortMemoryPolicy = ShortMemoryPolicy.RAISE
    # Whether a graph did not fit.
    is_out_of_memory: bool = False
    on_gpu: bool = False

    def choose_policy(self, i: int) -> GraphPolicy:
        """Choose what becomes of the graph of chunk i, the next one to be encoded.

        With CHECK_FIRST it looks at the free memory. If that is short, this rank keeps no more graphs in this step.
        """
        if i < self.num_kept and self.memory_policy is ShortMemoryPolicy.CHECK_FIRST and not self._has_memory():
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
        if i < self.num_planned and self.memory_policy is ShortMemoryPolicy.CHECK_FIRST:
            return GraphPolicy.DISCARD
        return GraphPolicy.MEASURE if self.is_measuring else GraphPolicy.NO_GRAPH

    def _has_memory(self) -> bool:
        """Whether one more graph fits. Always true on a CPU, where it is not known."""
        return not self.on_gpu or free_gpu_memory() >= HEADROOM * self.graph_bytes

    @contextmanager
    def graph_context(self, policy: GraphPolicy) -> Iterator[None]:
        """Context of a first pass: builds, measures or discards its graph."""
        match policy:
            case GraphPolicy.KEEP:
                yield
            case GraphPolicy.MEASURE:
                with measured_graph(self.on_gpu) as size:
                    yield
                self.measured_bytes.append(size())
            case GraphPolicy.DISCARD:
                with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
                    yield
            case GraphPolicy.NO_GRAPH:
                with torch.no_grad():
                    yield

    def agree_on_size(self, device: torch.device) -> None:
        """After the first pass, set `graph_bytes` to the largest graph of all ranks.

        A collective if the step measures. `device`: of the ranks' message.
        """
        if not self.is_measuring:
            return
        sizes = self.measured_bytes
        if len(sizes) > 2:
            # Leaves out the first chunk, which also allocates what later ones reuse, such as gathered weights. Of two
            # chunks the first one counts, because the second may be shorter.
            sizes = sizes[1:]
        self.graph_bytes = max(1, largest_of_ranks(max(sizes), device))

    def drop_all(self) -> None:
        """Drop the kept graphs, whose chunks then have a second pass, and keep no more in this step."""
        self.outputs.clear()
        self.num_kept = 0
        self.is_out_of_memory = True


@dataclass
class GraphBudget:
    """The memory for kept graphs, which the towers of a cache share: earlier ones take theirs first."""

    # The most bytes of kept graphs on a rank. 0: none is kept; math.inf: all are.
    max_bytes: float = 0
    # Whether the caller sets `max_bytes` later, after a step has measured a graph. It is 0 until then.
    awaits_limit: bool = False
    # Whether a graph did not fit in an earlier step. Then no more are kept.
    is_disabled: bool = False

    @property
    def needs_graph_bytes(self) -> bool:
        """Whether the bytes of a graph must be known."""
        return self.awaits_limit or 0 < self.max_bytes < math.inf

    def plan(
        self,
        last_step: KeptGraphs,
        earlier_towers: Sequence[KeptGraphs],
        chunk_rows: int,
        num_keepable: int,
        memory_policy: ShortMemoryPolicy,
        *,
        on_gpu: bool,
        reserved_bytes: float = 0,
    ) -> KeptGraphs:
        """Plan a tower's step, after the first passes of all earlier towers: how many graphs fit.

        `last_step`: the tower's graphs in its last step. `earlier_towers`: the graphs of earlier towers in this step.
        `chunk_rows`: rows of a full chunk, equally many on all ranks; where they change, a graph is measured again.
        `num_keepable`: the number of chunks, from the first on, whose graphs may be kept; 0 without a second pass.
        `on_gpu`: see `measured_graph`. `reserved_bytes`: a part of `max_bytes` that holds other tensors, such as the
        outputs of a frozen image tower.

        All ranks measure in the same steps, even if one of them keeps no more: `agree_on_size` is a collective.
        """
        graph_bytes = last_step.graph_bytes if last_step.chunk_rows == chunk_rows else 0
        memory = 0 if self.is_disabled else self.max_bytes - reserved_bytes
        kept_earlier = [(graphs.num_kept, graphs.graph_bytes) for graphs in earlier_towers]
        num_planned = num_that_fit(memory, num_keepable, graph_bytes, kept_earlier)
        return KeptGraphs(
            chunk_rows=chunk_rows,
            graph_bytes=graph_bytes,
            num_planned=num_planned,
            num_kept=num_planned,
            is_measuring=self.needs_graph_bytes and not graph_bytes and num_keepable > 0,
            memory_policy=memory_policy,
            on_gpu=on_gpu,
        )

    def disable_if_memory_short(self, graphs_of_towers: Sequence[KeptGraphs], device: torch.device) -> None:
        """After all first passes: if a graph did not fit, drop this step's graphs and keep none from now on.

        Each rank decides alone if no tower's pass communicates. Under FSDP2, which gathers weights, and with
        synchronised batch normalisation all ranks decide together. This call is then a collective in every step, unless
        `max_bytes` is 0, or a graph did not fit before. `device`: of the ranks' message.
        """
        is_short = any(graphs.is_out_of_memory for graphs in graphs_of_towers)
        keeps_graphs = self.max_bytes > 0 and not self.is_disabled
        may_repeat_alone = all(graphs.memory_policy is ShortMemoryPolicy.RETRY for graphs in graphs_of_towers)
        if keeps_graphs and not may_repeat_alone:
            is_short = bool(largest_of_ranks(is_short, device))
        if is_short:
            log.warning("cache.keep: out of memory for a kept graph; this process keeps none from now on")
            self.is_disabled = True
            for graphs in graphs_of_towers:
                graphs.drop_all()


def num_that_fit(memory: float, num_chunks: int, graph_bytes: float, earlier: Iterable[tuple[int, float]] = ()) -> int:
    """How many of a tower's chunks can keep their graphs, of `graph_bytes` each, in `memory` bytes for all towers.

    `graph_bytes`: 0 before it is measured; then none fits, unless the memory is math.inf. `earlier`: of each earlier
    tower the number of graphs kept, and the bytes of each. The replay of an earlier tower that keeps none builds one
    graph at a time, while the kept graphs of later towers are alive. Memory for that graph is reserved.
    """
    left = memory - sum(max(1, num_kept) * size for num_kept, size in earlier)
    if left == math.inf:
        return num_chunks
    return min(num_chunks, max(0, int(left // graph_bytes))) if graph_bytes else 0


def largest_of_ranks(value: int, device: torch.device) -> int:
    """A collective: the largest value of all ranks; this process's own without a process group.

    Uses the default group: this folder is a library, and has no `World` with a CPU group.
    """
    largest = torch.tensor(int(value), device=device)
    if dist.is_initialized():
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def is_on_gpu(encoder: Callable[..., object]) -> bool:
    """Whether the encoder is a module with a parameter on a GPU."""
    return isinstance(encoder, nn.Module) and any(p.is_cuda for p in encoder.parameters())


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
