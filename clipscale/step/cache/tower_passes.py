"""One encoder's two passes over its chunks: the first one without a graph, the second one with a graph and the same
random numbers."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clipscale.batch.chunks import Span, equal_spans
from clipscale.common.modules import trains
from clipscale.common.poll import Poll
from clipscale.common.rng import RandomState
from clipscale.step.cache.encoder_io import ChunkOutput, LazyInput, ReorderedInput, lazy_input
from clipscale.step.cache.kept_graphs import GraphPolicy, KeptGraphs, ShortMemoryPolicy
from clipscale.step.cache.pass_contexts import (
    CastWeights,
    batch_norm_preserved,
    batch_norms,
    can_sum_after_kept_graph,
    is_ddp,
    rearm_ddp_sync,
    sync_context,
)

# Maps an encoder's output to its tensor.
Representation = Callable[[Any], Tensor]


@dataclass
class TowerPasses:
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
    spans: list[Span] = field(default_factory=list)
    # Row of the batch at each position of a `ReorderedInput`.
    order: Tensor | None = None
    # The random state before each chunk.
    random_states: list[RandomState] = field(default_factory=list)
    cast_weights: CastWeights = field(default_factory=CastWeights)
    # Whether a frozen encoder's output has been checked to require no gradient; see `forward_with_policy`.
    frozen_output_checked: bool = False

    @property
    def has_second_pass(self) -> bool:
        """Whether the encoder trains, and gradients are enabled."""
        return torch.is_grad_enabled() and trains(self.encoder)

    # ---- first pass ----

    def start_step(self, tower_input: object, size: int) -> None:
        """Divide the input into chunks of `size`, and prepare for their passes. Raises ValueError."""
        inputs = lazy_input(tower_input)
        self.num_rows = len(inputs)
        if self.num_rows == 0:
            raise ValueError("an empty batch has no gradient")
        self.inputs = inputs
        self.spans = equal_spans(self.num_rows, size)
        self.order = None
        if isinstance(inputs, ReorderedInput):
            self.spans = inputs.spans(size)
            self.order = inputs.rows(0, self.num_rows)
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
        """First pass. Returns the representations of all rows. `graphs`: the plan for the graphs of its chunks."""
        self.graphs = graphs
        for i in range(len(self.spans)):
            before_chunk()
            self.random_states.append(RandomState.now())
            out = self.encode_chunk(i)
            if i == 0:
                self.representations = out.new_empty((self.num_rows, *out.shape[1:]))
            self.representations[self.rows(i)] = out
        graphs.agree_on_size(self.representations.device)
        return self.representations.requires_grad_(self.has_second_pass)

    def encode_chunk(self, i: int) -> Tensor:
        """The first pass of chunk i; `KeptGraphs` decides what becomes of its graph. Its representations, detached."""
        policy = self.graphs.choose_policy(i)
        with (
            # DDP is not armed here: a kept graph is armed before its backward pass (`rearm_ddp_sync`). But cast weights
            # need to know of that pass.
            sync_context(self.encoder, is_last_backward=False),
            self.cast_weights.in_pass(
                builds_graph=policy.builds_whole_graph, is_last_backward=self.has_last_backward(i)
            ),
        ):
            try:
                return self.forward_with_policy(policy, i)
            except torch.OutOfMemoryError:
                if policy is not GraphPolicy.KEEP or self.graphs.short_memory is not ShortMemoryPolicy.RETRY:
                    raise
            # After the handler, because until it ends the error holds the tensors of the failed pass.
            self.graphs.give_up()
            self.random_states[i].restore()
            return self.forward_with_policy(self.graphs.planned_policy(i), i)

    def forward_with_policy(self, policy: GraphPolicy, i: int) -> Tensor:
        """Run chunk i, and do with its graph what the policy says. Returns its representations, detached.

        An encoder without trainable parameters has no second pass. Its first chunk runs with gradients enabled,
        as a check: a graph can then come only from a parameter that the module does not list, or from an input that
        requires a gradient. Raises ValueError for these.
        """
        checks_frozen_output = torch.is_grad_enabled() and not self.has_second_pass and not self.frozen_output_checked
        with nullcontext() if checks_frozen_output else self.graphs.building(policy):
            out = self.forward_chunk(i)
        if checks_frozen_output:
            refuse_gradient(out)
            self.frozen_output_checked = True
        if policy is GraphPolicy.KEEP:
            self.graphs.outputs.append(out)
        return out.representations.detach()

    # ---- second pass ----

    def replay(self, before_chunk: Poll, loss_gradient: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Second pass: backpropagate through the kept graphs, then replay the other chunks.

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
                is_last_backward = self.has_last_backward(i)
                with (
                    sync_context(self.encoder, is_last_backward=is_last_backward),
                    self.cast_weights.in_pass(builds_graph=True, is_last_backward=is_last_backward),
                ):
                    out = self.output_with_graph(i, is_last_backward=is_last_backward)
                    backward_chunk(out, gradient[self.rows(i)], loss_gradient)
                if out.loss is not None:
                    losses.append(out.loss.detach())
        return losses

    def output_with_graph(self, i: int, *, is_last_backward: bool) -> ChunkOutput:
        """The output of chunk i, the next one to backpropagate: from its kept graph, or from another pass with the
        random numbers of its first one.

        `is_last_backward`: whether its backward pass is the encoder's last one in the step.
        """
        if self.graphs.outputs:
            out = self.graphs.outputs.pop(0)
            return rearm_ddp_sync(self.encoder, out) if is_last_backward else out
        self.random_states[i].restore()
        return self.forward_chunk(i)

    def end_step(self) -> None:
        """Let go of the batch, its representations and the cast weights."""
        self.representations = torch.empty(0)
        self.inputs = None
        self.cast_weights.end_step()

    # ---- one chunk ----

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
            out, loss = out if isinstance(out, ChunkOutput) else (out, None)
            if self.representation is not None:
                out = self.representation(out)
        if not isinstance(out, Tensor):
            source = "an encoder" if self.representation is None else "representation="
            raise ValueError(
                f"{source} returned a {type(out).__name__}, not a tensor; representation= takes a function that maps "
                "an encoder's output to its tensor, one row for each sample"
            )
        if out.shape[0] != stop - start:
            raise ValueError(f"an encoder returned {out.shape[0]} rows for {stop - start} samples")
        if loss is not None and loss.shape != ():
            raise ValueError(f"ChunkOutput: a chunk's loss is a sum over its samples, 0-d, not {tuple(loss.shape)}")
        return ChunkOutput(out, loss)

    def rows(self, i: int) -> slice | Tensor:
        """The rows of the batch in chunk i, as an index."""
        start, stop = self.spans[i]
        return slice(start, stop) if self.order is None else self.order[start:stop]

    def has_last_backward(self, i: int) -> bool:
        """Whether the backward pass of chunk i is the encoder's last one in the step."""
        return self.is_last_use_of_encoder and i == len(self.spans) - 1


def backward_chunk(out: ChunkOutput, gradient: Tensor, loss_gradient: Callable[[Tensor], Tensor]) -> None:
    """One backward pass of a chunk. `gradient`: of its representations; `loss_gradient`: see `TowerPasses.replay`.

    A chunk with a loss of its own has two roots. autograd gets those that have a graph: the other one may depend on
    frozen weights alone. Raises ValueError if none has one.
    """
    roots = [(out.representations, gradient)]
    if out.loss is not None:
        roots.append((out.loss, loss_gradient(out.loss)))
    trained = [(root, value) for root, value in roots if root.requires_grad]
    if not trained:
        raise ValueError(
            "an encoder that trains returned a tensor without a graph to its parameters, so it learns nothing: leave "
            "out its .detach() or torch.no_grad(), or give a module that is frozen (.requires_grad_(False))"
        )
    torch.autograd.backward([root for root, _ in trained], [value for _, value in trained])


def refuse_gradient(out: ChunkOutput) -> None:
    """Raise ValueError if the output of an encoder without trainable parameters has a graph: it would be lost."""
    if out.representations.requires_grad or (out.loss is not None and out.loss.requires_grad):
        raise ValueError(
            "a module without trainable parameters returned a tensor that requires a gradient: of an input, or of a "
            "parameter that the module uses but does not list; give a function that calls it, which has two passes"
        )


def refuse_batch_norm(encoder: Callable[..., object], num_chunks: int) -> None:
    """Raise ValueError if batch normalisation in training mode does not see the whole batch at once."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    for name, module in batch_norms(encoder).items():
        problem = f"{name} is batch normalisation in training mode, which mixes the samples of a batch"
        if num_chunks > 1:
            raise ValueError(
                f"{problem}: {num_chunks} chunks would be another function; freeze it (.eval()) or use one chunk"
            )
        if world_size > 1 and not isinstance(module, nn.SyncBatchNorm):
            raise ValueError(
                f"{problem}: over {world_size} ranks it would see only a part of them; synchronise it "
                "(nn.SyncBatchNorm, on GPUs) or freeze it (.eval())"
            )


def refuse_static_graph(encoder: Callable[..., object]) -> None:
    """Raise ValueError for DDP with static_graph=True, a promise that all passes are alike."""
    if is_ddp(encoder) and encoder.static_graph:
        raise ValueError(
            "DDP with static_graph=True counts one backward pass for each forward pass, but the first pass of a chunk "
            "has none; leave static_graph out"
        )
