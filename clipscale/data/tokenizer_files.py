"""Copies a tokenizer's files from a stranger's folder, without options that name other files."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clipscale.common import files
from clipscale.common.record import Record

# Files of a vocabulary; a tokenizer's folder has one or more.
VOCABULARIES = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "spiece.model")
# Files in which a folder describes its tokenizer; later files override earlier ones.
CONFIGS = ("special_tokens_map.json", "tokenizer_config.json")
# Options that are read from a tokenizer's configuration, beside its special tokens. Other options may be paths.
OPTIONS = {
    "tokenizer_class", "model_max_length", "padding_side", "truncation_side", "do_lower_case", "add_prefix_space",
    "add_bos_token", "add_eos_token", "clean_up_tokenization_spaces", "model_input_names",
}  # fmt: skip


@contextmanager
def sanitised_copy(source: str) -> Iterator[str]:
    """A copy of a tokenizer's folder that names no file elsewhere. A name that is not a folder stays as it is.

    Only plain values of a stranger's configuration are kept. Raises OSError, ValueError.
    """
    folder = Path(source)
    if not folder.is_dir():
        yield source
        return
    config: Record = {}
    for name in CONFIGS:
        config |= files.read_json(folder / name) if (folder / name).is_file() else {}
    kept = {name: value for name, value in config.items() if name in OPTIONS or name.endswith("_token")}
    vocabulary = [folder / name for name in VOCABULARIES if (folder / name).is_file()]
    if not vocabulary:
        raise FileNotFoundError(f"{folder} has none of {', '.join(VOCABULARIES)}; download them, too")
    with tempfile.TemporaryDirectory() as copy:
        for file in vocabulary:
            shutil.copy(file, copy)
        (Path(copy) / CONFIGS[-1]).write_text(json.dumps(kept), encoding="utf-8")
        yield copy
