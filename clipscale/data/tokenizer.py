"""open_clip's tokenizers, for captions of any length, and the padding of their tokens.

Letters: N captions, T tokens of the context.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeAlias

import numpy as np
import open_clip
from open_clip.tokenizer import DEFAULT_CONTEXT_LENGTH, HFTokenizer, SimpleTokenizer
from torch import Tensor

from clipscale.common.errors import UserError, one_line
from clipscale.common.record import Record
from clipscale.data.tokenizer_files import sanitised_copy

# Characters that are kept for each token of the context. No token of CLIP's vocabulary stands for more. A
# tokenizer with longer ones may lose the end of a caption that consists of them.
CHARS_PER_TOKEN = 32
# Size of the vocabulary if a description gives none: CLIP's.
VOCABULARY = 49408
# Most words that are remembered with their tokens. open_clip's tokenizer would remember all, for ever.
WORDS = 2**14


# open_clip's tokenizers.
AnyTokenizer: TypeAlias = SimpleTokenizer | HFTokenizer


class Tokenizer:
    """Captions -> int64 tokens (N, T) by `inner`, from as many characters of each caption as can matter.

    `inner` is loaded when it is first needed: most plans need none. Raises UserError where it cannot be.

    The time of byte-pair encoding grows with the square of a word's length: it takes minutes for 80 kB of random
    letters.
    """

    def __init__(self, load: Callable[[], AnyTokenizer], length: int) -> None:
        """`length`: T, tokens of the context."""
        self._load = load
        self.length = length

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle without `inner`: each process imports open_clip's own."""
        return Tokenizer, (self._load, self.length)

    @cached_property
    def inner(self) -> AnyTokenizer:
        """open_clip's tokenizer."""
        return self._load()

    def __call__(self, texts: list[str]) -> Tensor:
        tokens = self.inner([self.shortened(text) for text in texts], self.length)
        if isinstance(self.inner, SimpleTokenizer) and len(self.inner.cache) > WORDS:
            self.inner.cache = {name: name for name in ("<start_of_text>", "<end_of_text>")}
        return tokens

    @cached_property
    def bos_eos_ids(self) -> tuple[int, int]:
        """The ids of the token before a caption, and of the one after it."""
        first, last = self([""])[0, :2].tolist()
        return first, last

    def text(self, tokens: list[int]) -> str:
        """The caption of these tokens, between those two."""
        first, last = self.bos_eos_ids
        inside = tokens[tokens[0] == first :]
        inside = inside[: inside.index(last)] if last in inside else inside
        inner = self.inner if isinstance(self.inner, SimpleTokenizer) else self.inner.tokenizer
        return " ".join(inner.decode(inside).split())

    def shortened(self, text: str) -> str:
        """The characters of a caption that can matter.

        Lone surrogates, which JSON can hold and no tokenizer takes, become `?`. In a caption that is shortened each run
        of white space becomes one space first, so that spaces do not displace words.
        """
        most = CHARS_PER_TOKEN * self.length
        text = text.encode("utf-8", "replace").decode()
        return text if len(text) <= most else " ".join(text.split())[:most]


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


def tokenizer_of(name: str, text_cfg: Record) -> Tokenizer:
    """The tokenizer that the `text_cfg` of an open_clip description asks for. `name`: the model's, for messages.

    `hf_tokenizer_name` names a tokenizer of transformers, or a folder with its files; none of its code is run.
    """
    return Tokenizer(partial(_loaded, name, text_cfg), context_length_of(text_cfg))


def context_length_of(text_cfg: Record) -> int:
    """The context length in tokens that a model's `text_cfg` gives."""
    return int(text_cfg.get("context_length", DEFAULT_CONTEXT_LENGTH))


def _loaded(name: str, text_cfg: Record) -> AnyTokenizer:
    options = dict(text_cfg.get("tokenizer_kwargs") or {})
    source = text_cfg.get("hf_tokenizer_name")
    try:
        if source:
            options |= {"tokenizer_mode": text_cfg.get("tokenizer_mode"), "trust_remote_code": False}
            with sanitised_copy(source) as folder:
                made = HFTokenizer(folder, context_length_of(text_cfg), **options)
                _check(made.tokenizer.get_vocab(), text_cfg, pads=made.tokenizer.pad_token is not None)
        else:
            made = SimpleTokenizer(**options) if options else open_clip.tokenizer._tokenizer
            _check(made.encoder, text_cfg)
        made([""])
        return made
    except Exception as error:  # the library of tokenizers raises Exception itself
        lacks = "; pip install 'clipscale[hf]'" if isinstance(error, ImportError) else ""
        raise UserError(f"model.name={name!r}: its tokenizer cannot be loaded ({one_line(error)}){lacks}") from error


def _check(vocabulary: dict[str, int], text_cfg: Record, *, pads: bool = True) -> None:
    """Raise ValueError for a tokenizer that cannot be used with a model of this `text_cfg`."""
    if not pads:
        raise ValueError("it has no pad_token; name one in its tokenizer_config.json")
    vocab_size = text_cfg.get("vocab_size", VOCABULARY)
    largest = max(vocabulary.values(), default=0)
    if largest >= vocab_size and not text_cfg.get("hf_model_name"):
        raise ValueError(f"its largest token is {largest}, and the model has {vocab_size}: it is another model's")
