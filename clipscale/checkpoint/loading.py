"""Verifies and loads checkpoints: as a whole in one process, or in shards on the ranks of a run, which share the verification."""

import warnings
import zlib
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from clipscale.checkpoint import archive
from clipscale.checkpoint.manifest import BLOCK, DTYPES, PLAIN, Manifest, Stored
from clipscale.checkpoint.shards import ShardReader, read_into
from clipscale.common.errors import UserError, first_line
from clipscale.common.files import opened
from clipscale.common.hardware import cores
from clipscale.distributed.world import World

SEPARATOR = "/"
"""Between the keys of nested dictionaries in the name of a tensor."""


def split(state: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A tree of dictionaries without its tensors, and the tensors by the keys on the way to them. Tensors in lists stay in the tree."""
    plain: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            tensors[f"{prefix}{key}"] = value
        elif isinstance(value, dict):
            plain[key], inner = split(value, f"{prefix}{key}{SEPARATOR}")
            tensors |= inner
        else:
            plain[key] = value
    return plain, tensors


def join(plain: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Put the tensors of `split` back into the tree, in place."""
    for name, tensor in tensors.items():
        *path, last = name.split(SEPARATOR)
        node = plain
        for key in path:
            node = node.setdefault(key, {})
        node[last] = tensor
    return plain


def load(path: Path, *, verified: bool = False, parts: Collection[str] | None = None) -> dict[str, Any]:
    """A checkpoint's state on the CPU, with whole tensors. Executes no pickled code.

    `verified`: its checksums have been verified. `parts`: read no tensors but those of these top-level entries.

    Raises UserError for a missing or damaged checkpoint, and for an unknown format.
    """
    if not path.exists():
        raise UserError(f"checkpoint {path} does not exist")
    if not verified:
        verify(path)
    try:
        if not path.is_dir():
            return archive.load_checkpoint(path)
        manifest = Manifest.read(path)
        wanted = {
            name: torch.empty(one.shape, dtype=DTYPES[one.dtype])
            for name, one in manifest.tensors.items()
            if parts is None or name.split(SEPARATOR)[0] in parts
        }
        read_tensors(path, manifest, wanted)
        return join(read_plain(path), wanted)
    except Exception as error:
        raise damaged(path, error) from error


def read_plain(path: Path) -> dict[str, Any]:
    """Everything in a checkpoint's folder that is no tensor of the model. Executes no pickled code."""
    state = archive.load(path / PLAIN)
    if not isinstance(state, dict):
        raise ValueError(f"{PLAIN} holds no state")
    return state


def read_tensors(path: Path, manifest: Manifest, targets: dict[str, Tensor]) -> int:
    """Fill whole tensors or shards of them in place; returns the bytes read."""
    reader = ShardReader(path, manifest)
    if targets:
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(targets, storage_reader=reader, no_dist=True)
    return reader.bytes_read


class Saved:
    """A verified checkpoint, from which the ranks of a run go on. Raises UserError where it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path, self.bytes_read = path, 0
        """The bytes of tensors that this rank has read."""
        self.values: dict[str, Any]
        """Everything that is no tensor of the model; of format 1 and 2, all of it."""
        try:
            self.values = read_plain(path) if path.is_dir() else archive.load_checkpoint(path)
        except Exception as error:  # the unpickler, zipfile, zlib and torch raise whatever the bytes lead to
            raise damaged(path, error) from error

    def state(self, like: Mapping[str, Tensor], world: World) -> dict[str, Any]:
        """The whole state. All ranks call it.

        The state of a sharded parameter in `like`, by its name, is sharded as the parameter is, and each rank reads its own part. Of the
        other tensors each rank reads a share, and they exchange them; they lie on the run's device. From formats 1 and 2 all is whole.
        """
        if not self.path.is_dir():
            return self.values
        try:
            manifest = Manifest.read(self.path)
            sharded: dict[str, Tensor] = {}
            for name, one in manifest.tensors.items():
                parameter = next((like[key] for key in name.split(SEPARATOR) if key in like), None)
                if isinstance(parameter, DTensor) and list(parameter.shape) == one.shape:
                    sharded[name] = torch.empty_like(parameter, dtype=DTYPES[one.dtype], requires_grad=False)
            whole = {name: one for name, one in manifest.tensors.items() if name not in sharded}
            sizes = {n: DTYPES[one.dtype].itemsize * torch.Size(one.shape).numel() for n, one in whole.items()}
            owners = shares(sizes, world.size)
            device = world.device if world.size > 1 else torch.device("cpu")
            own = {n: torch.empty(o.shape, dtype=DTYPES[o.dtype]) for n, o in whole.items() if owners[n] == world.rank}
            self.bytes_read = read_tensors(self.path, manifest, own | sharded)
        except Exception as error:  # the unpickler, zipfile, zlib and torch raise whatever the bytes lead to
            raise damaged(self.path, error) from error
        tensors = {name: exchanged(one, own.get(name), owners[name], device) for name, one in whole.items()}
        return join(self.values, sharded | tensors)


def shares(sizes: Mapping[str, int], world: int) -> dict[str, int]:
    """The rank that writes or reads each tensor, by their bytes: the largest first, to the rank that has least so far."""
    loads, owners = [0] * world, {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return owners


def exchanged(one: Stored, own: Tensor | None, owner: int, device: torch.device) -> Tensor:
    """A tensor that its owner has read, on every rank."""
    tensor = torch.empty(one.shape, dtype=DTYPES[one.dtype], device=device) if own is None else own.to(device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(tensor, owner)
    return tensor


def verify(path: Path, rank: int = 0, world: int = 1) -> int:
    """Verify a rank's share of a checkpoint; returns the bytes that it has read. Raises UserError for a damaged one.

    A checkpoint of format 1 or 2, a single file, is verified by rank 0 alone.
    """
    try:
        if path.is_dir():
            return _verify_folder(path, rank, world)
        return archive.verify(path) if rank == 0 else 0
    except Exception as error:  # zipfile, struct and zlib have their own
        raise damaged(path, error) from error


def _verify_folder(path: Path, rank: int, world: int) -> int:
    files = Manifest.read(path).files
    for name, file in files.items():
        held = (path / name).stat().st_size
        if held != file.bytes:
            raise ValueError(f"{name} has {held} bytes instead of {file.bytes}")
        if len(file.crc32) != -(-file.bytes // BLOCK):
            raise ValueError(f"{name} has checksums of {len(file.crc32)} blocks")
    blocks = [(name, number) for name, file in files.items() for number in range(len(file.crc32))][rank::world]

    def check(block: tuple[str, int]) -> int:
        name, number = block
        size = min(BLOCK, files[name].bytes - number * BLOCK)
        data = bytearray(size)
        with opened(path / name, buffering=0) as file:
            read_into(file, number * BLOCK, memoryview(data))
        if zlib.crc32(data) != files[name].crc32[number]:
            raise ValueError(f"checksum of {name} differs at byte {number * BLOCK}")
        return size

    with ThreadPoolExecutor(cores()) as threads:
        return sum(threads.map(check, blocks))


def damaged(path: Path, error: BaseException) -> UserError:
    """The error that a checkpoint cannot be used."""
    return UserError(f"checkpoint {path} is damaged or not a checkpoint ({first_line(error)})")
