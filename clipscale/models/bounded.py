"""Bounds the time that a tokenizer takes for a caption.

Byte-pair encoding takes a time that grows with the square of a word's length: minutes for 80 kB of random letters. Of a caption, only as
many characters are tokenised as can matter, so the tokens are the same.
"""

import re
from collections.abc import Callable
from copy import copy
from functools import cache
from typing import Any

from torch import Tensor

CHARS_PER_TOKEN = 32
"""Characters that are kept for each token of the context. No token of CLIP's vocabulary stands for more."""
LONGEST_WORD = 1024
"""Bytes of a word; CLIP's tokenizer takes a quarter of a second for so many random letters. What lies behind them is cut."""
_WORD = re.compile(r"[^\W\d_]+|(?:[^\w\s]|_)+")
"""What byte-pair encoding takes as one word: letters, or signs."""


def longest_word(text: str) -> int:
    """Bytes of the longest word."""
    return max((len(word.encode("utf-8", "replace")) for word in _WORD.findall(text)), default=0)


def bounded(text: str, most: int, longest: int = LONGEST_WORD) -> str:
    """At most `most` characters of a text, with no word of more than `longest` bytes, and without lone surrogates."""
    text = text.encode("utf-8", "replace").decode()
    if len(text) > most:
        text = " ".join(text.split())[:most]  # tokenizers see runs of spaces as one
    for word in _WORD.finditer(text) if 4 * len(text) > longest else ():
        if len(word[0].encode()) > longest:
            return text[: word.start()] + word[0].encode()[:longest].decode("utf-8", "ignore")
    return text


class BoundedTokenizer:
    """`inner`, a tokenizer of texts -> tokens (N, T), with bounded texts."""

    def __init__(self, inner: Callable[[list[str]], Tensor], length: int) -> None:
        """`length`: tokens of the context."""
        self.inner, self.most = inner, CHARS_PER_TOKEN * length

    def __call__(self, texts: list[str]) -> Tensor:
        return self.inner([bounded(text, self.most) for text in texts])


def clip_tokenizer(length: int, **options: Any) -> Callable[[list[str]], Tensor]:
    """CLIP's tokenizer. Without options all share one vocabulary, which takes a tenth of a second to read."""
    clip = _clip_tokenizer()
    if options:
        found: Callable[[list[str]], Tensor] = type(clip)(context_length=length, **options)
        return found
    clip = copy(clip)
    clip.context_length = length
    return clip


@cache
def _clip_tokenizer() -> Any:
    from open_clip.tokenizer import SimpleTokenizer  # here: loaders of other tokens do without open_clip

    return SimpleTokenizer()
