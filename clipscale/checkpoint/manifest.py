"""What a checkpoint's folder holds: a manifest, plain values, and tensors in one safetensors file for each rank that wrote.

    step_00001000/manifest.json             this description, with its own checksum
    step_00001000/state.pt                  settings, random states, the place in the data: everything that is no tensor of the model
    step_00001000/rank_00000.safetensors    whole tensors, or shards of tensors

The manifest has a CRC-32 of every block of 16 MiB of each file, so ranks can share the verification, and the place of every piece of every
tensor, so a rank reads only the bytes that it needs. Nothing in it is pickled but state.pt, which torch reads without executing code.
"""

import json
import re
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from pydantic import TypeAdapter

from clipscale.checkpoint.saved_state import check_entries
from clipscale.common.files import read_json, write_text

NAME, PLAIN = "manifest.json", "state.pt"
FORMAT = 3
BLOCK = 2**24
"""Bytes of a checksum: a long read for a disk, and little memory in every thread."""
LARGEST = 96 * 2**20
"""Bytes of the largest manifest. One of 512 ranks and 2,400 tensors has about 60 MB."""
MOST_PARTS = 2**23
"""Lists and objects in it; that one has 4 million."""
FILES = re.compile(r"state\.pt|rank_\d{5,}\.safetensors")
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""By safetensors' names."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass
class File:
    """A file's size and the CRC-32 of each of its blocks."""

    bytes: int = 0
    crc32: list[int] = field(default_factory=list)


@dataclass
class Piece:
    """A box of a tensor, and where its bytes begin."""

    file: str
    at: int
    offsets: list[int]
    sizes: list[int]


@dataclass
class Stored:
    """A tensor of a checkpoint."""

    dtype: str
    shape: list[int]
    pieces: list[Piece]


@dataclass
class Manifest:
    """The description of a checkpoint."""

    step: int
    files: dict[str, File]
    tensors: dict[str, Stored]
    about: dict[str, Any] = field(default_factory=dict)
    """For readers: version, time, samples, processes."""
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Write it and put it on the disk. Raises OSError."""
        text = _text(asdict(self))
        write_text(folder / NAME, f'{{"crc32": {zlib.crc32(text.encode())}, "manifest": {text}}}\n')

    @staticmethod
    def read(folder: Path) -> "Manifest":
        """A checkpoint's manifest. Raises OSError, and ValueError for one that is damaged or of another format."""
        found = read_json(folder / NAME, LARGEST, MOST_PARTS)
        if not isinstance(found, dict) or not isinstance(found.get("manifest"), dict):
            raise ValueError(f"{NAME} is no manifest")
        tree = found["manifest"]
        if zlib.crc32(_text(tree).encode()) != found.get("crc32"):
            raise ValueError(f"checksum of {NAME} differs")
        if tree.get("format") != FORMAT:
            raise ValueError(f"format {tree.get('format')}, this version reads {FORMAT}")
        manifest = check_entries(tree, TypeAdapter(Manifest))
        manifest.check()
        return manifest

    def check(self) -> None:
        """Raise ValueError for names and places that no writer of ours makes: a received checkpoint may name any file."""
        for name in self.files:
            if not FILES.fullmatch(name):
                raise ValueError(f"{NAME} names the file {name!r}")
        left = sum(file.bytes for file in self.files.values())
        for name, one in self.tensors.items():
            if one.dtype not in DTYPES:
                raise ValueError(f"{name} has the unknown type {one.dtype}")
            width = DTYPES[one.dtype].itemsize
            if sum(torch.Size(piece.sizes).numel() for piece in one.pieces) < torch.Size(one.shape).numel():
                raise ValueError(f"the pieces of {name} do not fill it")  # its memory is taken before they are read
            left -= width * torch.Size(one.shape).numel()
            if left < 0:
                raise ValueError("the tensors have more bytes than the files")
            for piece in one.pieces:
                held = self.files.get(piece.file)
                end = piece.at + width * torch.Size(piece.sizes).numel()
                inside = all(
                    offset >= 0 and size >= 0 and offset + size <= whole
                    for offset, size, whole in zip(piece.offsets, piece.sizes, one.shape, strict=True)
                )
                if held is None or piece.at < 0 or end > held.bytes or not inside:
                    raise ValueError(f"a piece of {name} lies outside of {piece.file} or of the tensor")


def _text(tree: dict[str, Any]) -> str:
    return json.dumps(tree, separators=(",", ":"), sort_keys=True)


class SummedFile:
    """Writes to a file and keeps its size and checksums."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.record, self._last = file, File(), 0

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes. Raises OSError."""
        rest = memoryview(data)
        while len(rest):
            left = BLOCK - self.record.bytes % BLOCK
            part, rest = rest[:left], rest[left:]
            if left == BLOCK:
                self.record.crc32.append(0)
            self._file.write(part)
            self.record.crc32[-1] = zlib.crc32(part, self.record.crc32[-1])
            self.record.bytes += len(part)
        return len(data)

    def flush(self) -> None:
        """For torch.save."""
        self._file.flush()
