"""The memory for graphs that a step keeps from its first pass: the setting `cache.keep`."""

import math
from dataclasses import dataclass, replace

from clipscale.common.errors import UserError
from clipscale.common.units import parse_bytes


@dataclass(frozen=True)
class KeepBudget:
    """Memory for graphs that are kept from the first pass to the second.

    `KeepBudget.nothing()` and `KeepBudget.at_most(bytes)` make it with known bytes.
    `KeepBudget.measure_first()` makes one whose bytes are known after a first step.
    """

    # Bytes for the graphs of all towers. 0 keeps none, math.inf all.
    bytes: float
    # Whether a step measures the bytes of one graph if they are not known yet.
    needs_measurement: bool

    @staticmethod
    def nothing() -> "KeepBudget":
        return KeepBudget(0, needs_measurement=False)

    @staticmethod
    def at_most(bytes: float) -> "KeepBudget":
        """0: nothing; math.inf: all."""
        return KeepBudget(bytes, needs_measurement=0 < bytes < math.inf)

    @staticmethod
    def measure_first() -> "KeepBudget":
        """Measure a graph and keep none, until the memory that the first step leaves is known."""
        return KeepBudget(0, needs_measurement=True)

    @staticmethod
    def parse(key: str, text: str) -> "KeepBudget":
        """`none`, `auto` (what a first step leaves free), or bytes such as `8G`. Raises UserError with the setting's
        `key`."""
        if text in ("none", "auto"):
            return KeepBudget.nothing() if text == "none" else KeepBudget.measure_first()
        try:
            return KeepBudget.at_most(parse_bytes(text))
        except ValueError:
            raise UserError(f"{key}={text}: give none, auto, or bytes such as 8G") from None

    @property
    def is_unknown(self) -> bool:
        """Whether the bytes are not known before a first step."""
        return self.needs_measurement and self.bytes == 0

    def minus(self, used: float) -> "KeepBudget":
        """What remains if `used` bytes are taken."""
        return replace(self, bytes=self.bytes - used)

    def after_tower(self, num_kept: int, bytes_each: float) -> "KeepBudget":
        """What remains for the next towers if a tower keeps `num_kept` graphs.

        One graph is reserved even if it keeps none: its replay builds one while the kept graphs of later towers are
        alive.
        """
        return self.minus(max(1, num_kept) * bytes_each)

    def graphs(self, chunks: int, bytes_each: float) -> int:
        """How many of the `chunks` keep their graphs. `bytes_each`: bytes of one graph; 0 before it is measured."""
        if self.bytes == math.inf:
            return chunks
        return min(chunks, max(0, int(self.bytes // bytes_each))) if bytes_each else 0
