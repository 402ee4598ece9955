"""The gradient cache (Gao et al. 2021, arXiv 2101.06983, section 3): a batch's exact gradient, chunk by chunk.

`GradCache.step` is the method. docs/step.md explains it, and why the gradient is exact. The calls of a whole training
step are a tree in docs/contributing/architecture.md.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from clipscale.common.batch import equal_spans
from clipscale.common.signals import Poll, no_poll
from clipscale.step.cache.checks import (
    Representation,
    check_loss,
    checked_autocast,
    checked_chunks,
    checked_keep_bytes,
    checked_representations,
    checked_scaler,
    refuse_scaled,
)
from clipscale.step.cache.chunked_tower import ChunkedTower
from clipscale.step.cache.kept_graphs import GraphBudget, KeptGraphs, is_on_gpu, short_memory_policy


class GradCache:
    """Exact gradients of `loss(*representations)` at any batch size, for any encoders.

    `step(*inputs)` adds the gradient of the whole batch to `.grad` of every parameter of the encoders and of the loss.
    It calls `encode`, `loss`, `backward` and `replay`; a caller may call them one by one instead.

    Args:
        encoders: one module or callable per tower. The same module may serve several towers.
            Output: a tensor (samples, ...) for its chunk, or what `representation` takes. With a graph it may be a
                `ChunkOutput`, which adds a loss of its own.
            Frozen modules: one without trainable parameters has no replay, and a loss of its own is not counted.
            Random numbers: from torch's default generators, whose states are restored for the replay.
            Ranks: under DDP, or FSDP2's `fully_shard`, the gradients of each module are synchronised once, with its
                last chunk. Other wrappers: see `GradientSync` and `SupportsNoSync`.
        loss: maps one representation tensor per tower, over the whole (local) batch, to a scalar.
        chunks: samples per chunk, one size for all towers or one per tower. The last chunk may be shorter.
        keep_bytes: memory for graphs that are kept from the first pass, so that their chunks need no replay. It is the
            same on all ranks, and may be changed between steps, as `chunks` may. The values:
                0: keep none
                math.inf: keep all
                a number: measure a graph in the first step, then keep as many as fit
                None: measure a graph, and keep none yet
            If a graph does not fit after all: see `ShortMemoryPolicy` and `GraphBudget.disable_if_memory_short`.
        autocast: makes the context in which encoders run, a new one for each chunk.
        scaler: a gradient scaler for fp16, with which `backward` scales the loss. `scaler.step(optimizer)` and
            `scaler.update()` remain the caller's. Do not scale the loss as well: its gradients would be multiplied
            twice.
        representation: maps an encoder's output (a tuple, transformers' ModelOutput) to its tensor (samples, ...), in
            both passes; one function for all towers, or one or None per tower. It has no parameters of its own.

    Raises ValueError for an invalid option.

    Dense retrieval with hard negatives, as in the paper's first experiments:

        cache = GradCache([query_encoder, passage_encoder], loss, chunks=[64, 16])
        optimizer.zero_grad()
        value = cache.step(query_tokens, passage_tokens)      # dicts of tensors; positives first, then hard negatives
        optimizer.step()

    with `loss = lambda q, p: clipscale.contrastive_loss(q, p, 1.0, objective="softmax_image")`. This loss needs its
    gradients summed over ranks. DDP and FSDP2 average them: multiply the loss by the number of ranks there.
    """

    def __init__(
        self,
        encoders: Sequence[Callable[..., object]],
        loss: Callable[..., Tensor],
        *,
        chunks: int | Sequence[int],
        keep_bytes: float | None = 0,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
        scaler: "torch.amp.GradScaler | None" = None,
        representation: Representation | Sequence[Representation | None] | None = None,
    ) -> None:
        # May be changed between steps. The first pass checks the new value.
        self.chunks = checked_chunks(chunks, len(encoders))
        self.encoders = encoders
        self.loss = loss
        self.scaler = checked_scaler(scaler)
        functions = checked_representations(representation, len(encoders))
        make_context = checked_autocast(autocast)
        self.towers = [
            ChunkedTower(encoder, function, make_context, is_last_use_of_encoder=encoder not in encoders[i + 1 :])
            for i, (encoder, function) in enumerate(zip(encoders, functions, strict=True))
        ]
        self.graph_budget = GraphBudget()
        self.keep_bytes = keep_bytes
        # The sum of the chunks' own losses in the last step, detached and not scaled; None if chunks had none.
        self.chunk_loss: Tensor | None = None

    def step(self, *inputs: object, **loss_options: object) -> Tensor:
        """Gradients of the loss over one batch, one input per tower; returns the loss, detached and not scaled.

        `loss_options`: keywords of the loss, over the whole batch. The chunks' own losses are added to it. Raises as
        `encode`, `backward` and `replay` do.
        """
        with self._discarded_on_error():
            representations = self.encode(*inputs)  # chunk by chunk; graphs are kept as `keep_bytes` allows
            value = self.loss(*representations, **loss_options)
            self.backward(value)  # to the representations
            self.replay()  # chunk by chunk, with a graph: from the representations' gradients to the parameters'
        return value.detach() if self.chunk_loss is None else value.detach() + self.chunk_loss

    def encode(self, *inputs: object, before_chunk: Poll = no_poll) -> list[Tensor]:
        """First pass: the representations of every tower, as leaf tensors. A trained tower's require a gradient.

        An input is a tensor, a nesting of tuples, lists and mappings of tensors with equal first dimensions, or a
        `LazyInput`. A tuple becomes positional arguments of the encoder, a mapping keywords. The representations of a
        `ReorderedInput` are in the batch's order. `before_chunk()` is called before each chunk; what it raises ends the
        step.

        Raises ValueError for

        - another number of inputs than of encoders, or `chunks` that were set to an invalid value;
        - an empty input, or one whose tensors have unequal lengths;
        - an encoder's output that is not a tensor, or has another number of rows than its input;
        - a chunk's own loss that is not a scalar;
        - a module without trainable parameters whose output requires a gradient all the same: of an input, or of a
          parameter that it does not list;
        - batch normalisation in training mode over several chunks, or over several ranks without synchronisation;
        - DDP with static_graph=True.

        Raises OutOfMemoryError if a pass without a graph does not fit; for one with a kept graph see
        `ShortMemoryPolicy`.
        """
        if len(inputs) != len(self.towers):
            raise ValueError(f"{len(inputs)} inputs for {len(self.towers)} encoders: one each, perhaps a tuple")
        return [self.encode_tower(i, tower_input, before_chunk) for i, tower_input in enumerate(inputs)]

    def encode_tower(
        self, i: int, tower_input: object, before_chunk: Poll = no_poll, *, reserved_bytes: float = 0
    ) -> Tensor:
        """The first pass of tower i, after all earlier towers have had theirs; see `encode`.

        `reserved_bytes`: a part of `keep_bytes` that the input uses between the passes, for a frozen tower's outputs.
        """
        tower = self.towers[i]
        with self._discarded_on_error():
            self.chunks = checked_chunks(self.chunks, len(self.towers))
            tower.start_step(tower_input, self.chunks[i])
            graphs = self.graph_budget.plan(
                tower.graphs,
                self.graphs[:i],
                tower.chunk_rows,
                tower.num_keepable,
                short_memory_policy(tower.encoder),
                on_gpu=is_on_gpu(tower.encoder),
                reserved_bytes=reserved_bytes,
            )
            return tower.encode(graphs, before_chunk)

    def backward(self, value: Tensor) -> None:
        """Gradients of the loss with respect to the representations and the loss's own parameters.

        `value`: the loss, not scaled; see `scaler`.

        Raises ValueError for

        - a value that is not one number with a graph;
        - a loss that does not use the representations of an encoder that trains;
        - a loss that ends in `scaler.scale(...)` of the same scaler. Any other scale looks like a part of the loss.
        """
        check_loss(value)
        refuse_scaled(value, self.scaler)
        (self.scaler.scale(value) if self.scaler else value).backward()
        for i, tower in enumerate(self.towers):
            if tower.has_second_pass and tower.representations.grad is None:
                raise ValueError(f"the loss does not use the representations of encoder {i}: it can learn nothing")

    def replay(self, before_chunk: Poll = no_poll, *, chunk_loss_weight: float = 1.0) -> None:
        """Second pass: encode every chunk again, with a graph, and backpropagate its rows of the gradient.

        `before_chunk`: see `encode`. `chunk_loss_weight`: the weight of the chunks' own losses in the gradients;
        `chunk_loss` is their unweighted sum.

        Raises ValueError

        - if `backward` was not called before;
        - if an encoder that trains returns an output without a graph;
        - for a chunk's own loss that is scaled already.
        """
        for i, tower in enumerate(self.towers):
            if tower.has_second_pass and tower.representations.grad is None:
                raise ValueError(f"encoder {i} has no gradient to replay: encode and backward come before")
        self.graph_budget.disable_if_memory_short(self.graphs, self.towers[0].representations.device)

        def loss_gradient(loss: Tensor) -> Tensor:
            refuse_scaled(loss, self.scaler)
            weight = torch.full_like(loss, chunk_loss_weight)
            return self.scaler.scale(weight) if self.scaler else weight

        losses = []
        with self._discarded_on_error():
            for tower in self.towers:
                losses += tower.replay(before_chunk, loss_gradient)
                tower.end_step()
        self.chunk_loss = _sum(losses) if losses else None

    def discard_step(self) -> None:
        """Discard an unfinished step: its batch, representations and kept graphs.

        An error in a tower's pass, or anywhere in `step`, does this, too.
        """
        for tower in self.towers:
            tower.discard_step()

    @contextmanager
    def _discarded_on_error(self) -> Iterator[None]:
        """Context of a part of a step: an error discards the step."""
        try:
            yield
        except BaseException:
            self.discard_step()
            raise

    @property
    def keep_bytes(self) -> float | None:
        """The argument, which may be set between steps. The rest of the cache reads it in `graph_budget`."""
        return None if self.graph_budget.awaits_limit else self.graph_budget.max_bytes

    @keep_bytes.setter
    def keep_bytes(self, value: float | None) -> None:
        checked = checked_keep_bytes(value)
        self.graph_budget.awaits_limit = checked is None
        self.graph_budget.max_bytes = 0 if checked is None else checked

    @property
    def has_second_pass(self) -> list[bool]:
        """Whether each tower has a second pass: its encoder trains, and gradients are enabled."""
        return [tower.has_second_pass for tower in self.towers]

    @property
    def num_kept_graphs(self) -> list[int]:
        """The number of each tower's chunks whose graphs this step keeps."""
        return [graphs.num_kept for graphs in self.graphs]

    @property
    def graph_bytes(self) -> int:
        """Bytes of a chunk's graph of the first tower that has a second pass; 0 before it is measured."""
        return next((graphs.graph_bytes for graphs in self.graphs if graphs.graph_bytes), 0)

    @property
    def graphs(self) -> list[KeptGraphs]:
        """The graphs of each tower, in its last step."""
        return [tower.graphs for tower in self.towers]

    def num_chunk_passes(self, samples: int) -> int:
        """The number of chunk passes in a step of this many samples. `before_chunk` is called before each.

        An estimate for a tower whose first pass has not begun, unless its input has a row for each sample, in order.
        """
        total = 0
        for tower, size in zip(self.towers, self.chunks):
            passes = 2 if tower.has_second_pass else 1
            total += passes * (len(tower.spans) or len(equal_spans(samples, size)))
        return total


def _sum(losses: list[Tensor]) -> Tensor:
    """The sum of the losses, in at least float32."""
    stacked = torch.stack(losses)
    return stacked.sum(dtype=torch.promote_types(stacked.dtype, torch.float32))
