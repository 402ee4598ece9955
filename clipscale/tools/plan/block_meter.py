"""Runs only two of a tower's identical blocks, and extrapolates memory and operations to the others.

All sizes in bytes.
"""

from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from clipscale.models.blocks import repeated_blocks
from clipscale.step.pair_encoder import PairEncoder
from clipscale.tools.plan.memory_tracker import MemoryTracker

# How many of the identical blocks are run.
BLOCKS = 2


@dataclass
class BlockMeter:
    """Peak and growth of the memory of a pass, as if the blocks that are left out ran too.

    `leave_blocks_out` makes it.
    """

    tracker: MemoryTracker
    # The number of blocks that are left out.
    omitted: int
    # Live bytes at the pass's start.
    base: int = 0
    # The pass's peak beyond them.
    peak: float = 0.0
    # Bytes that the blocks that are left out would add.
    added: float = 0.0
    # Live bytes when the first block was entered; None outside the first block.
    entered: int | None = None
    # Operations at the pass's start.
    operations_before: int = 0
    # Operations when the first block was entered.
    operations_entered: int = 0
    # Operations that the blocks that are left out would add.
    operations_added: int = 0
    is_backward: bool = False

    def start(self) -> None:
        """Begin a pass."""
        self.base = self.tracker.live
        self.peak = 0.0
        self.added = 0.0
        self.entered = None
        self.is_backward = False
        self.operations_before = self.tracker.operations
        self.operations_added = 0
        self.tracker.take_peak()

    def live(self) -> float:
        """Bytes of the pass that are still live."""
        return self.tracker.live - self.base + self.added

    @property
    def operations(self) -> int:
        """The operations of the pass so far."""
        return self.tracker.operations - self.operations_before + self.operations_added

    def end(self) -> float:
        """End the pass; returns its peak."""
        self._mark(False)
        return self.peak

    def enter(self, is_first: bool, block: nn.Module, inputs: tuple[object, ...]) -> None:
        """Called when a pass enters the first or the second block. The backward pass visits them in reverse order."""
        if self.is_backward:  # checkpointing runs the block again
            return
        self._mark(is_first)
        if inputs and isinstance(inputs[0], Tensor) and inputs[0].requires_grad:
            inputs[0].register_hook(lambda _: self._mark(not is_first))

    def _mark(self, first_begins: bool) -> None:
        """Called when the first block begins (`first_begins`) or ends, in the forward or in the backward pass."""
        peak = self.tracker.take_peak() - self.base
        self.peak = max(self.peak, peak + self.added)
        if self.entered is not None:  # each block that is left out adds as much as the first one
            self.added += self.omitted * (self.tracker.live - self.entered)
            self.peak = max(self.peak, peak + self.added)
            self.operations_added += self.omitted * (self.tracker.operations - self.operations_entered)
        self.entered = self.tracker.live if first_begins else None
        self.operations_entered = self.tracker.operations


def leave_blocks_out(tower: nn.Module, tracker: MemoryTracker) -> BlockMeter:
    """Keep BLOCKS of the tower's identical blocks. Returns a meter of the passes of the tower that is left.

    Nothing is left out of a captioner: it has blocks of four kinds.
    """
    blocks, identical = (nn.ModuleList(), []) if isinstance(tower, PairEncoder) else repeated_blocks(tower)
    meter = BlockMeter(tracker, len(identical[BLOCKS:]))
    for number, is_first in zip(identical[:BLOCKS], (True, False)):
        blocks[number].register_forward_pre_hook(partial(meter.enter, is_first))
    for number in reversed(identical[BLOCKS:]):
        del blocks[number]
    return meter
