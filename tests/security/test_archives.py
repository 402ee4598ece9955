"""Checkpoints and weights that claim, unpack to or stand for more than their files hold: one clear line, and little memory."""

import io
import json
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from clipscale import checkpoint
from clipscale.checkpoint import archive
from clipscale.common.errors import UserError
from clipscale.models import weights
from tests.security.limits import bounded


def deflated(data: bytes) -> bytes:
    """torch's archive with packed records."""
    out = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as old,
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed,
    ):
        for record in old.infolist():
            packed.writestr(record.filename, old.read(record))
    return out.getvalue()


def saved(values: Any) -> bytes:
    out = io.BytesIO()
    torch.save(values, out)
    return out.getvalue()


def calling(code: bytes) -> bytes:
    """An archive with this pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved({}))) as old, zipfile.ZipFile(out, "w") as made:
        for record in old.infolist():
            made.writestr(record.filename, code if record.filename.endswith("data.pkl") else old.read(record))
    return out.getvalue()


def shared(levels: int) -> list[Any]:
    """A list of lists in lists, each twice in the next: a few bytes for 2**levels values."""
    values: list[Any] = [0]
    for _ in range(levels):
        values = [values, values]
    return values


BOMBS: dict[str, Callable[[], bytes]] = {
    "deflated": lambda: deflated(saved({"w": torch.zeros(1 << 26, dtype=torch.uint8)})),
    "bytearray": lambda: calling(b"\x80\x02c__builtin__\nbytearray\n\x8a\x05\0\0\0\0\x01\x85R."),
    "encoded": lambda: calling(b"\x80\x02c_codecs\nencode\nX\1\0\0\0aX\3\0\0\0hex\x86R."),
    "tensor": lambda: calling(b"\x80\x02ctorch\nFloatTensor\n\x8a\x05\0\0\0\0\x01\x85R."),
    "lists": lambda: saved({"x": shared(40)}),
    "expanded": lambda: saved({"w": torch.zeros(1).expand(1 << 40)}),
    "older than archives": lambda: b"\x80\x02c__builtin__\nbytearray\n\x8a\x05\0\0\0\0\x01\x85R." * 5 + saved({}),
    "views": lambda: saved({str(n): one for n, one in enumerate([torch.zeros(1 << 18)] * 100)}),
}


@pytest.mark.parametrize("name", BOMBS)
def test_an_archive_takes_no_more_than_its_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(BOMBS[name]())
    with bounded(grown=48 << 20), pytest.raises((ValueError, RuntimeError)):
        archive.load(path)
    with bounded(grown=48 << 20), pytest.raises(UserError, match="damaged or not a checkpoint") as caught:
        checkpoint.load(path)
    with bounded(grown=48 << 20), pytest.raises(UserError, match="is damaged or not a checkpoint"):
        weights.read(weights.find(str(path), "ViT-B-32"))
    assert str(caught.value).isprintable()


@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(
    sizes=st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.bool]),
)
def test_ordinary_archives_are_read(tmp_path: Path, sizes: list[list[int]], dtype: torch.dtype) -> None:
    tensors = {str(n): torch.ones(size).to(dtype) for n, size in enumerate(sizes)}
    values = {
        "w": tensors,
        "p": nn.Parameter(torch.ones(3)),
        "n": [1, 2.5, None, True, "x", (3,)],
        "s": torch.Size([2]),
    }
    (tmp_path / "x.pt").write_bytes(saved(values))
    found = archive.load(tmp_path / "x.pt", mmap=True)
    assert found["n"] == values["n"] and found["s"] == values["s"]
    assert all(torch.equal(found["w"][key], value) for key, value in tensors.items())


def folder(tmp_path: Path, change: Callable[[Path, dict[str, Any]], None]) -> Path:
    """A checkpoint with right checksums that `change` has made another of."""
    state = {"step": 1, "model": {"w": torch.ones(8)}, "note": "x"}
    path = checkpoint.save(tmp_path, 1, state, keep=0)
    tree = json.loads((path / "manifest.json").read_text())["manifest"]
    change(path, tree)
    for name in tree["files"]:
        data = (path / name).read_bytes()
        tree["files"][name] = {"bytes": len(data), "crc32": [zlib.crc32(data)]}
    text = json.dumps(tree, separators=(",", ":"), sort_keys=True)
    (path / "manifest.json").write_text(f'{{"crc32": {zlib.crc32(text.encode())}, "manifest": {text}}}\n')
    return path


def test_plain_values_of_a_checkpoint_are_not_unpacked(tmp_path: Path) -> None:
    whole = deflated(saved({"step": 1, "x": torch.zeros(1 << 26, dtype=torch.uint8)}))
    path = folder(tmp_path, lambda path, tree: (path / "state.pt").write_bytes(whole) and None)
    with bounded(grown=48 << 20), pytest.raises(UserError, match="is compressed"):
        checkpoint.load(path)


def test_pieces_that_share_bytes_are_refused(tmp_path: Path) -> None:
    """A megabyte of the file would fill a tensor of any size."""

    def change(path: Path, tree: dict[str, Any]) -> None:
        (piece,) = tree["tensors"]["model/w"]["pieces"]
        count = 1 << 12
        tree["tensors"]["model/w"] = {
            "dtype": "F32",
            "shape": [8 * count],
            "pieces": [piece | {"offsets": [8 * n]} for n in range(count)],
        }

    with bounded(grown=48 << 20), pytest.raises(UserError, match="more bytes than the files"):
        checkpoint.load(folder(tmp_path, change))


@pytest.mark.parametrize(
    "content",
    ["[" * 100_000, "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../../x"}}'],
)
def test_an_index_of_weights_names_files_beside_it(tmp_path: Path, content: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(content)
    with bounded(grown=48 << 20), pytest.raises(UserError, match="is damaged or not a checkpoint"):
        weights.read(weights.find(str(tmp_path), "ViT-B-32"))
