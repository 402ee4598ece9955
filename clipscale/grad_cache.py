"""The gradient cache: the exact gradient of a loss over a whole batch, with the activations of one chunk at a time.

A contrastive loss couples all samples, but only through their representations. So: encode every chunk without a graph; take the
gradient of the loss with respect to the representations alone; encode every chunk again, with a graph and with the random numbers of
the first time, and push its rows of that gradient through it (Gao et al. 2021, arXiv 2101.06983, section 3). By the chain rule the
sum over chunks is the gradient of one graph over the whole batch.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map

from clipscale.rng import RandomState


@runtime_checkable
class Chunked(Protocol):
    """Input of one encoder that hands out rows on demand (from host memory, say) instead of being sliced."""

    def __len__(self) -> int: ...

    def chunk(self, start: int, stop: int) -> Any:
        """Arguments of the encoder for samples start..stop: a tuple, a dict of keywords, or a single value."""


class GradCache:
    """Exact gradients of `loss(*representations)` at any batch size, for any encoders.

    `step(*inputs)` does the whole: afterwards every parameter of the encoders and of the loss holds in `.grad` (added to what was
    there) the gradient of one graph over the whole batch. `encode` and `replay` are its two passes, for callers that put something
    between them.

    Args:
        encoders: one module or callable per tower; each maps its chunk to a tensor whose first dimension counts the samples. The same
            module may serve several towers. A module none of whose parameters requires a gradient is encoded once and not replayed.
            Under DDP or FSDP2 gradients are synchronised once, with the last chunk of each module; anything else that offers a
            context manager `no_sync()` is treated like DDP.
        loss: maps one representation tensor per tower, over the whole (local) batch, to a scalar.
        chunks: samples per chunk, one for all towers or one per tower; the last chunk may be shorter, and a size beyond the batch
            means one chunk.
        keep_bytes: memory for graphs kept from the first pass, whose chunks then need no replay; 0: none; math.inf: all. The first
            chunk's graph is measured, and chunks are kept in order while the next one fits.
        autocast: makes the context in which encoders run; it is entered anew for each chunk.
        scaler: a gradient scaler (fp16): the loss is scaled before its gradients are taken.

    `after_chunk`, where set, is called as `after_chunk(tower, rows)` when the second pass has added the gradient of so many samples of
    that tower (kept graphs count as one chunk).

    Raises ValueError for chunk sizes below 1, inputs whose leaves differ in length, an encoder that returns another number of rows
    than it was given, a loss that leaves a representation unused, and batch normalisation in training mode over more than one chunk,
    or over several ranks without synchronisation.

    Dense retrieval, as in the paper's first experiments (queries, passages, hard negatives), in one step:

        cache = GradCache([query_encoder, passage_encoder], loss, chunks=[64, 16])
        optimizer.zero_grad()
        value = cache.step(query_tokens, passage_tokens)      # dicts of tensors; passages: positives first, then hard negatives
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
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        scaler: "torch.amp.GradScaler | None" = None,
    ) -> None:
        sizes = [chunks] * len(encoders) if isinstance(chunks, int) else list(chunks)
        if len(sizes) != len(encoders):
            raise ValueError(f"chunks={chunks!r} must name one size, or one for each of the {len(encoders)} encoders")
        if min(sizes) < 1:
            raise ValueError(f"chunks={chunks!r}: a chunk holds at least one sample")
        self.loss = loss
        self.scaler = scaler
        self.after_chunk: Callable[[int, int], None] | None = None
        self.memory = GraphMemory(keep_bytes)
        self.towers = [
            _Tower(
                encoder,
                size,
                self.memory,
                autocast,
                shared=sum(e is encoder for e in encoders) > 1,
                last=encoder not in encoders[i + 1 :],
            )
            for i, (encoder, size) in enumerate(zip(encoders, sizes, strict=True))
        ]

    def step(self, *inputs: Any) -> Tensor:
        """Gradients of the loss over one batch, one input per tower; returns the loss, detached."""
        representations = self.encode(*inputs)
        value = self.loss(*representations)
        self.backward(value)
        self.replay()
        return value.detach()

    def encode(self, *inputs: Any) -> list[Tensor]:
        """First pass: the representations of every tower, as leaves that take a gradient where the tower is trained.

        An input is a tensor, any nesting of tuples, lists and dicts of tensors with equal first dimensions, or a `Chunked`.
        """
        if len(inputs) != len(self.towers):
            raise ValueError(f"{len(inputs)} inputs for {len(self.towers)} encoders")
        self.memory.used = 0
        return [tower.encode(batch) for tower, batch in zip(self.towers, inputs, strict=True)]

    def ranges(self, tower: int, rows: int) -> Iterator[tuple[int, int]]:
        """The row ranges that a tower's two passes over a batch ask for, in order; read ahead of the passes by one range at most.

        The second pass leaves out kept chunks, so its ranges are known when the first pass is at its last chunk.
        """
        return self.towers[tower].ranges(rows)

    def backward(self, value: Tensor) -> None:
        """Gradients of the loss with respect to the representations and to its own parameters."""
        (self.scaler.scale(value) if self.scaler else value).backward()
        for i, tower in enumerate(self.towers):
            if tower.trained and tower.representations.grad is None:
                raise ValueError(
                    f"the loss does not use the representations of encoder {i}, so nothing can be learnt there"
                )

    def replay(self) -> None:
        """Second pass: every chunk again, with a graph, and its rows of the representations' gradient through it."""
        for i, tower in enumerate(self.towers):
            for rows in tower.replay():
                if self.after_chunk:
                    self.after_chunk(i, rows)


class GraphMemory:
    """The budget for graphs kept between the passes, shared by the towers of one cache."""

    def __init__(self, budget: float) -> None:
        self.budget = budget
        """Bytes; may be set anew before each step."""
        self.used = 0
        self.limit = math.inf
        """What turned out to fit when the device ran out of memory within the budget."""

    def fits(self, cost: int) -> bool:
        """Whether one more graph of that size (0: not known yet, to be measured) stays within the budget."""
        return self.budget > 0 and self.used + cost <= min(self.budget, self.limit)


@dataclass
class _Tower:
    """One encoder's two passes over its chunks."""

    encoder: Callable[..., Tensor]
    size: int
    memory: GraphMemory
    autocast: Callable[[], AbstractContextManager[Any]]
    shared: bool
    """The encoder serves several towers."""
    last: bool
    """No later tower has this encoder, so this one synchronises its gradients."""
    cost: int = 0
    """Bytes that the graph of a full chunk holds, once measured."""
    representations: Tensor = field(default_factory=lambda: torch.empty(0))
    inputs: Any = None
    spans: list[tuple[int, int]] = field(default_factory=list)
    random_states: list[RandomState] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)

    @property
    def trained(self) -> bool:
        if not torch.is_grad_enabled():
            return False
        return not isinstance(self.encoder, nn.Module) or any(p.requires_grad for p in self.encoder.parameters())

    def encode(self, batch: Any) -> Tensor:
        self.inputs = batch if isinstance(batch, Chunked) and not isinstance(batch, Tensor) else _Rows(batch)
        rows = len(self.inputs)
        if rows == 0:
            raise ValueError("an empty batch has no gradient")
        self.spans = self.cut(rows)
        self.refuse_batch_norm()
        self.random_states, self.kept = [], []
        for i, (start, stop) in enumerate(self.spans):
            self.random_states.append(RandomState.now())
            # DDP decides in the forward pass whether the backward will synchronise; a kept last chunk is the last forward of the step.
            with gradient_sync(self.encoder, self.last and i == len(self.spans) - 1):
                out = self.run_kept(start, stop) if self.keeps(i) else self.run_without_graph(start, stop)
            if i == 0:
                self.representations = out.new_empty((rows, *out.shape[1:]))
            self.representations.data[start:stop] = out.detach()
        return self.representations.requires_grad_(self.trained)

    def cut(self, rows: int) -> list[tuple[int, int]]:
        return [(start, min(start + self.size, rows)) for start in range(0, rows, self.size)]

    def ranges(self, rows: int) -> Iterator[tuple[int, int]]:
        spans, trained = self.cut(rows), self.trained  # now: within the first pass, gradients are off
        replayed = (span for _ in range(trained) for span in spans[len(self.kept) :])
        return chain(spans, replayed)

    def keeps(self, i: int) -> bool:
        """Whether chunk i keeps its graph: only behind kept ones. DDP synchronises in the backward of the last forward, and that
        must be one call: so the last chunk is kept only with all the others, and never where the encoder serves other towers too."""
        if not self.trained or len(self.kept) < i or (self.shared and i == len(self.spans) - 1):
            return False
        return self.memory.fits(self.cost)

    def run_without_graph(self, start: int, stop: int) -> Tensor:
        with torch.no_grad():
            return self.run(start, stop)

    def run_kept(self, start: int, stop: int) -> Tensor:
        """Encode with a graph and keep it, unless it turns out larger than the room for it."""
        try:
            with graph_bytes() as size:
                out = self.run(start, stop)
        except torch.OutOfMemoryError:
            out = None  # the second try comes after this block: as long as the error lives, so does the graph it broke off
        if out is None:  # memory in fragments: this chunk and later steps make do with what fitted
            self.memory.limit = self.memory.used
            self.random_states[-1].restore()
            return self.run_without_graph(start, stop)
        self.cost = max(self.cost, size())
        if not self.memory.fits(size()):
            return out.detach()
        self.memory.used += size()
        self.kept.append(out)
        return out

    def run(self, start: int, stop: int) -> Tensor:
        arguments = self.inputs.chunk(start, stop)
        with self.autocast():
            if isinstance(arguments, dict):
                out = self.encoder(**arguments)
            elif isinstance(arguments, tuple):
                out = self.encoder(*arguments)
            else:
                out = self.encoder(arguments)
        if out.shape[0] != stop - start:
            raise ValueError(f"an encoder returned {out.shape[0]} rows for {stop - start} samples")
        return out

    def replay(self) -> Iterator[int]:
        """Gradients of the kept chunks, then of the others one by one; yields the number of samples after each."""
        gradient = self.representations.grad
        if gradient is None:
            return
        again = self.spans[len(self.kept) :]
        kept_rows = [gradient[start:stop] for start, stop in self.spans[: len(self.kept)]]
        if self.kept:
            with gradient_sync(self.encoder, self.last and not again):
                torch.autograd.backward(self.kept, kept_rows)
            self.kept = []
            yield sum(len(rows) for rows in kept_rows)
        with unchanged_buffers(self.encoder), RandomState.now().preserved():
            for i, (start, stop) in enumerate(again):
                self.random_states[len(self.spans) - len(again) + i].restore()
                with gradient_sync(self.encoder, self.last and stop == self.spans[-1][1]):
                    self.run(start, stop).backward(gradient[start:stop])
                yield stop - start
        self.representations = torch.empty(0)
        self.inputs = None

    def refuse_batch_norm(self) -> None:
        """Batch normalisation in training mode mixes samples: right only where it sees the whole batch at once."""
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if not self.trained or (len(self.spans) == 1 and ranks == 1) or not isinstance(self.encoder, nn.Module):
            return
        for name, module in self.encoder.named_modules():
            if not isinstance(module, _BatchNorm) or not module.training:
                continue
            if len(self.spans) > 1:
                raise ValueError(
                    f"{name} is batch normalisation in training mode, which mixes the samples of a batch: cut into "
                    f"{len(self.spans)} chunks it would compute another function; freeze it (.eval()) or use one chunk"
                )
            if not isinstance(module, nn.SyncBatchNorm) and not getattr(module, "synchronised", False):
                raise ValueError(
                    f"{name} is batch normalisation in training mode, which mixes the samples of a batch: over {ranks} ranks it "
                    "would see only a part of them; synchronise it (clipscale.distributed.synchronised) or freeze it (.eval())"
                )


class _Rows:
    """Nested tensors with equal first dimensions, handed out by rows."""

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


@contextmanager
def graph_bytes() -> Iterator[Callable[[], int]]:
    """Bytes that the graph built within holds for the backward pass: by the allocator on a GPU, else by the tensors it saved."""
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        before = torch.cuda.memory_allocated()
        yield lambda: torch.cuda.memory_allocated() - before
    else:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            yield lambda: sum(saved.values())


@contextmanager
def gradient_sync(encoder: Callable[..., Tensor], enabled: bool) -> Iterator[None]:
    """Whether gradients computed within are summed over ranks: DDP reads this in the forward pass, FSDP2 in the backward."""
    if hasattr(encoder, "set_requires_gradient_sync"):
        encoder.set_requires_gradient_sync(enabled)
        yield
    elif hasattr(encoder, "no_sync") and not enabled:
        with encoder.no_sync():
            yield
    else:
        yield


@contextmanager
def unchanged_buffers(encoder: Callable[..., Tensor]) -> Iterator[None]:
    """Buffers (running statistics) were updated by the first pass; the second must not update them again."""
    buffers = list(encoder.buffers()) if isinstance(encoder, nn.Module) else []
    before = [b.clone() for b in buffers]
    yield
    with torch.no_grad():
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
