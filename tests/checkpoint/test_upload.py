"""Checkpoints and records of a run reach its store, and only what belongs to the run's copy leaves it."""

import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from threading import Event, Lock
from typing import Any
from unittest import mock

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from clipscale import checkpoint
from clipscale.checkpoint import copy_store, upload
from clipscale.checkpoint.upload import copy_checkpoint
from clipscale.cli.complete_run import result_if_complete
from clipscale.common import remote
from clipscale.config.sections import LaunchConfig
from clipscale.config.stages import StageConfig
from clipscale.config.train_config import TrainConfig
from clipscale.run_folder.paths import checkpoint_path, checkpoints_of
from clipscale.run_folder.set_aside import set_aside_for_resume
from clipscale.train import train
from tests.checkpoint.copies import copied, copying, save
from tests.conftest import Capture
from tests.support.checkpoints import steps, write_result
from tests.support.ranks import run_ranks
from tests.support.runs import curve


def ended_with_a_slow_store(rank: int, world_size: int, config: TrainConfig) -> float:
    """Train, with a store that takes a while for each file. Returns when this rank has ended."""

    def put(*given: Any, **options: Any) -> None:
        time.sleep(0.3)
        put_file(*given, **options)

    put_file = LocalFileSystem.put_file
    with mock.patch.object(LocalFileSystem, "put_file", put):
        train(config)
    return time.time()


def test_all_ranks_stay_until_the_last_copy_is_complete(shards: str, tmp_path: Path) -> None:
    """A launcher may end rank 0 some time after the others."""
    config = copied(shards, tmp_path / "run", tmp_path / "store", LaunchConfig())
    ends = run_ranks(ended_with_a_slow_store, 2, replace(config, samples=12))
    assert min(ends) > (tmp_path / "run/result.json").stat().st_mtime


def test_old_copies_and_parts_go_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, [1])
    store = tmp_path / "store"
    checkpoint_path(store, 3).mkdir()  # of a start that was killed while it copied
    for name in ("step_note.txt", "step_00000010.mine", "step_by_step/step_00000003"):
        (store / "checkpoints" / name).mkdir(parents=True)
    save(tmp_path, [4, 5, 6, 7], keep_newest=2, every=4)
    shutil.rmtree(checkpoint_path(tmp_path / "run", 7))
    save(tmp_path, [], keep_newest=1, every=4)
    assert steps(store) == [4, 6, 7], "what is later than the run stays"
    assert len([*store.rglob("step_*")]) == 7, "with four of somebody else's"


def test_results_that_the_run_has_set_aside_leave_the_store(tmp_path: Path) -> None:
    """A later start from the copy would take them for results of the steps that were trained again."""
    run = tmp_path / "run"
    store = tmp_path / "store"
    save(tmp_path, [1])
    for step in (1, 2, 3):
        write_result(run, step, 0.5)
    save(tmp_path, [2])
    shutil.rmtree(checkpoint_path(run, 2))
    shutil.rmtree(checkpoint_path(store, 2))
    set_aside_for_resume(run, 1, starts_from_other_folder=False)
    write_result(run, 3, 0.7)  # it has come to this step again
    write_result(store, 9, 0.1)  # the run knows nothing of it
    save(tmp_path, [])
    assert sorted(path.stem for path in (store / "eval").iterdir()) == [f"step_{step:08d}" for step in (1, 3, 9)]


def test_a_checkpoint_stays_on_the_disk_while_it_is_copied(tmp_path: Path) -> None:
    saver = save(tmp_path, [1], keep_newest=1)
    saver.uploader.uploading = checkpoints_of(tmp_path / "run")
    saver.save(checkpoint.CheckpointState(2), wait=True)
    assert steps(tmp_path / "run") == [1, 2]


def test_a_checkpoint_stays_on_the_disk_from_the_moment_when_it_is_listed_for_its_copy(tmp_path: Path) -> None:
    """A save that ends just then, in its own thread, does not delete it."""
    saver = save(tmp_path, [1], keep_newest=1)
    assert saver.uploader
    checkpoint_path(tmp_path / "run", 2).with_suffix(".tmp").mkdir()
    commit = threading.Thread(target=saver.commit, args=(2,))

    def list_then_commit(run: Path) -> list[Path]:
        listed = checkpoints_of(run)
        if commit.ident is None:
            commit.start()
            commit.join(1)  # it waits for the end of the choice, or it deletes the checkpoint
        return listed

    shutil.rmtree(tmp_path / "store/checkpoints")  # so that checkpoint 1 is copied once more
    with mock.patch.object(upload, "checkpoints_of", list_then_commit):
        saver.uploader._copy(copy_store.open_store(saver.uploader.address, announce=False))
    commit.join()
    assert steps(tmp_path / "run") == [1, 2] and steps(tmp_path / "store") == [1]


def test_the_stages_of_a_run_copy_one_after_the_other(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at once would remove each other's unfinished files."""
    busy = Lock()
    overlaps = []

    def slow(*given: Any) -> None:
        overlaps.append(busy.locked())
        with busy:
            time.sleep(0.5)
            copy_checkpoint(*given)

    monkeypatch.setattr("clipscale.checkpoint.upload.copy_checkpoint", slow)
    config = copied(shards, tmp_path / "run", tmp_path / "store", LaunchConfig())
    train(replace(config, samples=None, stages=[StageConfig(samples=24), StageConfig(samples=24, lr=1e-4)]))
    assert len(overlaps) > 1 and not any(overlaps)
    assert steps(tmp_path / "store")[-1] == steps(tmp_path / "run")[-1]


def test_a_store_that_was_full_takes_copies_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has room for two checkpoints; for a while somebody else's file takes it."""
    store = tmp_path / "store"
    foreign = tmp_path / "store/other/file"
    room = 0

    def put(self: LocalFileSystem, source: str, target: str, **options: object) -> None:
        Path(target).parent.mkdir(exist_ok=True)
        shutil.copyfile(source, target)
        if room and sum(path.stat().st_size for path in store.rglob("*") if path.is_file()) > room:
            raise OSError(28, "No space left on device")

    def copied(step: int) -> None:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)  # which would be copied again first
        saver = copying(tmp_path / "run", store, keep_newest=1)
        saver.save(checkpoint.CheckpointState(step, model={"w": torch.ones(1000)}), wait=True)
        saver.uploader.finish(60)

    copied(1)
    size = sum(path.stat().st_size for path in checkpoint_path(store, 1).iterdir())
    foreign.parent.mkdir()
    foreign.write_bytes(b"x" * size)
    monkeypatch.setattr(LocalFileSystem, "put_file", put)
    room = 2 * size + 100
    copied(2)
    assert not (checkpoint_path(store, 2) / "meta.json").exists()
    shutil.rmtree(foreign.parent)
    copied(3)
    assert steps(store) == [3]


def test_a_cut_meta_json_makes_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is full when it has all other files."""
    put_file = LocalFileSystem.put_file

    def put(self: LocalFileSystem, source: str, target: str, **options: object) -> None:
        put_file(self, source, target, **options)
        if source.endswith("meta.json"):
            os.truncate(target, 10)
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalFileSystem, "put_file", put)
    saver = copying(tmp_path / "run", tmp_path / "store")
    saver.save(checkpoint.CheckpointState(1), wait=True)
    saver.uploader.finish(60)
    assert not [*tmp_path.glob("store/checkpoints/*/meta.json")]


@pytest.mark.parametrize("hangs", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_store_that_fails_costs_one_line_and_one_at_the_end(
    shards: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    ended = Event()

    def put(*_: object, **__: object) -> None:
        if hangs:
            ended.wait()
        raise OSError(28, "No space left on device")

    before = {*threading.enumerate()}
    monkeypatch.setattr(LocalFileSystem, "put_file", put)
    config = copied(shards, tmp_path / "run", tmp_path / "store", LaunchConfig(timeout_s=2 if hangs else 60))
    train(config)
    ended.set()
    for thread in {*threading.enumerate()} - before:
        thread.join(10)
    ended.clear()
    assert len(curve(tmp_path / "run")) == 4
    lines = [line for line in capsys.readouterr().out.splitlines() if "checkpoint.copy" in line]
    assert len(lines) == 2 - hangs, "and one that waits"
    assert ("not complete" if hangs else "No space left") in lines[-1]
    assert result_if_complete(config) is None, "the same command copies again"
    monkeypatch.setattr(LocalFileSystem, "find", put)
    monkeypatch.setattr(copy_store, "ANSWER_S", 0.5)
    monkeypatch.setattr(remote, "LOOK_S", 0.1)
    train(replace(config, samples=72))
    output = capsys.readouterr().out
    assert len(curve(tmp_path / "run")) == 6 and "cannot be read" in output
    assert ("(no answer within 0 s)" if hangs else "No space left") in output
    ended.set()
