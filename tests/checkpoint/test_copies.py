"""Copies of a run outlive its folder: a start takes the newest whole one, of its own run alone."""

import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Event, Lock
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem

from clipscale import checkpoint
from clipscale.checkpoint import copy_store, upload
from clipscale.checkpoint.copy_store import TimeLimited
from clipscale.checkpoint.restore import restore_from_copy
from clipscale.checkpoint.upload import copy_checkpoint
from clipscale.cli.complete_run import result_if_complete
from clipscale.common import remote
from clipscale.config.sections import CheckpointConfig, LaunchConfig, ScheduleConfig
from clipscale.config.stages import StageConfig
from clipscale.config.train_config import TrainConfig
from clipscale.distributed.world import World
from clipscale.run_folder.disk import discard, remove_temporary
from clipscale.run_folder.paths import checkpoint_path, checkpoints_of
from clipscale.run_folder.set_aside import set_aside_for_resume
from clipscale.train import train
from tests.conftest import Capture
from tests.support.checkpoints import ONE_RANK, steps, write_result
from tests.support.ranks import run_ranks
from tests.support.runs import curve, four_step_config, train_on_rank
from tests.support.user_errors import refused

Request = pytest.FixtureRequest


def copied(shards: str, run: Path, address: object, launch: LaunchConfig) -> TrainConfig:
    """Four steps at a constant rate, of which two are a run of half the samples."""
    config = CheckpointConfig(every="1", copy=str(address))
    return four_step_config(
        shards, run, checkpoint=config, schedule=ScheduleConfig(name="constant", warmup="0"), launch=launch
    )


def in_ranks(config: TrainConfig) -> None:
    run_ranks(train_on_rank, 2, config)


@pytest.mark.parametrize(
    ("address", "start", "parallel"),
    [
        pytest.param("s3://bucket/runs/mine", train, "ddp", marks=pytest.mark.slow),  # it imports a server
        ("", train, "ddp"),
        # Two ranks copy as one does: rank 0 has the copies. Shards are other files, copied the same way.
        *(pytest.param("", in_ranks, parallel, marks=pytest.mark.slow) for parallel in ("ddp", "zero3")),
    ],
)
def test_a_run_whose_folder_or_newest_checkpoint_is_lost_goes_on_from_its_copy_bit_for_bit(
    request: Request, shards: str, tmp_path: Path, address: str, start: Callable[[TrainConfig], Any], parallel: str
) -> None:
    if address:
        request.getfixturevalue("s3")
    run = tmp_path / "run"
    config = copied(shards, run, address or tmp_path / "store", LaunchConfig(parallel=parallel))
    start(replace(config, samples=24))
    shutil.rmtree(run if address else checkpoint_path(run, 2))
    start(config)
    assert (run / "result.json").is_file()
    start(replace(config, run=str(tmp_path / "whole"), checkpoint=CheckpointConfig()))
    assert curve(run) == curve(tmp_path / "whole")


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


def fetched_slowly(rank: int, world_size: int, root: Path) -> Path | None:
    """Resume from a store that delivers for longer than the ranks wait for each other."""
    limit = timedelta(seconds=3)
    dist.destroy_process_group()
    dist.init_process_group("gloo", f"file://{root}/group", limit, world_size, rank)

    def get(*given: Any, **options: Any) -> None:
        time.sleep(5)
        get_files(*given, **options)

    get_files = LocalFileSystem.get
    with mock.patch.object(LocalFileSystem, "get", get):
        world = World(rank, world_size, torch.device("cpu"), limit)
        return checkpoint.prepare_checkpoint(root / "run", "auto", world, str(root / "store"))


@pytest.mark.slow
def test_a_copy_may_take_longer_than_the_ranks_wait_for_each_other(tmp_path: Path) -> None:
    save(tmp_path, [1])
    shutil.rmtree(tmp_path / "run")
    assert run_ranks(fetched_slowly, 2, tmp_path) == [checkpoint_path(tmp_path / "run", 1)] * 2


def copying(run: Path, store: Path, **retention: int) -> checkpoint.Saver:
    """A saver whose checkpoints are copied into the `store`."""
    kept = checkpoint.Retention(**retention)
    uploader = checkpoint.CheckpointUploader(run, f"file://{store}", kept)
    uploader.start()
    return checkpoint.Saver(run, ONE_RANK, kept, uploader)


def save(root: Path, steps: list[int], **changes: Any) -> checkpoint.Saver:
    """Write these checkpoints of `root/run`, each when the one before is in `root/store`."""
    saver = copying(root / "run", root / "store", **changes)
    for step in steps:
        saver.save(checkpoint.CheckpointState(step), wait=True)
        while not (checkpoint_path(root / "store", step) / "meta.json").exists():
            time.sleep(0.01)
    saver.uploader.finish(60)
    return saver


@pytest.mark.parametrize("lost", ["checkpoints/step_00000002", "checkpoints", "checkpoints/*/meta.json"])
def test_a_start_takes_the_newest_whole_checkpoint_of_both_places(tmp_path: Path, lost: str) -> None:
    root = tmp_path / "a [1]*?#%20 [b"
    run = root / "run"
    store = root / "store"
    save(root, [1, 2])
    for folder in run, store:
        (folder / "metrics.jsonl").write_text(folder.name)
    for path in run.glob(lost):
        discard(path)
    assert checkpoint.prepare_checkpoint(run, "auto", ONE_RANK, str(store)) == checkpoint_path(run, 2)
    assert (run / "metrics.jsonl").read_text() == "store"
    assert (run / "earlier/metrics.jsonl").read_text() == "run"


def test_a_run_whose_newest_checkpoint_is_no_older_than_the_copys_goes_on_from_its_own(tmp_path: Path) -> None:
    """The run keeps its own records, too."""
    run = tmp_path / "run"
    store = tmp_path / "store"
    save(tmp_path, [1, 2])
    for folder in run, store:
        (folder / "metrics.jsonl").write_text(folder.name)
    assert checkpoint.prepare_checkpoint(run, "auto", ONE_RANK, str(store)) == checkpoint_path(run, 2)
    assert (run / "metrics.jsonl").read_text() == "run" and not (run / "earlier").exists()


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


def test_of_a_half_and_of_a_damaged_copy_the_one_before_is_taken(tmp_path: Path, capsys: Capture) -> None:
    save(tmp_path, [1, 2, 3], keep_newest=0)
    run = tmp_path / "run"
    store = tmp_path / "store"
    shutil.rmtree(run)
    (checkpoint_path(store, 3) / "meta.json").unlink()
    (checkpoint_path(store, 2) / ".metadata").write_bytes(b"")
    restore_from_copy(run, str(store), "auto")
    assert steps(run) == [1] and not [*run.rglob("*.tmp")]
    assert "step_00000002.tmp is damaged" in capsys.readouterr().out
    shutil.rmtree(run)
    (checkpoint_path(store, 1) / ".metadata").unlink()
    with refused("holds no intact checkpoint .*; give another address"):
        restore_from_copy(run, str(store), "auto")


@pytest.mark.parametrize("is_damaged", [False, True])
def test_the_best_checkpoint_comes_back_with_the_newest(tmp_path: Path, capsys: Capture, *, is_damaged: bool) -> None:
    save(tmp_path, [2, 3, 4], keep_newest=0)
    run = tmp_path / "run"
    store = tmp_path / "store"
    for step, score in ((2, 0.9), (3, 0.1), (4, 0.5)):
        write_result(store, step, score)
    (store / "config.yaml").write_text("checkpoint: {best: birds/top1}")
    if is_damaged:
        (checkpoint_path(store, 2) / ".metadata").write_bytes(b"")
    shutil.rmtree(run)
    assert restore_from_copy(run, str(store), "auto")
    assert steps(run) == ([4] if is_damaged else [2, 4]) and not [*run.rglob("*.tmp")]
    assert (
        "best checkpoint, step_00000002, could not be fetched and remains only there" in capsys.readouterr().out
    ) == is_damaged


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError], ids=["killed", "unreadable"])
def test_a_later_start_takes_the_best_checkpoint_that_did_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    save(tmp_path, [2, 4], keep_newest=0)
    run = tmp_path / "run"
    store = tmp_path / "store"
    for step, score in ((2, 0.9), (4, 0.5)):
        write_result(store, step, score)
    (store / "config.yaml").write_text("checkpoint: {best: birds/top1}")
    shutil.rmtree(run)

    def fails(paths: list[str], *given: Any) -> None:
        if "step_00000002" in paths[0]:
            raise error
        get(*given)

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        get = TimeLimited.get
        patch.setattr(TimeLimited, "get", lambda *given: fails(given[1], *given))
        checkpoint.prepare_checkpoint(run, "auto", ONE_RANK, str(store))
    assert steps(run) == [4]
    for _ in range(2):
        assert checkpoint.prepare_checkpoint(run, "auto", ONE_RANK, str(store)) == checkpoint_path(run, 4)
        assert steps(run) == [2, 4]


def test_a_damaged_config_yaml_of_the_store_costs_the_best_checkpoint_alone(tmp_path: Path, capsys: Capture) -> None:
    save(tmp_path, [1])
    run = tmp_path / "run"
    store = tmp_path / "store"
    (store / "config.yaml").write_text("{")
    shutil.rmtree(run)
    assert checkpoint.prepare_checkpoint(run, "auto", ONE_RANK, str(store)) == checkpoint_path(run, 1)
    assert "the best checkpoint could not be fetched and remains only there" in capsys.readouterr().out


def test_records_of_a_run_that_only_the_store_has_come_back(tmp_path: Path) -> None:
    save(tmp_path, [1])
    (tmp_path / "store/metrics.jsonl").write_text("a line")
    checkpoint.prepare_checkpoint(tmp_path / "run", "auto", ONE_RANK, str(tmp_path / "store"))
    assert (tmp_path / "run/metrics.jsonl").read_text() == "a line"


@pytest.mark.parametrize(
    ("run", "address", "resume", "line"),
    [
        ("other", "{}/store", "auto", "it holds run=run, and not run=other; choose another address"),
        ("run", "{}", "auto", "it holds store, and not run=run"),
        ("run", "{}/store", "none", "resume=auto"),
        ("run", "s4://bucket", "check", "s4://bucket: there is no s4; give a folder"),
        pytest.param("run", "s3://bucket/a[1]", "check", "in a bucket without", marks=pytest.mark.slow),
        pytest.param("run", "s3://no-bucket/runs", "check", "bucket does not exist", marks=pytest.mark.slow),
    ],
)
def test_what_is_not_the_copy_of_this_run_is_refused(
    request: Request, tmp_path: Path, run: str, address: str, resume: str, line: str
) -> None:
    if address.startswith("s3:"):
        request.getfixturevalue("s3")
    save(tmp_path, [1])
    shutil.rmtree(tmp_path / "run")
    with refused(line):
        if resume == "check":
            checkpoint.check_copy(tmp_path / run, address.format(tmp_path))
        else:
            restore_from_copy(tmp_path / run, address.format(tmp_path), resume)


@pytest.mark.parametrize("resume", ["check", "auto"])
def test_a_store_that_cannot_be_read_is_refused_with_the_setting_that_goes_on_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: str
) -> None:
    def fail(*given: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr("clipscale.checkpoint.restore.accessible_checkpoints", fail)
    with refused("cannot be read.*the disk is gone.*checkpoint.copy= continues without it"):
        if resume == "check":
            checkpoint.check_copy(tmp_path / "run", str(tmp_path / "store"))
        else:
            restore_from_copy(tmp_path / "run", str(tmp_path / "store"), resume)


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


def test_a_record_that_was_being_copied_is_cleaned_up_in_both_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    run = tmp_path / "run"
    store = tmp_path / "store"
    save(tmp_path, [1])
    (store / "metrics.jsonl").write_text("a line")
    before = {*tmp_path.rglob("*")}
    with monkeypatch.context() as patched:
        patched.setattr(LocalFileSystem, "mv", killed)
        with pytest.raises(KeyboardInterrupt):
            restore_from_copy(run, str(store), "auto", checkpoint_path(run, 1))
    left = {*tmp_path.rglob("*")} - before
    assert len(left) == 1
    for path in left:
        path.rename(store / path.name)
        path.write_bytes(b"")
    remove_temporary(run)
    (store / "metrics.jsonl").unlink()
    save(tmp_path, [2])
    assert not [*tmp_path.rglob("*.tmp")]


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


class Slow:
    """A store that sends a byte every tenth of a second, so many in all, and no more."""

    def __init__(self, size: int) -> None:
        self.size = size

    def get(self, sources: list[str], targets: list[str]) -> None:
        for _ in range(self.size):
            with Path(targets[0]).open("ab") as file:
                file.write(b"x")
            time.sleep(0.1)
        time.sleep(1000 * (self.size < 6))

    def ls(self, path: str) -> None:
        time.sleep(1000)


def test_a_store_may_be_slow_and_not_silent(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line says what is waited for."""
    monkeypatch.setattr(copy_store, "ANSWER_S", 1.0)
    monkeypatch.setattr(remote, "LOOK_S", 0.1)
    monkeypatch.setattr(remote, "ANNOUNCE_S", 0.3)
    TimeLimited(Slow(15), "it", announce=False).get(["x"], [str(tmp_path / "x")])
    assert (tmp_path / "x").stat().st_size == 15
    assert "waiting" not in capsys.readouterr().err
    silent = TimeLimited(Slow(2), "checkpoint.copy=s3://b", announce=True)
    for call in (lambda: silent.get(["x"], [str(tmp_path / "y")]), lambda: silent.ls("x")):
        with pytest.raises(TimeoutError, match="no answer"):
            call()
        assert capsys.readouterr().err.count("waiting for checkpoint.copy=s3://b") == 1
