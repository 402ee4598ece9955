"""The token that pads captions, and the length of a caption without its padding.

Letters: N captions, T tokens of the context.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Padding:
    """How a tokenizer pads captions."""

    pad_id: int
    # Whether a caption ends with the padding token, too. The first token of the padding is then its end token.
    eos_is_pad: bool = False

    @classmethod
    def from_tokens(cls, empty: np.ndarray, other: np.ndarray) -> "Padding":
        """The padding of a tokenizer, given its tokens (T,) of an empty caption and of another one.

        An end token that is not the padding is the last other token of both.
        """
        padding = cls(int(empty[-1]))
        ends = [row[max(int(padding.lengths(row[None])[0]) - 1, 0)] for row in (empty, other)]
        return cls(padding.pad_id, eos_is_pad=bool(ends[0] != ends[1]))

    def lengths(self, tokens: np.ndarray) -> np.ndarray:
        """(N, T) -> (N,) int: the tokens of each caption up to its end token, which counts."""
        counts = np.arange(1, tokens.shape[1] + 1)
        used: np.ndarray = np.where(tokens != self.pad_id, counts, 0).max(axis=1)
        return np.minimum(used + 1, tokens.shape[1]) if self.eos_is_pad else used
