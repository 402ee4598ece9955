"""Storage of torch.distributed.checkpoint in our format: what its planners decide is written to and read from (see manifest.py).

The planners cut and join shards for any number of ranks.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from clipscale import __version__
from clipscale.checkpoint.manifest import DTYPE_NAMES, DTYPES, PLAIN, Manifest, Piece, Stored, SummedFile
from clipscale.common.files import inner_folder, opened, replacing


def done(value: Any) -> Future[Any]:
    """A future that is complete."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class ShardWriter(StorageWriter):
    """Writes this rank's pieces to one file; rank 0 then writes the plain values and the manifest."""

    def __init__(self, folder: Path, step: int, plain: dict[str, Any] | None, about: dict[str, Any]) -> None:
        """`plain` and `about` on rank 0: the values of state.pt, and what the manifest says about them."""
        self.folder, self.step, self.plain, self.about = folder, step, plain, about
        self.complete: Callable[[], None] = lambda: None
        """Called by rank 0 when everything is on the disk."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from one save to the next."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The folder may not be there yet."""
        inner_folder(self.folder.parent, self.folder.name)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=f"rank_{rank:05d}.safetensors") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the plan's pieces, in a file that safetensors reads too. Raises OSError."""
        results: list[WriteResult] = []
        if not plan.items:
            return done(results)
        header, places = safetensors_header(plan.items)
        with replacing(self.folder / plan.storage_data, sync=True) as raw:
            file = SummedFile(raw)
            file.write(header)
            for item, at in zip(plan.items, places, strict=True):
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor)
                size = file.write(bytes_of(tensor))
                offsets, sizes = list(item.index.offset or ()), list(item.tensor_data.chunk.sizes)  # type: ignore[union-attr]
                piece = Piece(plan.storage_data, at, offsets, sizes)
                results.append(WriteResult(item.index, size, (piece, file.record)))
        return done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, when all ranks have written: the plain values and the manifest. Raises OSError."""
        with replacing(self.folder / PLAIN, sync=True) as raw:
            plain = SummedFile(raw)
            torch.save(self.plain, plain)  # type: ignore[arg-type]
        files, tensors = {PLAIN: plain.record}, {}
        for name, one in metadata.state_dict_metadata.items():
            assert isinstance(one, TensorStorageMetadata)
            tensors[name] = Stored(DTYPE_NAMES[one.properties.dtype], list(one.size), [])
        for result in (result for rank in results for result in rank):
            piece, file = result.storage_data
            files[piece.file] = file
            tensors[result.index.fqn].pieces.append(piece)
        about = {"clipscale": __version__, "time": round(time.time(), 3), "processes": len(results), **self.about}
        Manifest(self.step, files, tensors, about).write(self.folder)
        self.complete()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def safetensors_header(items: Sequence[WriteItem]) -> tuple[bytes, list[int]]:
    """The header of a safetensors file with these pieces in order, and the place of each in the file."""
    entries: dict[str, Any] = {}
    places, at = [], 0
    for item in items:
        assert item.tensor_data is not None
        dtype, shape = item.tensor_data.properties.dtype, list(item.tensor_data.chunk.sizes)
        size = dtype.itemsize * torch.Size(shape).numel()
        offsets = list(item.index.offset or ())
        key = item.index.fqn if item.index.fqn not in entries else f"{item.index.fqn}@{offsets}"
        entries[key] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [at, at + size]}
        places.append(at)
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, [8 + len(text) + place for place in places]


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes in host memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


class ShardReader(StorageReader):
    """Reads the bytes that a rank's plan asks for. The checkpoint has been verified."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.bytes_read = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from one load to the next."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The manifest as torch's planners take it."""
        storage: dict[MetadataIndex, Piece] = {}
        tensors: dict[str, Any] = {}
        for name, one in self.manifest.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in one.pieces]
            properties = TensorProperties(dtype=DTYPES[one.dtype])
            tensors[name] = TensorStorageMetadata(properties, torch.Size(one.shape), chunks)
            storage |= {MetadataIndex(name, piece.offsets): piece for piece in one.pieces}
        return Metadata(tensors, storage_data=storage)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._storage = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Raises OSError, and ValueError for a file that has become shorter."""
        with ExitStack() as stack:
            files: dict[str, BinaryIO] = {}
            for item in plan.items:
                piece = self._storage[item.storage_index]
                if piece.file not in files:
                    files[piece.file] = stack.enter_context(opened(self.folder / piece.file, buffering=0))
                target = planner.resolve_tensor(item)
                target.detach().copy_(self._read(files[piece.file], piece, item))
                planner.commit_tensor(item, target)
        return done(None)

    def _read(self, file: BinaryIO, piece: Piece, item: ReadItem) -> Tensor:
        """The part of a piece that the item asks for. Only its rows are read."""
        dtype = DTYPES[self.manifest.tensors[item.storage_index.fqn].dtype]
        if not piece.sizes:
            return self._tensor(file, piece.at, dtype, [])
        first, rows = item.storage_offsets[0], item.lengths[0]
        row = dtype.itemsize * torch.Size(piece.sizes[1:]).numel()
        part = self._tensor(file, piece.at + first * row, dtype, [rows, *piece.sizes[1:]])
        rest = tuple(slice(at, at + size) for at, size in zip(item.storage_offsets[1:], item.lengths[1:]))
        return part[(slice(None), *rest)]

    def _tensor(self, file: BinaryIO, at: int, dtype: torch.dtype, shape: list[int]) -> Tensor:
        found = torch.empty(shape, dtype=dtype)
        read_into(file, at, bytes_of(found))
        self.bytes_read += found.nbytes
        return found

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def read_into(file: BinaryIO, at: int, block: memoryview) -> None:
    """Fill a block with the bytes from place `at` on. Raises OSError, and ValueError where the file ends early."""
    while len(block):
        count = os.preadv(file.fileno(), [block], at)
        if not count:
            raise ValueError(f"{Path(file.name).name} is cut off")
        at, block = at + count, block[count:]
