"""The gradient cache (Gao et al. 2021, arXiv 2101.06983, section 3): a batch's exact gradient, chunk by chunk.

A contrastive loss couples samples only through their representations, so three passes suffice:
1. Encode every chunk without a graph.
2. Compute the loss of all representations and its gradient with respect to them.
3. Encode every chunk again, with a graph and the same random numbers, and backpropagate its rows of that gradient.
By the chain rule the sum over chunks is the gradient of one graph over the whole batch.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from clipscale.common.keep import Keep
from clipscale.common.rng import RandomState
from clipscale.step.cast_weights import CastWeights
from clipscale.step.chunk_output import ChunkOutput
from clipscale.step.kept_graphs import KeptGraphs, largest_of_ranks
from clipscale.step.pass_contexts import (
    batch_norm_preserved,
    batch_norms,
    can_rerun,
    gradient_sync,
    is_collective,
    rearm_ddp_sync,
    trains,
)

log = logging.getLogger(__name__)


@runtime_checkable
class LazyInput(Protocol):
    """An encoder's input that loads its samples on demand, for example from host memory."""

    def __len__(self) -> int: ...

    def chunk(self, start: int, stop: int) -> object:
        """Arguments of the encoder for samples start..stop: a tuple, a mapping of keywords, or a single value."""


@runtime_checkable
class ReorderedInput(LazyInput, Protocol):
    """A `LazyInput` that chooses its own order and chunks, for example captions sorted by length."""

    def spans(self, size: int) -> list[tuple[int, int]]:
        """The chunks as ranges start..stop in the input's own order; `size` is the tower's samples per chunk."""

    def rows(self, start: int, stop: int) -> Tensor:
        """The rows of the batch at positions start..stop of that order: (stop - start,) int64."""


Representation = Callable[[Any], Tensor]


def _nothing() -> None: ...


class GradCache:
    """Exact gradients of `loss(*representations)` at any batch size, for any encoders.

    `step(*inputs)` adds the gradient of the whole batch to `.grad` of every parameter of the encoders and of the loss.
    It calls `encode`, `loss`, `backward` and `replay`; a caller may call them one by one instead.

    Args:
        encoders: one module or callable per tower; each maps its chunk to a tensor (samples, ...), or to what
            `representation` takes. With a graph it may return a `ChunkOutput`, which adds a loss of its own. The same
            module may serve several towers. A module without trainable parameters is encoded once and not replayed,
            so a loss of its own is never counted. Under DDP or FSDP2 the gradients of each module are synchronised
            once, with its last chunk, unless it has a method `gradient_sync` of its own.
        loss: maps one representation tensor per tower, over the whole (local) batch, to a scalar.
        chunks: samples per chunk, one size for all towers or one per tower. The last chunk may be shorter.
        keep_bytes: memory for graphs that are kept from the first pass, so that their chunks need no replay. The same
            on all ranks. 0: keep none. math.inf: keep all. A number: measure a graph in the first step, then keep as
            many as fit. None: measure, and keep none yet. May be changed between steps, as `chunks` may. A rank that
            has no memory for a kept graph keeps none from then on. Under FSDP2, or with synchronised batch
            normalisation, then no rank keeps any.
        autocast: makes the context in which encoders run, a new one for each chunk.
        scaler: a gradient scaler for fp16. `backward` scales the loss with it; `scaler.step(optimizer)` and
            `scaler.update()` remain the caller's. Do not scale the loss as well: a value that already carries a scale
            looks like any other, so its gradients would be multiplied twice.
        representation: maps an encoder's output (a tuple, transformers' ModelOutput) to its tensor (samples, ...), in
            both passes; one function for all towers, or one or None per tower. It has no parameters of its own.

    Raises ValueError for chunk sizes below 1, input tensors of unequal length, an encoder whose output is no tensor or
    has another number of rows than its input, a chunk's loss that is no scalar, a `representation` with trainable
    parameters, a loss that does not use a representation, batch normalisation in training mode over more than one
    chunk, or over several ranks without synchronisation, and DDP with static_graph=True.

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
        keep_bytes: float | Keep | None = 0,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
        scaler: "torch.amp.GradScaler | None" = None,
        representation: Representation | Sequence[Representation | None] | None = None,
    ) -> None:
        self.chunks = [chunks] * len(encoders) if isinstance(chunks, int) else [*chunks]
        if len(self.chunks) != len(encoders) or min(self.chunks) < 1:
            raise ValueError(f"chunks={chunks!r}: one size of at least 1, or one for each of {len(encoders)} encoders")
        self.encoders, self.loss, self.scaler = encoders, loss, scaler
        self.keep = keep_of(keep_bytes)
        functions = _one_for_each(representation, len(encoders))
        self._towers = [
            _Tower(encoder, function, autocast, synchronises=encoder not in encoders[i + 1 :])
            for i, (encoder, function) in enumerate(zip(encoders, functions, strict=True))
        ]
        self._keeps_none = False
        # The sum of the chunks' own losses in the last step, detached and not scaled; None: there were none.
        self.chunk_loss: Tensor | None = None

    def step(self, *inputs: object, **loss_options: object) -> Tensor:
        """Gradients of the loss over one batch, one input per tower; returns the loss, detached and not scaled.

        `loss_options`: keywords of the loss, over the whole batch. The chunks' own losses are added to it.
        """
        representations = self.encode(*inputs)
        value = self.loss(*representations, **loss_options)
        self.backward(value)
        self.replay()
        return value.detach() if self.chunk_loss is None else value.detach() + self.chunk_loss

    def encode(self, *inputs: object, before_chunk: Callable[[], None] = _nothing) -> list[Tensor]:
        """First pass: the representations of every tower, as leaf tensors. Those of a trained tower require a gradient.

        An input is a tensor, a nesting of tuples, lists and mappings of tensors with equal first dimensions, or a
        `LazyInput`. A tuple becomes positional arguments of the encoder, a mapping keywords. The representations of a
        `ReorderedInput` are in the batch's order. `before_chunk()` is called before each chunk; what it raises ends the
        step.
        """
        towers = range(len(self._towers))
        return [self.encode_tower(i, batch, before_chunk) for i, batch in zip(towers, inputs, strict=True)]

    def encode_tower(self, i: int, batch: object, before_chunk: Callable[[], None] = _nothing) -> Tensor:
        """The first pass of tower i, after those of all earlier towers; see `encode`."""
        # A tower that keeps no graph counts with one: its replay builds one while later towers' graphs are still kept.
        used = sum(max(1, tower.graphs.count) * tower.graphs.meter.bytes_each for tower in self._towers[:i])
        keep = replace(self.keep, bytes=0) if self._keeps_none else self.keep.less(used)
        return self._towers[i].encode(batch, self.chunks[i], keep, before_chunk)

    def backward(self, value: Tensor) -> None:
        """Gradients of the loss with respect to the representations and the loss's own parameters.

        `value`: the loss, not scaled; see `scaler`.
        """
        (self.scaler.scale(value) if self.scaler else value).backward()
        for i, tower in enumerate(self._towers):
            if tower.trained and tower.representations.grad is None:
                raise ValueError(f"the loss does not use the representations of encoder {i}: it can learn nothing")

    def replay(self, before_chunk: Callable[[], None] = _nothing, *, chunk_loss_weight: float = 1.0) -> None:
        """Second pass: encode every chunk again, with a graph, and backpropagate its rows of the gradient.

        `before_chunk`: see `encode`. `chunk_loss_weight`: of the chunks' own losses in the gradients; `chunk_loss` is
        their sum without it.
        """
        self._agree_on_kept()

        def loss_gradient(loss: Tensor) -> Tensor:
            weight = torch.full_like(loss, chunk_loss_weight)
            return self.scaler.scale(weight) if self.scaler else weight

        losses = []
        for tower in self._towers:
            losses += tower.replay(before_chunk, loss_gradient)
            tower.representations, tower.inputs = torch.empty(0), None  # frozen ones, too
        self.chunk_loss = _sum(losses) if losses else None

    def _agree_on_kept(self) -> None:
        """If a graph did not fit, keep none from now on.

        Where a second pass is a collective, this holds for all ranks. It is one under FSDP2, which gathers weights, and
        with synchronised batch normalisation.
        """
        out_of_memory = any(tower.graphs.out_of_memory for tower in self._towers)
        if self.keep.bytes and not (self._keeps_none or all(can_rerun(tower.encoder) for tower in self._towers)):
            out_of_memory = bool(largest_of_ranks(out_of_memory, self._towers[0].representations.device))
        if out_of_memory:
            log.warning("cache.keep: out of memory for a kept graph; this process keeps none from now on")
            self._keeps_none = True
            for tower in self._towers:
                tower.graphs.drop()

    @property
    def keep_bytes(self) -> float | None:
        """The memory for kept graphs; None: measure, and keep none yet."""
        return None if self.keep.is_open else self.keep.bytes

    @keep_bytes.setter
    def keep_bytes(self, value: float | Keep | None) -> None:
        self.keep = keep_of(value)

    @property
    def trained(self) -> list[bool]:
        """Whether each tower has trainable parameters, and so a second pass."""
        return [tower.trained for tower in self._towers]

    @property
    def kept(self) -> list[int]:
        """The number of each tower's chunks whose graphs this step keeps."""
        return [tower.graphs.count for tower in self._towers]

    @property
    def graph_bytes(self) -> int:
        """Bytes of a chunk's graph of the first tower that has a second pass; 0: not measured."""
        return next((tower.graphs.meter.bytes_each for tower in self._towers if tower.graphs.meter.bytes_each), 0)

    def num_chunks(self, samples: int) -> int:
        """The chunks of both passes of a step, each of which calls `before_chunk`. An estimate until a
        `ReorderedInput` has chunks."""
        return sum(
            (1 + tower.trained) * (len(tower.spans) or len(_spans(samples, size)))
            for tower, size in zip(self._towers, self.chunks)
        )


@dataclass
class _Tower:
    """One encoder's two passes over its chunks."""

    encoder: Callable[..., object]
    # Maps the encoder's output to the representations; None: they are the output itself.
    representation: Representation | None
    autocast: Callable[[], AbstractContextManager[object]]
    # Whether its replay sums the gradients over ranks. Of several towers with one encoder the last one's does.
    synchronises: bool
    graphs: KeptGraphs = field(default_factory=KeptGraphs)
    representations: Tensor = field(default_factory=lambda: torch.empty(0))
    inputs: LazyInput | None = None
    spans: list[tuple[int, int]] = field(default_factory=list)
    # Row of the batch at each position of a `ReorderedInput`.
    order: Tensor | None = None
    random_states: list[RandomState] = field(default_factory=list)
    weights: CastWeights = field(default_factory=CastWeights)

    @property
    def trained(self) -> bool:
        return torch.is_grad_enabled() and trains(self.encoder)

    def encode(self, batch: object, size: int, keep: Keep, before_chunk: Callable[[], None]) -> Tensor:
        """First pass, in chunks of `size`. `keep`: for this tower's graphs."""
        # Tensors, and some mappings, have a method `chunk` of another meaning.
        if isinstance(batch, LazyInput) and not isinstance(batch, Tensor | Mapping):
            inputs: LazyInput = batch
        else:
            inputs = _Rows(batch)
        self.inputs = inputs
        rows = len(inputs)
        if rows == 0:
            raise ValueError("an empty batch has no gradient")
        self.spans = inputs.spans(size) if isinstance(inputs, ReorderedInput) else _spans(rows, size)
        self.order = inputs.rows(0, rows) if isinstance(inputs, ReorderedInput) else None
        trained, self.random_states = self.trained, []
        if trained:
            refuse_batch_norm(self.encoder, len(self.spans))
            refuse_static_graph(self.encoder)
        on_gpu = isinstance(self.encoder, nn.Module) and any(p.is_cuda for p in self.encoder.parameters())
        self.graphs.start_step(rows, trained * len(self.spans), keep, on_gpu=on_gpu)
        self.weights.start_step(self.encoder, self.autocast, len(self.spans))
        for i, (start, stop) in enumerate(self.spans):
            before_chunk()
            self.random_states.append(RandomState.now())
            builds_graph, sync = self.graphs.builds(i), self.synchronises and stop == rows
            with gradient_sync(self.encoder, False), self.weights.used(builds_graph, sync):
                out = self.output(i, partial(self.run, start, stop))
            if i == 0:
                self.representations = out.new_empty((rows, *out.shape[1:]))
            self.representations[self.rows(start, stop)] = out
        self.graphs.meter.agree_on_size(self.representations.device)
        return self.representations.requires_grad_(trained)

    def output(self, i: int, encode: Callable[[], ChunkOutput]) -> Tensor:
        """Encode chunk i without a graph, or with one that is kept. If a kept graph runs out of memory, drop all of
        them and encode again."""
        try:
            return self.graphs.output(i, encode, is_collective(self.encoder))
        except torch.OutOfMemoryError:
            if i >= self.graphs.count or not can_rerun(self.encoder):
                raise
        self.graphs.drop()
        self.random_states[i].restore()
        return self.graphs.output(i, encode, False)

    def replay(self, before_chunk: Callable[[], None], loss_gradient: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Backpropagate through the kept graphs, then replay the other chunks. Returns the chunks' own losses.

        Each kept graph has its own backward pass: a joint one would sum gradients in the weights' type, bf16 perhaps.
        `loss_gradient`: the gradient with respect to such a loss.
        """
        gradient = self.representations.grad
        losses: list[Tensor] = []
        if gradient is None:
            self.weights.end_step()
            return losses
        with batch_norm_preserved(self.encoder), RandomState.now().preserved():
            for random, (start, stop) in zip(self.random_states, self.spans, strict=True):
                before_chunk()
                sync = self.synchronises and stop == self.spans[-1][1]
                with gradient_sync(self.encoder, sync), self.weights.used(True, sync):
                    if self.graphs.outputs:
                        out = self.graphs.outputs.pop(0)
                        out = rearm_ddp_sync(self.encoder, out) if sync else out
                    else:
                        random.restore()
                        out = self.run(start, stop)
                    roots, gradients = [out.representations], [gradient[self.rows(start, stop)]]
                    if out.loss is not None:
                        losses.append(out.loss.detach())
                        roots.append(out.loss)
                        gradients.append(loss_gradient(out.loss))
                    backpropagate(roots, gradients)
        self.weights.end_step()
        return losses

    def run(self, start: int, stop: int) -> ChunkOutput:
        assert self.inputs is not None
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

    def rows(self, start: int, stop: int) -> slice | Tensor:
        """The rows of the batch in a chunk."""
        return slice(start, stop) if self.order is None else self.order[start:stop]


def backpropagate(roots: list[Tensor], gradients: list[Tensor]) -> None:
    """One backward pass from all roots that have a graph. A chunk's own loss may train only a part of the encoder."""
    if len(roots) > 1:
        trained = [root.requires_grad for root in roots]
        roots, gradients = [*compress(roots, trained)], [*compress(gradients, trained)]
    torch.autograd.backward(roots, gradients)


def _sum(losses: list[Tensor]) -> Tensor:
    """The sum of the losses, in at least float32."""
    stacked = torch.stack(losses)
    return stacked.sum(dtype=torch.promote_types(stacked.dtype, torch.float32))


def keep_of(keep_bytes: float | Keep | None) -> Keep:
    """The argument `keep_bytes` of `GradCache` as a `Keep`."""
    if isinstance(keep_bytes, Keep):
        return keep_bytes
    return Keep.measure_first() if keep_bytes is None else Keep.at_most(keep_bytes)


def _one_for_each(
    representation: Representation | Sequence[Representation | None] | None, encoders: int
) -> list[Representation | None]:
    """The function of each encoder's output."""
    if representation is None or callable(representation):
        functions = [representation] * encoders
    else:
        functions = [*representation]
    if len(functions) != encoders:
        raise ValueError(f"representation= has {len(functions)} functions for {encoders} encoders: one, or one each")
    if any(isinstance(function, nn.Module) and trains(function) for function in functions):
        raise ValueError("representation= has trainable parameters: put them into the encoder, which has two passes")
    return functions


def _spans(rows: int, size: int) -> list[tuple[int, int]]:
    """Chunks of `size` rows, as ranges start..stop."""
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


def refuse_batch_norm(encoder: Callable[..., object], num_chunks: int) -> None:
    """Raise ValueError if batch normalisation in training mode does not see the whole batch at once."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    for name, module in batch_norms(encoder).items():
        problem = f"{name} is batch normalisation in training mode, which mixes the samples of a batch"
        if num_chunks > 1:
            raise ValueError(
                f"{problem}: {num_chunks} chunks would be another function; freeze it (.eval()) or use one chunk"
            )
        if ranks > 1 and not isinstance(module, nn.SyncBatchNorm):
            raise ValueError(
                f"{problem}: over {ranks} ranks it would see only a part of them; synchronise it "
                "(nn.SyncBatchNorm, on GPUs) or freeze it (.eval())"
            )


def refuse_static_graph(encoder: Callable[..., object]) -> None:
    """Raise ValueError for DDP whose user has promised that all passes are alike."""
    if isinstance(encoder, DistributedDataParallel) and encoder.static_graph:
        raise ValueError(
            "DDP with static_graph=True counts one backward pass for each forward pass, but the first pass of a chunk "
            "has none; leave static_graph out"
        )


class _Rows:
    """Nested tensors with equal first dimensions, sliced by rows."""

    def __init__(self, tree: object) -> None:
        tree = _with_dicts(tree)
        lengths = {leaf.shape[0] for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}
        if not lengths:
            raise ValueError("an input holds no tensor (a tokenizer of transformers gives them by return_tensors='pt')")
        if len(lengths) != 1:
            raise ValueError(f"the tensors of one input must have the same first dimension, not {sorted(lengths)}")
        self.tree = tree
        self.rows = lengths.pop()

    def __len__(self) -> int:
        return self.rows

    def chunk(self, start: int, stop: int) -> object:
        return tree_map(lambda leaf: leaf[start:stop] if isinstance(leaf, Tensor) else leaf, self.tree)


def _with_dicts(tree: object) -> object:
    """The same nesting, with a dict for each mapping that torch takes for a leaf, as it does a BatchEncoding."""
    return tree_map(
        lambda leaf: {key: _with_dicts(value) for key, value in leaf.items()} if isinstance(leaf, Mapping) else leaf,
        tree,
    )
