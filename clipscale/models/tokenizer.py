"""open_clip's tokenizers, for captions of any length."""

from collections.abc import Callable
from typing import Any

import open_clip
from open_clip.tokenizer import DEFAULT_CONTEXT_LENGTH, HFTokenizer, SimpleTokenizer
from torch import Tensor

from clipscale.common.errors import UserError, first_line

CHARS_PER_TOKEN = 32
"""Characters that are kept for each token of the context. No token of CLIP's vocabulary stands for more."""


class Tokenizer:
    """Captions -> int64 tokens (N, T) by `inner`, of so many characters of each caption as can matter.

    The time of byte-pair encoding grows with the square of a word's length: it takes minutes for 80 kB of random
    letters.
    """

    def __init__(self, inner: Callable[..., Tensor], length: int) -> None:
        """`length`: T, tokens of the context."""
        self.inner, self.length = inner, length

    def __call__(self, texts: list[str]) -> Tensor:
        return self.inner([self.cut(text) for text in texts], self.length)

    def cut(self, text: str) -> str:
        """Runs of spaces are one to tokenizers. JSON can hold lone surrogates."""
        most, text = CHARS_PER_TOKEN * self.length, text.encode("utf-8", "replace").decode()
        return text if len(text) <= most else " ".join(text.split())[:most]


def tokenizer_of(name: str, text: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a model by its open_clip description's `text_cfg`. `name`: the model's, for messages.

    `hf_tokenizer_name` names a tokenizer of transformers, or a folder with its files; none of its code is run. Raises
    UserError.
    """
    length = text.get("context_length", DEFAULT_CONTEXT_LENGTH)
    options = dict(text.get("tokenizer_kwargs") or {})
    source = text.get("hf_tokenizer_name")
    try:
        if source:
            options |= {"tokenizer_mode": text.get("tokenizer_mode"), "trust_remote_code": False}
            return Tokenizer(HFTokenizer(source, length, **options), length)
        return Tokenizer(SimpleTokenizer(**options) if options else open_clip.tokenizer._tokenizer, length)
    except (ImportError, OSError, ValueError, TypeError) as error:
        lacks = "; pip install 'clipscale[hf]'" if isinstance(error, ImportError) else ""
        raise UserError(f"model.name={name!r}: its tokenizer cannot be loaded ({first_line(error)}){lacks}") from error
