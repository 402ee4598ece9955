"""Reads checkpoints, and verifies them first. Their format and content: `checkpoint/__init__.py`."""

import base64
import json
import pickle
import warnings
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from io import RawIOBase
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import MappingProxyType
from typing import TypedDict, cast

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from clipscale.checkpoint.state import CheckpointState
from clipscale.common.checkpoints import META
from clipscale.common.errors import UserError, one_line, to_user_error
from clipscale.common.files import DAMAGED, check_inside
from clipscale.common.hardware import cores
from clipscale.own_machine.limits import as_user_error

FORMAT = 1
SEPARATOR = "/"
# Bytes that a checksum reads at a time.
READ_BYTES = 2**24


class Meta(TypedDict):
    """The content of meta.json."""

    format: int
    # Size and CRC-32 by the name of the file.
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
    """Put the tensors of `split_tensors` back into the tree, in place."""
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
    """The text of meta.json. `values`: by `values_text`; `files`: size and CRC-32 by name."""
    text = f'{{"format": {FORMAT}, "files": {json.dumps(files)}, "values": {values}}}'
    return f'{{"crc32": {zlib.crc32(text.encode())}, "meta": {text}}}\n'


def read_meta(path: Path) -> Meta:
    """What `meta_text` has written: `files` and `values`. Raises UserError."""

    def decoded(node: dict[str, str]) -> object:
        if node.keys() == {"base64"}:
            return torch.from_numpy(np.frombuffer(base64.b64decode(node["base64"]), np.uint8).copy())
        return getattr(torch, node["dtype"]) if node.keys() == {"dtype"} else node

    with damage_to_user_error(path):
        check_inside(path / META, path)
        start, _, text = (path / META).read_text().removesuffix("}\n").partition(', "meta": ')
        if start != f'{{"crc32": {zlib.crc32(text.encode())}':
            raise ValueError(f"checksum of {META} differs")
        meta: Meta = json.loads(text, object_hook=decoded)
        if meta["format"] != FORMAT:
            raise UserError(f"checkpoint {path} has the format {meta['format']}, this version reads {FORMAT}")
        return meta


def read_values(path: Path) -> CheckpointState:
    """A checkpoint without its tensors. Raises UserError."""
    with damage_to_user_error(path):
        return CheckpointState.of(read_meta(path)["values"])


# ---- checksums ----


def size_and_crc32(file: Path) -> tuple[int, int]:
    """Size and CRC-32 of a file. Raises OSError."""
    with file.open("rb", buffering=0) as stream:
        return stream_size_and_crc32(stream)


def stream_size_and_crc32(stream: RawIOBase) -> tuple[int, int]:
    size = 0
    checksum = 0
    while block := stream.read(READ_BYTES):
        size += len(block)
        checksum = zlib.crc32(block, checksum)
    return size, checksum


def verify(path: Path, rank: int = 0, world: int = 1) -> None:
    """Compare a rank's share of a checkpoint's files with their checksums. Raises UserError for a damaged one."""
    meta = read_meta(path)

    def check(name: str) -> None:
        file = path / name
        size, checksum = meta["files"][name]
        check_inside(file, path)
        if file.stat().st_size != size or size_and_crc32(file) != (size, checksum):
            raise ValueError(f"size or checksum of {name} differs")

    # A signal leaves the pool at once, also where a disk is silent.
    with damage_to_user_error(path), ThreadPool(cores()) as threads:
        threads.map(check, list(meta["files"])[rank::world])


# ---- loading ----


class Reader(dcp.FileSystemReader):
    """torch's reader, which unpickles from `.metadata` only the classes that describe tensors and files."""

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """Raises UserError."""
        path = Path(self.checkpoint_id)
        with to_user_error(f"checkpoint {path} is damaged or not a checkpoint"):
            check_inside(path / ".metadata", path)
            with (path / ".metadata").open("rb") as file:
                metadata = MetadataUnpickler(file).load()  # which raises whatever its bytes lead to
            for name in {stored.relative_path for stored in metadata.storage_data.values()}:
                check_inside(path / name, path)
        return metadata


class MetadataUnpickler(pickle.Unpickler):
    """Raises UnpicklingError for a class that `.metadata` does not need."""

    MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    OTHERS = (
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),  # Python 3.13
    )

    def find_class(self, module: str, name: str) -> object:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or (module, name) in self.OTHERS:
            return super().find_class(module, name)
        if module in self.MODULES and "." not in name:
            value = super().find_class(module, name)
            if getattr(value, "__module__", "") == module:
                return value
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into .metadata")


def load(
    path: Path,
    *,
    verified: bool = False,
    entries: Collection[str] | None = None,
    like: Mapping[str, Tensor] = MappingProxyType({}),
) -> CheckpointState:
    """A checkpoint on the CPU. Executes no pickled code.

    `verified`: its checksums have been verified. `entries`: read the tensors of these top-level entries alone.
    `like`: parameters by name. The weight and the optimizer's state of a sharded parameter are sharded as it is, and
    each rank reads its own shards. All other tensors are whole.

    Raises UserError for a missing or damaged checkpoint, and for an unknown format.
    """
    if not verified:
        verify(path)
    reader = Reader(path)
    tensors: dict[str, Tensor] = {}
    for name, stored in reader.read_metadata().state_dict_metadata.items():
        keys = name.split(SEPARATOR)
        if entries is None or keys[0] in entries:
            assert isinstance(stored, TensorStorageMetadata)
            parameter = next((like[key] for key in keys if key in like), None)
            dtype = stored.properties.dtype
            if isinstance(parameter, DTensor) and parameter.shape == stored.size:
                tensors[name] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            else:
                tensors[name] = torch.empty(stored.size, dtype=dtype)
    if tensors:
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    with damage_to_user_error(path):
        return CheckpointState.of(merge_tensors(read_meta(path)["values"], tensors))


@contextmanager
def damage_to_user_error(path: Path) -> Iterator[None]:
    """Around what reads a checkpoint's files: turns DAMAGED into a UserError."""
    try:
        yield
    except DAMAGED as error:
        if as_user_error(error) is not error:
            raise
        raise UserError(f"checkpoint {path} is damaged or not a checkpoint ({one_line(error)})") from error
