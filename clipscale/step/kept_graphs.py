"""Graphs that wait between the two passes, so that their chunks need no second pass: which of them, and of which kind.

A whole graph holds all that the backward pass needs. A checkpointed one holds the inputs of the tower's blocks: the backward pass computes
each block again, except for what follows the last value that it saves, an MLP's second product. So it saves about a third of a forward
pass at about a tenth of the bytes (docs/step.md). Hence as many chunks as fit are checkpointed first, and what is left makes graphs whole.
"""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from clipscale.config.sections import ModelConfig

Switch = Callable[[bool], object]
"""Turns an encoder's activation checkpointing on and off."""
WHOLE, CHECKPOINTED = "whole", "checkpointed"
WORTH = 3
"""A checkpointed graph that is not this many times smaller than a whole one saves less time for its bytes."""


class ActivationBudget:
    """Memory for graphs kept between the passes. The towers of one cache share it."""

    def __init__(self, bytes: float) -> None:
        self.bytes = bytes
        """May change before each step."""
        self.used = 0
        self.limit = math.inf
        """Bytes that were in use when the device ran out of memory within the budget."""

    def fits(self, cost: int) -> bool:
        """Whether `cost` bytes more stay within the budget. A cost of 0 is not measured yet."""
        return self.bytes > 0 and self.used + cost <= min(self.bytes, self.limit)


@dataclass
class KeptGraphs:
    """The graphs that one tower keeps of a step's first chunks."""

    budget: ActivationBudget
    switch: Switch | None = None
    """None: all graphs are as the encoder makes them, whole."""
    costs: dict[str, int] = field(default_factory=lambda: {WHOLE: 0, CHECKPOINTED: 0})
    """Bytes of a full chunk's graph, by kind; 0: not measured yet."""
    later: int = 0
    """Bytes to leave for the checkpointed graphs of later towers."""
    outputs: list[Tensor] = field(default_factory=list)
    """Of the kept chunks, in their order."""
    kinds: list[str] = field(default_factory=list)
    """Of these graphs."""
    equal: bool = False
    """The encoder communicates in each pass, so all ranks must keep the same graphs. Costs are those known when the step begins: a
    graph of unknown cost is measured, but not kept in a finite budget. Memory that runs out ends the step."""
    measured: dict[str, int] = field(init=False)
    """The largest graphs of this rank. The same as the costs, unless these are to be equal on all ranks."""
    rough: set[str] = field(default_factory=set)
    """Kinds measured by a step's first chunk alone. Its bytes include what a pass sets aside once, such as gathered weights."""

    def __post_init__(self) -> None:
        self.measured = dict(self.costs) if self.equal else self.costs

    def begin(self) -> None:
        """A step begins."""
        self.outputs, self.kinds = [], []

    def take(self) -> Iterator[Tensor]:
        """The kept outputs, one by one for their backward passes; none is kept from now on."""
        outputs, self.outputs = self.outputs, []
        while outputs:
            yield outputs.pop(0)

    def kind(self, i: int, chunks: int) -> str | None:
        """The kind that chunk i of `chunks` should have, or None. Kept chunks come first, without gaps.

        Checkpointed graphs are measured by the first chunks of a run, whole ones by the last of its first step; where all ranks must keep
        the same graphs by the second, which is no remainder, though no graph before it was kept.
        """
        whole, small = self.costs[WHOLE], self.costs[CHECKPOINTED]
        rest = chunks - 1 - i
        alone = self.equal and not whole and math.isfinite(self.budget.bytes) and i == (1 if chunks > 2 else 0)
        if rest < 0 or (len(self.outputs) < i and not alone):
            return None
        if self.switch is None or alone or (not whole and not rest) or (whole and self.too_large(small, whole)):
            return WHOLE if self.budget.fits(whole) else None
        if whole and (small or not rest) and self.budget.fits(whole + rest * small + self.later):
            return WHOLE
        return CHECKPOINTED if self.budget.fits(small) else None

    def too_large(self, small: int, whole: int) -> bool:
        """Whether checkpointed graphs save too little for their bytes."""
        return small > 0 and CHECKPOINTED not in self.rough and WORTH * small > whole

    def forget(self) -> None:
        """Chunks have another size: graphs are measured anew."""
        self.rough.clear()
        for costs in (self.costs, self.measured):
            costs.update(dict.fromkeys(costs, 0))

    def run(self, kind: str, encode: Callable[[], Tensor]) -> Tensor | None:
        """The output with a graph, which is kept if it fits the budget; None if the device's memory does not suffice."""
        try:
            with graph_bytes() as size, self.switched(kind):
                out = encode()
        except torch.OutOfMemoryError as error:
            if self.equal:
                error.add_note("All ranks must keep the same graphs: set less memory for them (cache.keep).")
                raise
            out = None  # go on outside this block: the exception's traceback holds the incomplete graph
        if out is None:  # fragmented memory: from now on keep no more than fitted this time
            self.budget.limit = self.budget.used
            return None
        self.learn(kind, size())
        cost = (self.costs[kind] or sys.maxsize) if self.equal else size()
        if not self.budget.fits(cost):
            return out.detach()
        self.keep(out, kind, cost)
        return out

    def learn(self, kind: str, size: int) -> None:
        """Take in the bytes of one graph."""
        first, known = not self.outputs, self.measured[kind]
        if not known:
            self.measured[kind] = size
            self.rough.update([kind] * first)
        elif first == (kind in self.rough):
            self.measured[kind] = max(known, size)
        elif not first:
            self.measured[kind] = size
            self.rough.discard(kind)

    def keep(self, out: Tensor, kind: str, cost: int) -> None:
        self.budget.used += cost
        self.outputs.append(out)
        self.kinds.append(kind)

    def planned(self, chunks: int) -> list[str]:
        """The kinds of graphs that a step of so many chunks keeps, by the costs."""
        for i in range(chunks):
            if not (kind := self.kind(i, chunks)):
                break
            self.keep(torch.empty(0), kind, self.costs[kind])
        return self.kinds

    @contextmanager
    def switched(self, kind: str) -> Iterator[None]:
        """Inside, the encoder makes graphs of this kind."""
        if self.switch and kind == CHECKPOINTED:
            self.switch(True)
            try:
                yield
            finally:
                self.switch(False)
        else:
            yield


def checkpointing_switch(tower: nn.Module, config: ModelConfig) -> Switch | None:
    """Turns activation checkpointing on and off, for kept graphs, in towers of open_clip's and timm's.

    None for others, where it is on anyway, and where towers are compiled: their variants would draw other random numbers.
    """
    parts: list[Any] = [module for module in tower.modules() if hasattr(module, "grad_checkpointing")]

    def switch(on: bool) -> None:
        for part in parts:
            part.grad_checkpointing = on

    return switch if parts and not (config.grad_checkpointing or config.compile) else None


@contextmanager
def graph_bytes() -> Iterator[Callable[[], int]]:
    """Measures the graph that is built inside: the allocator's bytes on a GPU, else the bytes of its saved tensors."""
    saved: dict[int, int] = {}

    def save(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an operation that saved its own result would hold itself, and so the graph, for ever

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        before = torch.cuda.memory_allocated()
        yield lambda: torch.cuda.memory_allocated() - before
    else:
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            yield lambda: sum(saved.values())
