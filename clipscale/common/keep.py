"""How many graphs of its first pass a step keeps: the setting `cache.keep`."""

import math
from dataclasses import dataclass, replace

from clipscale.common.errors import UserError
from clipscale.common.units import parse_bytes


@dataclass(frozen=True)
class Keep:
    """As many graphs as fit into some memory.

    Made by `Keep.nothing()`, `Keep.all()`, `Keep.at_most(bytes)`, and `Keep.measure_first()`, whose bytes are known
    after a first step.
    """

    # Bytes for the graphs of all towers; 0: none is kept; math.inf: all are.
    bytes: float
    # Whether a step that does not know the bytes of a graph measures them.
    measures: bool

    @staticmethod
    def nothing() -> "Keep":
        return Keep(0, measures=False)

    @staticmethod
    def all() -> "Keep":
        return Keep(math.inf, measures=False)

    @staticmethod
    def at_most(bytes: float) -> "Keep":
        """0: nothing; math.inf: all."""
        return Keep(bytes, measures=0 < bytes < math.inf)

    @staticmethod
    def measure_first() -> "Keep":
        """Measure a graph and keep none, until the memory that the first step leaves is known."""
        return Keep(0, measures=True)

    @staticmethod
    def parse(key: str, text: str) -> "Keep":
        """`none`, `auto` (what a first step leaves free), or bytes such as `8G`. Raises UserError with the setting's
        `key`."""
        if text in ("none", "auto"):
            return Keep.nothing() if text == "none" else Keep.measure_first()
        try:
            return Keep.at_most(parse_bytes(text))
        except ValueError:
            raise UserError(f"{key}={text}: give none, auto, or bytes such as 8G") from None

    @property
    def is_unmeasured(self) -> bool:
        """Whether the bytes are not known before a first step."""
        return self.measures and self.bytes == 0

    def minus(self, used: float) -> "Keep":
        """What remains if `used` bytes are taken."""
        return replace(self, bytes=self.bytes - used)

    def graphs(self, chunks: int, bytes_each: int) -> int:
        """How many of the `chunks` keep their graphs. `bytes_each`: bytes of one graph; 0: not measured."""
        if self.bytes == math.inf:
            return chunks
        return min(chunks, max(0, int(self.bytes // bytes_each))) if bytes_each else 0
