"""Reads torch's archives, which may come from strangers: nothing in them runs, and they take about as much memory as they have bytes.

`torch.load(weights_only=True)` alone unpacks compressed records, makes `bytearray(2**40)`, and returns lists and tensors that stand for
any size, since their parts are shared.
"""

import pickletools
import re
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from clipscale.common.files import opened

NAMES = re.compile(
    r"collections OrderedDict|torch Size|torch device|torch Tensor|torch\.nn\.parameter Parameter|torch\.serialization _get_layout"
    r"|torch (float|bfloat|u?int|complex|bool)\w*|torch(\.storage)? (?!Untyped)\w+Storage"
    r"|torch\._utils _rebuild_(tensor|tensor_v2|parameter|parameter_with_state|device_tensor_from_cpu_tensor)"
)
"""Modules and names that values, tensors and parameters need."""
MOST_VALUES = 1 << 18
"""Values in an archive, apart from tensors' numbers: five for each shard stream, a few for each parameter and for each chunk of a step."""
FREE_BYTES = 1 << 20
"""Tensors may share memory: together they have at most twice the file's bytes and these."""


def load(path: Path, *, mmap: bool = False) -> Any:
    """The values in an archive, with tensors on the CPU. With `mmap`, tensors are read from the file when they are used.

    Raises OSError, ValueError, and torch's and zipfile's errors.
    """
    with opened(path) as file:
        size = path.stat().st_size
        check_records(file, size)
    values = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    check_size(values, size)
    return values


def check_records(file: BinaryIO, size: int) -> None:
    """Raise ValueError for an archive of `size` bytes with records that are packed or overlap, or that name more than values."""
    # torch looks at the beginning, zipfile at the end.
    if file.read(4) != b"PK\x03\x04" or not zipfile.is_zipfile(file):
        raise ValueError("it is no archive of torch 1.6 or later; torch.load it where it is trusted, and save it again")
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        for record in records:
            if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
                raise ValueError(f"{record.filename[:80]} is compressed")
            if record.filename.endswith("/constants.pkl"):
                raise ValueError("it is a TorchScript archive")
        if sum(record.file_size for record in records) > size:
            raise ValueError("its records overlap")
        for record in records:
            if record.filename.endswith("data.pkl"):
                with archive.open(record) as pickled:
                    check_names(pickled)


def check_names(pickled: Any) -> None:
    """Raise ValueError for a pickle that calls anything but what makes values and tensors."""
    for operation, argument, _ in pickletools.genops(pickled):
        if operation.name == "STACK_GLOBAL" or (operation.name == "GLOBAL" and not NAMES.fullmatch(str(argument))):
            raise ValueError(f"it holds {str(argument)[:80]!r}, which is no value")


def check_size(values: Any, size: int) -> None:
    """Raise ValueError for values that stand for much more than the `size` bytes of their file: shared parts count each time."""
    count, tensors, left = 1, 0, [values]
    while left:
        node = left.pop()
        if isinstance(node, Tensor):
            tensors += node.nbytes if node.layout is torch.strided else size + FREE_BYTES
            continue
        parts = node.values() if isinstance(node, dict) else node if isinstance(node, list | tuple) else ()
        count += len(parts) + (len(node) >> 6 if isinstance(node, str | bytes) else 0)
        if count > MOST_VALUES:
            raise ValueError(f"it holds more than {MOST_VALUES} values")
        left += [part for part in parts if not isinstance(part, int | float | None)]
    if tensors > 2 * size + FREE_BYTES:
        raise ValueError("its tensors have more bytes than the file")


# ---- checkpoints of formats 1 and 2: one archive each, which is still read ----


def verify(path: Path) -> int:
    """Compare every record of an archive with its checksum; returns the bytes read.

    The archive is a zip file, for which `torch.save` computes a CRC-32 of every tensor. `torch.load` ignores them. Raises OSError,
    ValueError and zipfile's errors.
    """
    with opened(path) as file:
        size = path.stat().st_size
        check_records(file, size)
        if damaged := zipfile.ZipFile(file).testzip():
            raise ValueError(f"checksum of {damaged} differs")
    return size


def load_checkpoint(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """The state of a checkpoint of format 1 or 2; see `load`. Format 1 has the optimizer's state by position instead of by parameter name.

    Raises ValueError for an unknown format, and torch's errors.
    """
    state = load(path, mmap=mmap)
    if not isinstance(state, dict) or state.get("format") not in (1, 2):
        raise ValueError("it is not in this version's format")
    return state
