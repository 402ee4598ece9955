"""CLIP's byte-pair encoding: the tokens of open_clip's own tokenizer. Data workers import it.

Tokens are numbered: the 256 bytes within a word, the same at its end, then a token for each merge of two.
"""

import gzip
import html
import string
from functools import lru_cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import ftfy
import numpy as np
import regex

FILE = "bpe_simple_vocab_16e6.txt.gz"
"""Of open_clip's package: the merges, a line each, in their order."""
MERGES = 48894
START, END = 512 + MERGES, 513 + MERGES
SPECIAL = {"<start_of_text>": START, "<end_of_text>": END}
WORDS = regex.compile(
    "|".join(SPECIAL) + r"|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+", regex.IGNORECASE
)
CLEANINGS = ("lower", "whitespace", "canonicalize")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def _read() -> tuple[list[int], dict[tuple[int, int], int]]:
    """The token of each byte within a word, and of each pair that is merged."""
    package = find_spec("open_clip")
    assert package is not None and package.origin is not None
    lines = gzip.decompress((Path(package.origin).parent / FILE).read_bytes()).decode().split("\n")
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]
    names = characters + [f"{character}</w>" for character in characters]
    tokens = {name: token for token, name in enumerate(names)}
    pairs = {}
    for token, line in enumerate(lines[1 : 1 + MERGES], 512):
        first, second = line.split()
        pairs[tokens[first], tokens[second]] = token
        tokens[first + second] = token
    order = printable + others
    return [order.index(byte) for byte in range(256)], pairs


BYTES, PAIRS = _read()


@lru_cache(2**16)
def word_tokens(word: str) -> tuple[int, ...]:
    """The tokens of a word: the pair that comes first among the merges is merged, again and again."""
    parts = [BYTES[byte] for byte in word.encode()]
    parts[-1] += 256
    while len(parts) > 1:
        pair = min(pairwise(parts), key=lambda pair: PAIRS.get(pair, START))
        if pair not in PAIRS:
            break
        merged: list[int] = []
        for part in parts:
            if merged and (merged[-1], part) == pair:
                merged[-1] = PAIRS[pair]
            else:
                merged.append(part)
        parts = merged
    return tuple(parts)


def cleaned(text: str, how: str) -> str:
    """As open_clip's `clean`, one of CLEANINGS: `whitespace` keeps capitals, `canonicalize` has no punctuation."""
    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    if how == "canonicalize":
        text = text.strip().replace("_", " ").translate(PUNCTUATION)
    text = " ".join(text.split())
    return text if how == "whitespace" else text.lower()


class BytePairs:
    """Captions -> tokens (N, T) int64, cut at T and padded with 0."""

    def __init__(self, clean: str = "lower") -> None:
        self.clean = clean

    def __call__(self, texts: list[str], length: int) -> np.ndarray:
        rows = np.zeros((len(texts), length), np.int64)
        for row, text in zip(rows, texts):
            tokens = [START, *self.encode(text), END][:length]
            tokens[-1] = END
            row[: len(tokens)] = tokens
        return rows

    def encode(self, text: str) -> list[int]:
        """All tokens between start and end."""
        tokens: list[int] = []
        for word in WORDS.findall(cleaned(text, self.clean)):
            tokens += (SPECIAL[word],) if word in SPECIAL else word_tokens(word)
        return tokens

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens, with the names of start, end and padding."""
        from open_clip.tokenizer import _tokenizer  # seconds to import: workers decode nothing

        return str(_tokenizer.decode(tokens))
