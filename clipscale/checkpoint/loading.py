"""Reads checkpoints, and verifies them first. Their format: `format.py`."""

import pickle
from collections.abc import Collection, Mapping
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from clipscale.checkpoint.format import (
    SEPARATOR,
    damaged_checkpoint_to_user_error,
    ignore_warning_of_one_process,
    merge_tensors,
    read_meta,
    size_and_crc32,
)
from clipscale.checkpoint.state import CheckpointDescription, CheckpointState
from clipscale.common.cpu import cores
from clipscale.common.errors import to_user_error
from clipscale.common.files import DAMAGED_OR_FOREIGN, check_inside


def read_description(path: Path) -> CheckpointDescription:
    """A checkpoint's description, without its tensors. Raises UserError."""
    with damaged_checkpoint_to_user_error(path, DAMAGED_OR_FOREIGN):
        return CheckpointDescription.from_state_dict(read_meta(path)["values"])


def verify(path: Path, rank: int = 0, world_size: int = 1) -> None:
    """Compare a rank's share of a checkpoint's files with their checksums. Raises UserError for a damaged one."""
    meta = read_meta(path)

    def check(name: str) -> None:
        file = path / name
        size, checksum = meta["files"][name]
        check_inside(file, path)
        if file.stat().st_size != size or size_and_crc32(file) != (size, checksum):
            raise ValueError(f"size or checksum of {name} differs")

    # At a signal this process leaves the pool at once, even if a disk does not answer.
    with damaged_checkpoint_to_user_error(path), ThreadPool(cores()) as threads:
        threads.map(check, list(meta["files"])[rank::world_size])


# ---- loading ----


class RestrictedReader(dcp.FileSystemReader):
    """torch's reader, which unpickles from `.metadata` only the classes that describe tensors and files."""

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """torch's metadata of the checkpoint. Raises UserError."""
        path = Path(self.checkpoint_id)
        with to_user_error(f"checkpoint {path} is damaged or not a checkpoint"):
            check_inside(path / ".metadata", path)
            with (path / ".metadata").open("rb") as file:
                metadata = MetadataUnpickler(file).load()  # damaged bytes may raise any exception
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
    is_verified: bool = False,
    entries: Collection[str] | None = None,
    like: Mapping[str, Tensor] = MappingProxyType({}),
) -> CheckpointState:
    """A checkpoint on the CPU. Executes no pickled code.

    `is_verified`: its checksums have been verified. `entries`: read the tensors of these top-level entries alone.
    `like`: parameters by name. The weight and the optimizer's state of a sharded parameter are sharded in the same way,
    and each rank reads its own shards. All other tensors are whole.

    Raises UserError for a missing or damaged checkpoint, and for an unknown format.
    """
    if not is_verified:
        verify(path)
    reader = RestrictedReader(path)
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
        ignore_warning_of_one_process()
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    with damaged_checkpoint_to_user_error(path, DAMAGED_OR_FOREIGN):
        return CheckpointState.from_state_dict(merge_tensors(read_meta(path)["values"], tensors))
