"""The format of a checkpoint's files, which saving and loading share. `checkpoint/__init__.py` lists the files."""

import base64
import json
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import RawIOBase
from pathlib import Path
from typing import TypedDict, cast

import numpy as np
import torch
from torch import Tensor

from clipscale.common.errors import UserError, one_line
from clipscale.common.files import DAMAGED, check_inside
from clipscale.common.limits import explain_limit
from clipscale.run_folder.paths import META

FORMAT = 1
SEPARATOR = "/"
# Bytes that a checksum reads at a time.
READ_BYTES = 2**24


class Meta(TypedDict):
    """The content of meta.json."""

    format: int
    # File name -> size and CRC-32.
    files: dict[str, list[int]]
    # The tree of what is saved, without its tensors.
    values: dict[str, object]


# ---- a state and its parts ----


def split_tensors(state: Mapping[str, object], prefix: str = "") -> tuple[dict[str, object], dict[str, Tensor]]:
    """A tree of dictionaries without its tensors, and the tensors by their keys. Tensors in lists stay in the tree."""
    values: dict[str, object] = {}
    tensors: dict[str, Tensor] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            tensors[f"{prefix}{key}"] = value
        elif isinstance(value, dict):
            values[key], inner = split_tensors(value, f"{prefix}{key}{SEPARATOR}")
            tensors |= inner
        else:
            values[key] = value
    return values, tensors


def merge_tensors(values: dict[str, object], tensors: Mapping[str, Tensor]) -> dict[str, object]:
    """The tree of `split_tensors`, with its tensors back in place."""
    for name, tensor in tensors.items():
        *path, leaf = name.split(SEPARATOR)
        node = values
        for key in path:
            node = cast("dict[str, object]", node.setdefault(key, {}))
        node[leaf] = tensor
    return values


# ---- meta.json ----


def values_text(values: Mapping[str, object]) -> str:
    """Values as JSON. Byte tensors, the random states, become base64. Raises TypeError for what JSON cannot hold."""

    def encoded(value: object) -> dict[str, str]:
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, Tensor) and value.dtype == torch.uint8:
            return {"base64": base64.b64encode(value.cpu().numpy().tobytes()).decode()}
        raise TypeError(f"a checkpoint cannot hold {value!r}")

    return json.dumps(values, default=encoded)


def meta_text(values: str, files: Mapping[str, tuple[int, int]]) -> str:
    """The text of meta.json. `values`: the text of `values_text`. `files`: file name -> size and CRC-32."""
    text = f'{{"format": {FORMAT}, "files": {json.dumps(files)}, "values": {values}}}'
    return f'{{"crc32": {zlib.crc32(text.encode())}, "meta": {text}}}\n'


def read_meta(path: Path) -> Meta:
    """Read what `meta_text` has written: `files` and `values`. Raises UserError."""
    with damaged_checkpoint_to_user_error(path):
        check_inside(path / META, path)
        start, _, text = (path / META).read_text().removesuffix("}\n").partition(', "meta": ')
        if start != f'{{"crc32": {zlib.crc32(text.encode())}':
            raise ValueError(f"checksum of {META} differs")
        meta = json.loads(text, object_hook=decoded)
        if not isinstance(meta, dict):
            raise ValueError(f"{META} holds no values with names")
        if meta.get("format") != FORMAT:
            raise UserError(f"checkpoint {path} has the format {meta.get('format')}, this version reads {FORMAT}")
        check_form(meta)
        return cast(Meta, meta)


def decoded(node: dict[str, object]) -> object:
    """Decode a dictionary that `values_text` has made of a value; return any other one unchanged. Raises ValueError."""
    match node:
        case {"base64": str(text)} if len(node) == 1:
            return torch.from_numpy(np.frombuffer(base64.b64decode(text), np.uint8).copy())
        case {"dtype": str(name)} if len(node) == 1:
            dtype = getattr(torch, name, None)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"torch has no dtype {name}")
            return dtype
    return node


def check_form(meta: Mapping[str, object]) -> None:
    """Raise ValueError for a meta.json whose values do not have the types of `Meta`."""
    files = meta.get("files")
    are_sums = isinstance(files, dict) and all(isinstance(sums, list) and len(sums) == 2 for sums in files.values())
    if not are_sums or not isinstance(meta.get("values"), dict):
        raise ValueError(f"{META} has another form")


# ---- checksums ----


def size_and_crc32(file: Path) -> tuple[int, int]:
    """Size and CRC-32 of a file. Raises OSError."""
    with file.open("rb", buffering=0) as stream:
        return stream_size_and_crc32(stream)


def stream_size_and_crc32(stream: RawIOBase) -> tuple[int, int]:
    """Size and CRC-32 of the rest of a stream."""
    size = 0
    checksum = 0
    while block := stream.read(READ_BYTES):
        size += len(block)
        checksum = zlib.crc32(block, checksum)
    return size, checksum


# ---- errors ----


def ignore_warning_of_one_process() -> None:
    """Silence torch's warning, in the whole process, that a checkpoint is of one process alone."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled")


@contextmanager
def damaged_checkpoint_to_user_error(path: Path, caught: tuple[type[Exception], ...] = DAMAGED) -> Iterator[None]:
    """Context of code that reads a checkpoint's files: turns the `caught` errors into a UserError.

    `caught`: DAMAGED where a checkpoint is verified, which may then be renamed; else DAMAGED_OR_FOREIGN.
    """
    try:
        yield
    except caught as error:
        if explain_limit(error) is not error:
            raise
        raise UserError(f"checkpoint {path} is damaged or not a checkpoint ({one_line(error)})") from error
