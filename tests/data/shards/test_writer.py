"""Shards have the bytes that webdataset writes, and appear when they are complete."""

from pathlib import Path

import pytest
from webdataset import TarWriter

from clipscale.data.shards.writer import shard_writer

SAMPLES = [
    {"__key__": "a/000", "jpg": b"\xff\xd8" * 700, "txt": b"", "_meta.json": b"{}"},
    {"__key__": "größe " + "x" * 150, "txt": b"long", "png": bytes(512)},
]


def test_the_bytes_are_webdatasets_without_time_and_owner(tmp_path: Path) -> None:
    options = {"user": "", "group": "", "mode": 0o644, "mtime": 0, "encoder": False, "keep_meta": True}
    with TarWriter(str(tmp_path / "theirs.tar"), **options) as theirs, shard_writer(tmp_path / "ours.tar") as ours:
        for sample in SAMPLES:
            theirs.write(sample)
            ours.write(sample)
    assert (tmp_path / "ours.tar").read_bytes() == (tmp_path / "theirs.tar").read_bytes()


def test_nothing_is_left_of_a_shard_that_was_not_completed(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), shard_writer(tmp_path / "ours.tar") as ours:
        ours.write(SAMPLES[0])
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
