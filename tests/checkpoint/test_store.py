"""Checkpoints are copied to storage, and a run on another machine goes on from the copy."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from clipscale import checkpoint
from clipscale.common.errors import UserError
from clipscale.config.sections import CheckpointConfig, PrecisionConfig
from clipscale.distributed.world import World
from clipscale.train import train
from tests.support.runs import records, small

ALONE = World(0, 1, torch.device("cpu"))
ADDRESS = "memory://runs"


@pytest.fixture(autouse=True)
def empty_memory() -> Iterator[None]:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield
    MemoryFileSystem.store.clear()


def save(run: Path, *steps: int, **options: Any) -> None:
    saver = checkpoint.Saver(run, ALONE, CheckpointConfig(**options), checkpoint.Store(ADDRESS, run))
    for step in steps:
        saver.save(step, {"model": {"w": torch.full((5,), float(step))}, "loss": float(step)})
    saver.close()


def test_copies_follow_the_same_rules_as_checkpoints(tmp_path: Path) -> None:
    save(tmp_path / "a", *range(1, 8), keep=2, keep_every=3)
    assert checkpoint.Store(ADDRESS, tmp_path / "a").steps() == [3, 5, 6, 7]
    assert [checkpoint.step_of(path) for path in checkpoint.found(tmp_path / "a")] == [3, 5, 6, 7]
    assert checkpoint.Store(ADDRESS, tmp_path / "b").steps() == [], "another run has another folder"


def test_another_machine_fetches_the_newest_whole_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, files = tmp_path / "run", fsspec.filesystem("memory")
    save(run, 1, 2, 3, keep=0)
    files.pipe("/runs/run/step_00000003/__0_0.distcp", b"damaged")
    files.rm("/runs/run/step_00000002/meta.json")
    shutil.rmtree(run)
    checkpoint.Store(ADDRESS, run).fetch()
    (path,) = checkpoint.found(run)
    assert checkpoint.load(path)["loss"] == 1
    assert any("step_00000003 is damaged there" in line for line in caplog.messages)
    shutil.rmtree(path)
    checkpoint.save(run, 5, {"loss": 5.0}, keep=0)
    checkpoint.Store(ADDRESS, run).fetch()
    assert checkpoint.newest_step(run) == 5, "the folder has the newest one"


def test_a_store_that_fails_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError("503 slow down")

    monkeypatch.setattr(MemoryFileSystem, "put_file", fails)
    with caplog.at_level(logging.WARNING):
        save(tmp_path / "run", 4)
    assert any("step_00000004 was not sent (503 slow down)" in line for line in caplog.messages)
    assert checkpoint.newest_step(tmp_path / "run") == 4
    with pytest.raises(UserError, match=r"checkpoint\.store=nosuch://a: it cannot be used"):
        checkpoint.Store("nosuch://a", tmp_path)


def test_a_run_goes_on_from_its_copy(shards: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"precision": PrecisionConfig(), "checkpoint": CheckpointConfig(store=ADDRESS)}
    train(small(shards, tmp_path / "a/run", samples=24, **changes))
    train(small(shards, tmp_path / "b/run", **changes))
    assert [record["step"] for record in records(tmp_path / "b/run")] == [3, 4]
    train(small(shards, tmp_path / "whole", precision=PrecisionConfig()))
    assert [r["loss"] for r in records(tmp_path / "b/run")] == [r["loss"] for r in records(tmp_path / "whole")][2:]
