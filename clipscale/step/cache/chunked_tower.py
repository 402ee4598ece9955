"""One encoder's two passes over its chunks.

The first pass may keep graphs. The replay repeats the other chunks with the same random numbers.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from clipscale.common.batch import Span, equal_spans
from clipscale.common.modules import is_trainable
from clipscale.common.rng import RandomState
from clipscale.common.signals import Poll
from clipscale.step.cache.batch_norm import batch_norm_preserved
from clipscale.step.cache.cast_weights import CastWeights
from clipscale.step.cache.checks import (
    Representation,
    check_output,
    refuse_batch_norm,
    refuse_graph,
    refuse_static_graph,
)
from clipscale.step.cache.encoder_io import ChunkOutput, LazyInput, ReorderedInput, lazy_input
from clipscale.step.cache.gradient_sync import can_sum_after_kept_graph, rearm_ddp_sync, sync_context
from clipscale.step.cache.kept_graphs import GraphPolicy, KeptGraphs, ShortMemoryPolicy


@dataclass
class ChunkedTower:
    """One encoder's two passes over its chunks, and what they keep of a step."""

    encoder: Callable[..., object]
    # Maps the encoder's output to the representations. None: the output is the representations.
    representation: Representation | None
    autocast: Callable[[], AbstractContextManager[object]]
    # Whether no later tower has the same encoder. The gradients are summed over ranks after its last chunk.
    is_last_use_of_encoder: bool
    # `GraphBudget.plan` makes them for each step.
    graphs: KeptGraphs = field(default_factory=KeptGraphs)
    # The representations of all rows, from the first pass until the replay has ended. A leaf tensor, which gets the
    # loss's gradient.
    representations: Tensor = field(default_factory=lambda: torch.empty(0))
    inputs: LazyInput | None = None
    num_rows: int = 0
    # Rows of a full chunk: the chunk size, or all rows of a smaller batch. It is the same on all ranks. Sorted captions
    # have chunks of other sizes, which differ between the ranks.
    chunk_rows: int = 0
    # The chunks, as ranges of positions in the input's own order.
    spans: list[Span] = field(default_factory=list)
    # For a `ReorderedInput`, the row of the batch at each of its positions; None if the rows are in the batch's order.
    batch_rows: Tensor | None = None
    # The random state before each chunk.
    random_states: list[RandomState] = field(default_factory=list)
    cast_weights: CastWeights = field(default_factory=CastWeights)
    # Whether a frozen encoder's output has been checked to require no gradient; see `needs_output_check`.
    has_checked_frozen_output: bool = False

    @property
    def has_second_pass(self) -> bool:
        """Whether the encoder trains, and gradients are enabled."""
        return torch.is_grad_enabled() and is_trainable(self.encoder)

    # ---- first pass ----

    def start_step(self, tower_input: object, size: int) -> None:
        """Divide the input into chunks of `size`, and prepare for their passes. Raises ValueError."""
        inputs = lazy_input(tower_input)
        self.num_rows = len(inputs)
        if self.num_rows == 0:
            raise ValueError("an empty batch has no gradient")
        self.inputs = inputs
        self.chunk_rows = min(size, self.num_rows)
        self.spans = equal_spans(self.num_rows, size)
        self.batch_rows = None
        if isinstance(inputs, ReorderedInput):
            self.spans = inputs.spans(size)
            self.batch_rows = inputs.rows(0, self.num_rows)
        self.random_states = []
        if self.has_second_pass:
            refuse_batch_norm(self.encoder, len(self.spans))
            refuse_static_graph(self.encoder)
        self.cast_weights.start_step(self.encoder, self.autocast, len(self.spans))

    @property
    def num_keepable(self) -> int:
        """The number of chunks, from the first on, whose graphs may be kept."""
        if not self.has_second_pass:
            return 0
        if self.is_last_use_of_encoder and not can_sum_after_kept_graph(self.encoder):
            return len(self.spans) - 1
        return len(self.spans)

    def encode(self, graphs: KeptGraphs, before_chunk: Poll) -> Tensor:
        """First pass. Returns the representations of all rows. `graphs`: how many graphs it keeps, by the plan."""
        self.graphs = graphs
        for i in range(len(self.spans)):
            before_chunk()
            self.random_states.append(RandomState.now())
            chunk = self.encode_chunk(i)
            if i == 0:
                self.representations = chunk.new_empty((self.num_rows, *chunk.shape[1:]))
            self.representations[self.rows_of_chunk(i)] = chunk
        graphs.agree_on_size(self.representations.device)
        return self.representations.requires_grad_(self.has_second_pass)

    def encode_chunk(self, i: int) -> Tensor:
        """The first pass of chunk i; without a graph, if the graph that it was to keep does not fit.

        Returns its representations, detached.
        """
        policy = self.graphs.choose_policy(i)
        try:
            return self.first_pass(i, policy)
        except torch.OutOfMemoryError:
            if policy is not GraphPolicy.KEEP or self.graphs.memory_policy is not ShortMemoryPolicy.RETRY:
                raise
        # This is after the handler, because the error holds the tensors of the failed pass until the handler ends.
        self.graphs.drop_all()
        self.random_states[i].restore()
        return self.first_pass(i, self.graphs.planned_policy(i))

    def first_pass(self, i: int, policy: GraphPolicy) -> Tensor:
        """Encode chunk i, and keep, measure or discard its graph. Returns its representations, detached."""
        checks_output = self.needs_output_check
        context: AbstractContextManager[object] = nullcontext() if checks_output else self.graphs.graph_context(policy)
        with self.pass_context(i, builds_graph=policy.builds_whole_graph), context:
            out = self.forward_chunk(i)
        if checks_output:
            refuse_graph(out)
            self.has_checked_frozen_output = True
        if policy is GraphPolicy.KEEP:
            self.graphs.outputs.append(out)
        return out.representations.detach()

    @property
    def needs_output_check(self) -> bool:
        """Whether the next pass runs with gradients enabled, to find a graph in the output of a frozen encoder.

        Such a graph comes from a parameter that the module does not list, or from an input. It would be lost, because
        the encoder has no second pass.
        """
        return torch.is_grad_enabled() and not self.has_second_pass and not self.has_checked_frozen_output

    # ---- second pass ----

    def replay(self, before_chunk: Poll, loss_gradient: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Second pass. The first chunks may have kept graphs. The others are encoded again, with a graph.

        Each kept graph has its own backward pass: a joint one would sum gradients in the weights' type, bf16 perhaps.

        `loss_gradient(loss)`: the gradient with respect to a chunk's own loss. Returns the chunks' own losses.
        """
        gradient = self.representations.grad
        losses: list[Tensor] = []
        if gradient is None:
            return losses
        with batch_norm_preserved(self.encoder), RandomState.now().preserved():
            for i in range(len(self.spans)):
                before_chunk()
                with self.pass_context(i, builds_graph=True, backpropagates=True):
                    out = self.output_with_graph(i)
                    backward_chunk(out, gradient[self.rows_of_chunk(i)], loss_gradient)
                if out.loss is not None:
                    losses.append(out.loss.detach())
        return losses

    def output_with_graph(self, i: int) -> ChunkOutput:
        """The output of chunk i, the next one to backpropagate: the kept one, or that of another forward pass.

        The other pass has the random numbers of the first one.
        """
        if self.graphs.outputs:
            out = self.graphs.outputs.pop(0)
            return rearm_ddp_sync(self.encoder, out) if self.has_last_backward(i) else out
        self.random_states[i].restore()
        return self.forward_chunk(i)

    def end_step(self) -> None:
        """After the replay, drop gradients of zeros (see `CastWeights.end_step`), and release the batch."""
        self.cast_weights.end_step()
        self.discard_step()

    def discard_step(self) -> None:
        """Release the batch, its representations, the kept graphs and the cast weights."""
        self.representations = torch.empty(0)
        self.graphs.outputs.clear()
        self.inputs = None
        self.cast_weights.clear()

    # ---- one chunk, in both passes ----

    @contextmanager
    def pass_context(self, i: int, *, builds_graph: bool, backpropagates: bool = False) -> Iterator[None]:
        """Context of each pass of chunk i: decides whether ranks sum its gradients, and which weights its layers use.

        `builds_graph`: see `CastWeights.in_pass`. `backpropagates`: whether the backward pass runs inside, too.
        """
        is_last_backward = self.has_last_backward(i)
        with (
            # A kept graph's backward pass comes later. DDP is armed before it, by `rearm_ddp_sync`.
            sync_context(self.encoder, is_last_backward=is_last_backward and backpropagates),
            self.cast_weights.in_pass(builds_graph=builds_graph, is_last_backward=is_last_backward),
        ):
            yield

    def forward_chunk(self, i: int) -> ChunkOutput:
        """One forward pass over chunk i, checked. Raises ValueError."""
        assert self.inputs is not None
        start, stop = self.spans[i]
        arguments = self.inputs.chunk(start, stop)
        with self.autocast():
            if isinstance(arguments, Mapping):
                out = self.encoder(**arguments)
            else:
                out = self.encoder(*(arguments if isinstance(arguments, tuple) else (arguments,)))
            representations, loss = out if isinstance(out, ChunkOutput) else (out, None)
            if self.representation is not None:
                representations = self.representation(representations)
        check_output(representations, loss, stop - start, is_mapped=self.representation is not None)
        return ChunkOutput(representations, loss)

    def rows_of_chunk(self, i: int) -> slice | Tensor:
        """The rows of the batch in chunk i, as an index."""
        start, stop = self.spans[i]
        return slice(start, stop) if self.batch_rows is None else self.batch_rows[start:stop]

    def has_last_backward(self, i: int) -> bool:
        """Whether the backward pass of chunk i is the encoder's last one in the step."""
        return self.is_last_use_of_encoder and i == len(self.spans) - 1


def backward_chunk(out: ChunkOutput, gradient: Tensor, loss_gradient: Callable[[Tensor], Tensor]) -> None:
    """One backward pass of a chunk. `gradient`: of its representations; `loss_gradient`: see `ChunkedTower.replay`.

    A chunk with a loss of its own has two roots. A root that depends on frozen weights alone has no graph, and is left
    out. Raises ValueError if no root has a graph.
    """
    roots = [(out.representations, gradient)]
    if out.loss is not None:
        roots.append((out.loss, loss_gradient(out.loss)))
    with_graph = [(root, gradient_of_root) for root, gradient_of_root in roots if root.requires_grad]
    if not with_graph:
        raise ValueError(
            "an encoder that trains returned a tensor without a graph to its parameters, so it learns nothing: leave "
            "out its .detach() or torch.no_grad(), or give a module that is frozen (.requires_grad_(False))"
        )
    torch.autograd.backward([root for root, _ in with_graph], [gradient_of_root for _, gradient_of_root in with_graph])
