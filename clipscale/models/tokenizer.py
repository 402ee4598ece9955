"""open_clip's tokenizers, for captions of any length. Data workers import this, and nothing else of open_clip."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache, partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clipscale.common.errors import UserError, first_line
from clipscale.common.record import Record
from clipscale.common.scratch import scratch

DEFAULT_CONTEXT_LENGTH = 77
FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
OPTIONS = {
    "tokenizer_class", "model_max_length", "padding_side", "truncation_side", "do_lower_case", "add_prefix_space",
    "add_bos_token", "add_eos_token", "clean_up_tokenization_spaces",
}  # fmt: skip
"""What is read of a tokenizer's configuration, beside its special tokens. Other values may be paths."""
CHARS_PER_TOKEN = 32
"""Characters that are kept for each token of the context. No token of CLIP's vocabulary stands for more."""


def _open_clips() -> Any:
    """open_clip's module of tokenizers by itself: the import of its package takes three times as long as torch's."""
    package = find_spec("open_clip")
    assert package is not None and package.origin is not None
    spec = spec_from_file_location("open_clip_tokenizer", Path(package.origin).with_name("tokenizer.py"))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OPEN_CLIP = _open_clips()
WORDS = 2**15
LONGEST = 32
"""Words whose tokens are remembered, and the longest; open_clip's tokenizer remembers all, for ever."""


class ClipTokenizer(OPEN_CLIP.SimpleTokenizer):  # type: ignore[name-defined]
    """open_clip's tokenizer in bounded memory, and faster. All share one table. Can be sent by pickle."""

    def __init__(self, clean: str = "lower") -> None:
        self.__dict__.update(vars(OPEN_CLIP._tokenizer))
        self.clean = clean
        self.clean_fn = OPEN_CLIP.get_clean_fn(clean)
        self.known_tokens = lru_cache(WORDS)(self._word_tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        return ClipTokenizer, (self.clean,)

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = []
        for word in self.pat.findall(self.clean_fn(text)):
            tokens += self.known_tokens(word) if len(word) <= LONGEST else self._word_tokens(word)
        return tokens

    def _word_tokens(self, word: str) -> list[int]:
        self.cache = {name: name for name in ("<start_of_text>", "<end_of_text>")}
        letters = "".join(self.byte_encoder[byte] for byte in word.encode())
        return [self.encoder[part] for part in self.bpe(letters).split(" ")]


class Tokenizer:
    """Captions -> int64 tokens (N, T) by `inner`, of so many characters of each caption as can matter.

    `inner` is loaded when it is first needed: a plan needs none. Raises UserError where it cannot be.

    The time of byte-pair encoding grows with the square of a word's length: it takes minutes for 80 kB of random
    letters.
    """

    def __init__(self, load: Callable[[], Callable[..., Any]], length: int) -> None:
        """`length`: T, tokens of the context."""
        self._load, self.length = load, length

    @cached_property
    def inner(self) -> Any:
        """open_clip's tokenizer."""
        return self._load()

    def __call__(self, texts: list[str]) -> Tensor:
        return torch.as_tensor(self.rows(texts))

    def rows(self, texts: list[str]) -> np.ndarray:
        """The same as an array."""
        return np.asarray(self.inner([self.cut(text) for text in texts], self.length))

    def for_workers(self) -> Callable[[list[str]], np.ndarray]:
        """`rows` as it is sent by pickle. Of a tokenizer of transformers it needs the Rust part alone."""
        own = Tokenizer(self._load, self.length)
        fast = getattr(getattr(self.inner, "tokenizer", None), "is_fast", False) and not self.inner.tokenizer_mode
        own.inner = RustTokens(self.inner, self.length) if fast else self.inner
        return own.rows

    def decoded(self, tokens: list[int]) -> str:
        """The text of a caption's tokens, without padding and the tokens at its ends."""
        if hasattr(self.inner, "tokenizer"):  # of transformers
            return str(self.inner.tokenizer.decode(tokens, skip_special_tokens=True))
        text: str = self.inner.decode(tokens)
        return text.partition("<end_of_text>")[0].removeprefix("<start_of_text>").strip()

    def cut(self, text: str) -> str:
        """Runs of spaces are one to tokenizers. JSON can hold lone surrogates."""
        most = CHARS_PER_TOKEN * self.length
        text = text.encode("utf-8", "replace").decode()
        return text if len(text) <= most else " ".join(text.split())[:most]


class RustTokens:
    """The Rust part of a tokenizer of transformers, whose import takes seconds: the same tokens."""

    def __init__(self, whole: Any, length: int) -> None:
        """`whole`: open_clip's HFTokenizer."""
        whole(["a"], length)  # sets how the part cuts and pads
        self.part = whole.tokenizer.backend_tokenizer
        self.clean = whole.clean_fn.__name__
        self.separator = whole.tokenizer.sep_token_id if whole.strip_sep_token else -1
        """Becomes 0."""

    def __call__(self, texts: list[str], length: int) -> np.ndarray:
        clean = getattr(OPEN_CLIP, self.clean)
        encoded = self.part.encode_batch([clean(text) for text in texts])
        rows = np.array([caption.ids for caption in encoded])
        return np.where(rows == self.separator, 0, rows)


def tokenizer_of(name: str, text: Record) -> Tokenizer:
    """The tokenizer of a model by its open_clip description's `text_cfg`. `name`: the model's, for messages.

    `hf_tokenizer_name` names a tokenizer of transformers, or a folder with its files; none of its code is run.
    """
    return Tokenizer(partial(_loaded, name, text), text.get("context_length", DEFAULT_CONTEXT_LENGTH))


def _loaded(name: str, text: Record) -> Any:
    options = dict(text.get("tokenizer_kwargs") or {})
    source = text.get("hf_tokenizer_name")
    try:
        if not source and options.keys() <= {"clean"}:
            return ClipTokenizer(**options)
        from open_clip.tokenizer import HFTokenizer, SimpleTokenizer

        if source:
            options |= {"tokenizer_mode": text.get("tokenizer_mode"), "trust_remote_code": False}
            with without_paths(source) as folder:
                return HFTokenizer(folder, text.get("context_length", DEFAULT_CONTEXT_LENGTH), **options)
        return SimpleTokenizer(**options)
    except Exception as error:  # the library of tokenizers raises no other
        lacks = "; pip install 'clipscale[hf]'" if isinstance(error, ImportError) else ""
        raise UserError(f"model.name={name!r}: its tokenizer cannot be loaded ({first_line(error)}){lacks}") from error


@contextmanager
def without_paths(source: str) -> Iterator[str]:
    """A folder of transformers' tokenizer as one that names no other file; the name of a known one as it is.

    Of a stranger's configuration only plain values are kept. Raises OSError, ValueError.
    """
    folder = Path(source)
    if not folder.is_dir():
        yield source
        return
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    kept = {name: value for name, value in config.items() if name in OPTIONS or name.endswith("_token")}
    with tempfile.TemporaryDirectory(dir=scratch()) as copy:
        shutil.copy(folder / FILE, copy)
        (Path(copy) / CONFIG).write_text(json.dumps(kept), encoding="utf-8")
        yield copy
