"""Inputs and outputs of the encoders of `GradCache`.

An encoder takes nested tensors, or a `LazyInput` that loads its chunks. It returns representations, perhaps with a
loss.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from clipscale.common.batch import Span


@runtime_checkable
class LazyInput(Protocol):
    """An encoder's input that loads its samples on demand, for example from host memory."""

    def __len__(self) -> int: ...

    def chunk(self, start: int, stop: int) -> object:
        """Arguments of the encoder for samples start..stop: a tuple, a mapping of keywords, or a single value."""


@runtime_checkable
class ReorderedInput(LazyInput, Protocol):
    """A `LazyInput` that chooses its own order and chunks, for example captions sorted by length."""

    def spans(self, size: int) -> list[Span]:
        """The chunks as ranges start..stop in the input's own order; `size` is the tower's samples per chunk."""

    def rows(self, start: int, stop: int) -> Tensor:
        """The rows of the batch at positions start..stop of that order: (stop - start,) int64."""


class NestedTensors:
    """Nested tensors with equal first dimensions, sliced by rows. `lazy_input` makes it."""

    def __init__(self, tree: object, rows: int) -> None:
        self.tree = tree
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def chunk(self, start: int, stop: int) -> object:
        return tree_map(lambda leaf: leaf[start:stop] if isinstance(leaf, Tensor) else leaf, self.tree)


def lazy_input(tower_input: object) -> LazyInput:
    """The input as a `LazyInput`. Raises ValueError for an input without tensors, or with tensors of unequal length."""
    # Tensors, and some mappings, have a method `chunk` of another meaning.
    if isinstance(tower_input, LazyInput) and not isinstance(tower_input, Tensor | Mapping):
        return tower_input
    tree = _with_dicts(tower_input)
    lengths = {leaf.shape[0] for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}
    if not lengths:
        raise ValueError("an input holds no tensor (a tokenizer of transformers gives them by return_tensors='pt')")
    if len(lengths) != 1:
        raise ValueError(f"the tensors of one input must have the same first dimension, not {sorted(lengths)}")
    return NestedTensors(tree, lengths.pop())


def _with_dicts(tree: object) -> object:
    """The nesting with its mappings as plain dicts: torch takes other mappings, such as a BatchEncoding, for leaves."""
    return tree_map(
        lambda leaf: {key: _with_dicts(value) for key, value in leaf.items()} if isinstance(leaf, Mapping) else leaf,
        tree,
    )


class ChunkOutput(NamedTuple):
    """An encoder of `GradCache` may return this in a pass with a graph (`torch.is_grad_enabled()`). In a pass without
    a graph it may return the representations alone; a loss that it returns there is not read.

    The loss is any sum over samples, for example of the captions' cross entropies. It may draw random numbers. In that
    case the encoder computes the representations first, then the loss, and then restores the random state from before
    the loss. The next chunk thus draws the same numbers whether this chunk's graph is kept or not.
    """

    # A tensor (samples, ...), or what `representation` takes.
    representations: Any
    # The chunk's own loss, 0-d: a sum over its samples alone, so that the chunks' losses add up to the batch's. None:
    # the chunk has none.
    loss: Tensor | None = None
