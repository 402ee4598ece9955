"""The gradient cache (Gao et al. 2021, arXiv 2101.06983, section 3): the exact gradient of a loss over a whole batch, chunk by chunk.

A contrastive loss couples samples only through their representations, so three passes suffice:
1. Encode every chunk without a graph.
2. Compute the loss of all representations and its gradient with respect to them.
3. Encode every chunk again, with a graph and the same random numbers, and backpropagate its rows of that gradient.
By the chain rule the sum over chunks is the gradient of one graph over the whole batch.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map

from clipscale.common.rng import RandomState
from clipscale.step.kept_graphs import CHECKPOINTED, ActivationBudget, KeptGraphs, Switch
from clipscale.step.pass_contexts import (
    expecting,
    expects,
    gradient_sync,
    groups_of,
    highest_of,
    modules_of,
    rebuild_buckets,
    unchanged_buffers,
)

log = logging.getLogger(__name__)

UNLIMITED = 2**62
"""Stands for an infinite budget among integers."""


@runtime_checkable
class Chunked(Protocol):
    """An encoder's input that loads its rows on demand, from host memory for example."""

    def __len__(self) -> int: ...

    def chunk(self, start: int, stop: int) -> Any:
        """Arguments of the encoder for samples start..stop: a tuple, a dict of keywords, or a single value."""


@runtime_checkable
class Arranged(Chunked, Protocol):
    """A `Chunked` input that orders and cuts its samples by itself, captions by their length for example."""

    def spans(self, size: int) -> list[tuple[int, int]]:
        """The chunks as ranges start..stop of the input's own order; `size` is the tower's samples per chunk."""

    def rows(self, start: int, stop: int) -> Tensor:
        """The row of the batch of each sample start..stop of that order: (stop - start,) int64."""


class GradCache:
    """Exact gradients of `loss(*representations)` at any batch size, for any encoders.

    `step(*inputs)` adds the gradient of one graph over the whole batch to `.grad` of every parameter of the encoders and of the loss.
    `encode`, `backward` and `replay` are its parts, for callers that do something between them.

    Args:
        encoders: one module or callable per tower; each maps its chunk to a tensor whose first dimension counts the samples. The same
            module may serve several towers. A module without trainable parameters is encoded once and not replayed.
            Under DDP or FSDP2 the gradients of each module are synchronised once, with its last chunk. Any other wrapper with a context
            manager `no_sync()` is treated like DDP.
        loss: maps one representation tensor per tower, over the whole (local) batch, to a scalar.
        chunks: samples per chunk, one size for all towers or one per tower. The last chunk may be shorter; a size beyond the batch
            means one chunk.
        keep_bytes: memory for graphs kept from the first pass, whose chunks need no replay. 0: none; math.inf: all. Graphs are
            measured, and chunks are kept in order while the next one fits. Encoders that communicate in each pass (FSDP2, tensor
            parallelism, synchronised batch normalisation) keep the same graphs on all ranks of their groups; those of FSDP1 keep none.
        checkpointing: for each encoder None, or a function that turns its activation checkpointing, which is off, on and off. Then graphs
            are kept checkpointed first, and whole with the memory that is left (`clipscale.step.kept_graphs`).
        autocast: makes the context in which encoders run. Each chunk gets a new one.
        scaler: a gradient scaler for fp16. It scales the loss before the backward pass.
        highest: returns the largest of every rank's integers, one by one, on every rank. If given, all ranks have the least budget and
            the largest costs of any rank for kept graphs. None: only where encoders communicate in each pass, through their groups.

    `after_chunk(tower, rows)`, if set, is called when the second pass has added the gradient of `rows` samples of that tower.
    `before_chunk()` is called before each chunk in both passes, of kept graphs too; what it raises ends the step.

    Raises ValueError for chunk sizes below 1, input tensors of unequal length, an encoder whose output has another number of rows than
    its input, a loss that does not use a representation, and batch normalisation in training mode over more than one chunk, or over
    several ranks without synchronisation.

    Dense retrieval with hard negatives, as in the paper's first experiments:

        cache = GradCache([query_encoder, passage_encoder], loss, chunks=[64, 16])
        optimizer.zero_grad()
        value = cache.step(query_tokens, passage_tokens)      # dicts of tensors; positives first, then hard negatives
        optimizer.step()

    with `loss = lambda q, p: clipscale.contrastive_loss(q, p, 1.0, objective="softmax_image")`.
    """

    def __init__(
        self,
        encoders: Sequence[Callable[..., Tensor]],
        loss: Callable[..., Tensor],
        *,
        chunks: int | Sequence[int],
        keep_bytes: float = 0,
        checkpointing: Sequence[Switch | None] | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        scaler: "torch.amp.GradScaler | None" = None,
        highest: Callable[..., list[int]] | None = None,
    ) -> None:
        sizes = [chunks] * len(encoders) if isinstance(chunks, int) else list(chunks)
        if len(sizes) != len(encoders):
            raise ValueError(f"chunks={chunks!r} must name one size, or one for each of the {len(encoders)} encoders")
        if min(sizes) < 1:
            raise ValueError(f"chunks={chunks!r}: a chunk holds at least one sample")
        switches = [None] * len(encoders) if checkpointing is None else list(checkpointing)
        self.loss, self.scaler, self.highest = loss, scaler, highest
        self.after_chunk: Callable[[int, int], None] | None = None
        self.before_chunk: Callable[[], None] = lambda: None
        if keep_bytes and any(isinstance(module, FullyShardedDataParallel) for module in modules_of(encoders)):
            log.warning("keep_bytes=%s: no graphs are kept under FSDP1; shard with torch's fully_shard", keep_bytes)
            keep_bytes = 0
        self.budget = ActivationBudget(keep_bytes)
        self._groups = groups_of(encoders)
        self.towers = [
            _Tower(
                encoder,
                size,
                KeptGraphs(self.budget, switch, equal=bool(self._groups)),
                autocast,
                last=encoder not in encoders[i + 1 :],
            )
            for i, (encoder, size, switch) in enumerate(zip(encoders, sizes, switches, strict=True))
        ]

    def step(self, *inputs: Any) -> Tensor:
        """Gradients of the loss over one batch, one input per tower; returns the loss, detached."""
        representations = self.encode(*inputs)
        value = self.loss(*representations)
        self.backward(value)
        self.replay()
        return value.detach()

    def encode(self, *inputs: Any) -> list[Tensor]:
        """First pass: the representations of every tower, as leaf tensors. Those of a trained tower require a gradient.

        An input is a tensor, a nesting of tuples, lists and dicts of tensors with equal first dimensions, or a `Chunked`. The
        representations of an `Arranged` input are in the batch's order.
        """
        if len(inputs) != len(self.towers):
            raise ValueError(f"{len(inputs)} inputs for {len(self.towers)} encoders")
        self.budget.used = 0
        self._agree()
        for i, tower in enumerate(self.towers):
            tower.begin()
            rebuild_buckets(tower.encoder)
            tower.graphs.later = sum(later.least for later in self.towers[i + 1 :])
        return [tower.encode(batch, self.before_chunk) for tower, batch in zip(self.towers, inputs, strict=True)]

    def _agree(self) -> None:
        """Over ranks, the least budget and the largest costs."""
        highest = self.highest
        if highest is None and self._groups:
            encoders = [tower.encoder for tower in self.towers]
            device = next((p.device for module in modules_of(encoders) for p in module.parameters()), None)
            highest = partial(highest_of, self._groups if dist.is_initialized() else [], device)
        if highest is None:
            return
        graphs = [tower.graphs for tower in self.towers]
        costs = [cost for one in graphs for cost in one.measured.values()]
        negative, *costs = highest(-int(min(self.budget.bytes, self.budget.limit, UNLIMITED)), *costs)
        self.budget.bytes = math.inf if -negative == UNLIMITED else -negative
        for one in graphs:
            one.costs.update({kind: costs.pop(0) for kind in one.measured})

    def ranges(self, tower: int, rows: int) -> Iterator[tuple[int, int]]:
        """The row ranges that both passes of a tower over a batch ask for, in order. Read at most one range ahead of the passes.

        Not for an `Arranged` input, which cuts its own. The second pass leaves out kept chunks, so its ranges are known when the first
        pass reaches its last chunk.
        """
        return self.towers[tower].ranges(rows)

    def backward(self, value: Tensor) -> None:
        """Gradients of the loss with respect to the representations and the loss's own parameters."""
        (self.scaler.scale(value) if self.scaler else value).backward()
        for i, tower in enumerate(self.towers):
            if tower.trained and tower.representations.grad is None:
                raise ValueError(
                    f"the loss does not use the representations of encoder {i}: nothing can be learnt there"
                )

    def replay(self) -> None:
        """Second pass: encode every chunk again, with a graph, and backpropagate its rows of the representations' gradient."""
        for i, tower in enumerate(self.towers):
            for rows in tower.replay(self.before_chunk):
                if self.after_chunk:
                    self.after_chunk(i, rows)
        for tower in self.towers:
            tower.representations = torch.empty(0)


@dataclass
class _Tower:
    """One encoder's two passes over its chunks."""

    encoder: Callable[..., Tensor]
    size: int
    graphs: KeptGraphs
    autocast: Callable[[], AbstractContextManager[Any]]
    last: bool
    """Whether no later tower has this encoder. The last one synchronises its gradients."""
    representations: Tensor = field(default_factory=lambda: torch.empty(0))
    inputs: Any = None
    spans: list[tuple[int, int]] = field(default_factory=list)
    order: Tensor | None = None
    """Row of the batch at each position of an `Arranged` input."""
    random_states: list[RandomState] = field(default_factory=list)
    replayed: int = 0
    """Chunks whose gradient the second pass has added."""

    def begin(self) -> None:
        """A step begins."""
        self.random_states, self.replayed, self.representations, self.order = [], 0, torch.empty(0), None
        self.graphs.begin()

    @property
    def trained(self) -> bool:
        if not torch.is_grad_enabled():
            return False
        return not isinstance(self.encoder, nn.Module) or any(p.requires_grad for p in self.encoder.parameters())

    def encode(self, batch: Any, before_chunk: Callable[[], None] = lambda: None) -> Tensor:
        self.inputs = batch if isinstance(batch, Chunked) and not isinstance(batch, Tensor) else _Rows(batch)
        rows = len(self.inputs)
        if rows == 0:
            raise ValueError("an empty batch has no gradient")
        self.spans = self.inputs.spans(self.size) if isinstance(self.inputs, Arranged) else self.cut(rows)
        self.order = self.inputs.rows(0, rows) if isinstance(self.inputs, Arranged) else None
        self.refuse_batch_norm()
        for i, (start, stop) in enumerate(self.spans):
            before_chunk()
            self.random_states.append(RandomState.now())
            with gradient_sync(self.encoder, False):
                out = self.first_pass(i, start, stop)
            if i == 0:
                self.representations = out.new_empty((rows, *out.shape[1:]))
            self.representations.data[self.place(start, stop)] = out.detach()
        return self.representations.requires_grad_(self.trained)

    def cut(self, rows: int) -> list[tuple[int, int]]:
        return [(start, min(start + self.size, rows)) for start in range(0, rows, self.size)]

    def place(self, start: int, stop: int) -> slice | Tensor:
        """Where a chunk's rows are in the batch."""
        return slice(start, stop) if self.order is None else self.order[start:stop]

    def ranges(self, rows: int) -> Iterator[tuple[int, int]]:
        spans, trained = self.cut(rows), self.trained  # evaluated here, because gradients are off inside the first pass
        replayed = (span for _ in range(trained) for span in spans[max(len(self.graphs.outputs), self.replayed) :])
        return chain(spans, replayed)

    def first_pass(self, i: int, start: int, stop: int) -> Tensor:
        """Encode chunk i, with a graph if that is to be kept."""
        if self.trained and (kind := self.graphs.kind(i, len(self.spans) - (not expects(self.encoder)))):
            out = self.graphs.run(kind, lambda: self.run(start, stop))
            if out is not None:
                return out
            self.random_states[-1].restore()
        with torch.no_grad():
            return self.run(start, stop)

    @property
    def least(self) -> int:
        """Bytes of all checkpointed graphs of a step like the last one."""
        return self.graphs.costs[CHECKPOINTED] * len(self.spans)

    def run(self, start: int, stop: int) -> Tensor:
        arguments = self.inputs.chunk(start, stop)
        with self.autocast():
            if isinstance(arguments, dict):
                out = self.encoder(**arguments)
            else:
                out = self.encoder(*(arguments if isinstance(arguments, tuple) else (arguments,)))
        if out.shape[0] != stop - start:
            raise ValueError(f"an encoder returned {out.shape[0]} rows for {stop - start} samples")
        return out

    def replay(self, before_chunk: Callable[[], None]) -> Iterator[int]:
        """Backpropagate chunk by chunk, first through the kept graphs, then replaying the other chunks. Yields the samples of each.

        One backward pass for all kept graphs would sum their gradients in the weights' own type, bf16 perhaps.
        """
        gradient = self.representations.grad
        if gradient is None:
            return
        kept = self.graphs.take()
        with unchanged_buffers(self.encoder), RandomState.now().preserved():  # checkpointed graphs run blocks again
            for start, stop in self.spans[self.replayed :]:
                before_chunk()
                out, last = next(kept, None), self.last and stop == self.spans[-1][1]
                with gradient_sync(self.encoder, last):
                    if out is None:
                        self.random_states[self.replayed].restore()
                        out = self.run(start, stop)
                    elif last:
                        out = expecting(self.encoder, out)
                    out.backward(gradient[self.place(start, stop)])
                self.replayed += 1
                yield stop - start
        self.representations, self.inputs = self.representations.detach(), None

    def refuse_batch_norm(self) -> None:
        """Raise ValueError for batch normalisation in training mode that does not see the whole batch at once."""
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        modules = self.encoder.named_modules() if self.trained and isinstance(self.encoder, nn.Module) else ()
        for name, module in modules:
            if not isinstance(module, _BatchNorm) or not module.training:
                continue
            what = f"{name} is batch normalisation in training mode, which mixes the samples of a batch"
            if len(self.spans) > 1:
                raise ValueError(
                    f"{what}: cut into {len(self.spans)} chunks it would compute another function; freeze it (.eval()) or use one chunk"
                )
            if ranks > 1 and not isinstance(module, nn.SyncBatchNorm) and not getattr(module, "synchronised", False):
                raise ValueError(
                    f"{what}: over {ranks} ranks it would see only a part of them; synchronise it "
                    "(clipscale.distributed.world.sync_batch_norm) or freeze it (.eval())"
                )


class _Rows:
    """Nested tensors with equal first dimensions, sliced by rows."""

    def __init__(self, tree: Any) -> None:
        lengths = {leaf.shape[0] for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}
        if len(lengths) != 1:
            raise ValueError(f"the tensors of one input must have the same first dimension, not {sorted(lengths)}")
        self.tree = tree
        self.rows = lengths.pop()

    def __len__(self) -> int:
        return self.rows

    def chunk(self, start: int, stop: int) -> Any:
        return tree_map(lambda leaf: leaf[start:stop] if isinstance(leaf, Tensor) else leaf, self.tree)
