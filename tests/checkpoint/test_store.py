"""Checkpoints are copied to storage while training goes on, and a run on another machine goes on from the copy."""

import json
import logging
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from clipscale import checkpoint
from clipscale.checkpoint.store import Store
from clipscale.common.errors import UserError
from clipscale.config.sections import CheckpointConfig, PrecisionConfig
from clipscale.distributed.world import World
from clipscale.train import train
from tests.data.shards.test_cache import s3  # noqa: F401
from tests.support.runs import records, small

ALONE = World(0, 1, torch.device("cpu"))


@pytest.fixture
def memory() -> Iterator[str]:
    """An empty store in this process."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield "memory://runs"
    MemoryFileSystem.store.clear()


def saver(run: Path, address: str, **options: Any) -> checkpoint.Saver:
    return checkpoint.Saver(run, ALONE, CheckpointConfig(**options), Store(address, run))


def state(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((5,), value)}, "loss": value}


def test_copies_follow_the_same_rules_as_checkpoints(tmp_path: Path, memory: str) -> None:
    for step in range(1, 8):
        one = saver(tmp_path / "a", memory, keep=2, keep_every=3)
        one.save(step, state(step))
        one.close()
    assert (
        Store(memory, tmp_path / "a").steps()
        == [3, 5, 6, 7]
        == [checkpoint.step_of(path) for path in checkpoint.found(tmp_path / "a")]
    )
    assert Store(memory, tmp_path / "b").steps() == [], "another run has another folder"


def test_another_machine_fetches_the_newest_whole_copy(
    tmp_path: Path, memory: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = saver(tmp_path / "run", memory, keep=0)
    for step in (1, 2, 3):
        one.save(step, state(step))
        one.wait()
        one.store._work.result()  # type: ignore[union-attr]
    one.close()
    files = fsspec.filesystem("memory")
    files.pipe("/runs/run/step_00000003/rank_00000.safetensors", b"damaged")
    files.rm("/runs/run/step_00000002/manifest.json")
    files.pipe("/runs/run/step_00000009/rank_00000.safetensors", b"half sent")
    shutil.rmtree(tmp_path / "run")
    Store(memory, tmp_path / "run").fetch()
    (path,) = checkpoint.found(tmp_path / "run")
    assert checkpoint.load(path)["loss"] == 1
    assert any("step_00000003 is damaged there" in line for line in caplog.messages)
    one = saver(tmp_path / "run", memory)
    one.save(5, state(5))
    one.close()
    checkpoint.folder.remove(checkpoint.path_of(tmp_path / "run", 1))
    before = sorted(path.name for path in tmp_path.rglob("*"))
    Store(memory, tmp_path / "run").fetch()
    assert sorted(path.name for path in tmp_path.rglob("*")) == before, "the folder has the newest one"


def test_a_slow_store_gets_the_newest_and_a_failing_one_is_reported(
    tmp_path: Path, memory: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go, put = threading.Event(), MemoryFileSystem.put_file

    def slow(*args: Any, **options: Any) -> Any:
        go.wait(60)
        return put(*args, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", slow)
    one = saver(tmp_path / "run", memory, keep=1)
    for step in (1, 2, 3):
        one.save(step, state(step))
        one.wait()
    assert [path.name for path in checkpoint.found(tmp_path / "run")] == ["step_00000001", "step_00000003"], (
        "1 is being sent"
    )
    go.set()
    one.close()
    assert Store(memory, tmp_path / "run").steps() == [3]

    def fails(*_: Any, **__: Any) -> None:
        raise OSError("503 slow down")

    monkeypatch.setattr(MemoryFileSystem, "put_file", fails)
    one = saver(tmp_path / "run", memory)
    with caplog.at_level(logging.WARNING):
        one.save(4, state(4))
        one.close()
    assert any("step_00000004 was not sent (503 slow down)" in line for line in caplog.messages)
    assert checkpoint.load(checkpoint.path_of(tmp_path / "run", 4))["loss"] == 4


def test_an_address_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"checkpoint\.store=nosuch://a: it cannot be used"):
        Store("nosuch://a", tmp_path)


def test_a_run_goes_on_from_its_copy(shards: str, tmp_path: Path, memory: str) -> None:
    kept: dict[str, Any] = {"precision": PrecisionConfig(), "checkpoint": CheckpointConfig(store=memory)}
    train(small(shards, tmp_path / "a/run", samples=24, **kept))
    train(small(shards, tmp_path / "b/run", **kept))
    assert [record["step"] for record in records(tmp_path / "b/run")] == [3, 4]
    train(small(shards, tmp_path / "whole", precision=PrecisionConfig()))
    assert [r["loss"] for r in records(tmp_path / "b/run")] == [r["loss"] for r in records(tmp_path / "whole")][2:]
    about = json.loads((checkpoint.path_of(tmp_path / "b/run", 4) / "manifest.json").read_text())["manifest"]["about"]
    assert about["samples"] == 48


@pytest.mark.slow
def test_s3(tmp_path: Path, s3: str) -> None:  # noqa: F811
    one = saver(tmp_path / "run", "s3://bucket/runs", keep=1)
    for step in (1, 2):
        one.save(step, state(step))
        one.wait()
    one.close()
    shutil.rmtree(tmp_path / "run")
    store = Store("s3://bucket/runs", tmp_path / "run")
    assert store.steps() == [2]
    store.fetch()
    assert checkpoint.load(checkpoint.found(tmp_path / "run")[-1])["loss"] == 2
    with pytest.raises(UserError, match=r"checkpoint\.store=s3://nowhere/runs: it cannot be used"):
        Store("s3://nowhere/runs", tmp_path / "run")
