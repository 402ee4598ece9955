"""A copy outlives the folder of its run: a start takes the newest whole checkpoint of both, of its own run alone."""

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem

from clipscale import checkpoint
from clipscale.checkpoint.copy_store import TimeLimited
from clipscale.checkpoint.download import download_newer
from clipscale.config.sections import CheckpointConfig, LaunchConfig
from clipscale.config.train_config import TrainConfig
from clipscale.distributed.world import World
from clipscale.run_folder.disk import discard, remove_temporary
from clipscale.run_folder.paths import checkpoint_path
from clipscale.train import train
from tests.checkpoint.copies import copied, save
from tests.conftest import Capture
from tests.support.checkpoints import ONE_RANK, steps, write_result
from tests.support.ranks import run_ranks
from tests.support.runs import curve, train_on_rank
from tests.support.user_errors import refused

Request = pytest.FixtureRequest


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
        return checkpoint.newest_undamaged(root / "run", "auto", world, str(root / "store"))


@pytest.mark.slow
def test_a_copy_may_take_longer_than_the_ranks_wait_for_each_other(tmp_path: Path) -> None:
    save(tmp_path, [1])
    shutil.rmtree(tmp_path / "run")
    assert run_ranks(fetched_slowly, 2, tmp_path) == [checkpoint_path(tmp_path / "run", 1)] * 2


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
    assert checkpoint.newest_undamaged(run, "auto", ONE_RANK, str(store)) == checkpoint_path(run, 2)
    assert (run / "metrics.jsonl").read_text() == "store"
    assert (run / "earlier/metrics.jsonl").read_text() == "run"


def test_a_run_whose_newest_checkpoint_is_no_older_than_the_copys_goes_on_from_its_own(tmp_path: Path) -> None:
    """The run keeps its own records, too."""
    run = tmp_path / "run"
    store = tmp_path / "store"
    save(tmp_path, [1, 2])
    for folder in run, store:
        (folder / "metrics.jsonl").write_text(folder.name)
    assert checkpoint.newest_undamaged(run, "auto", ONE_RANK, str(store)) == checkpoint_path(run, 2)
    assert (run / "metrics.jsonl").read_text() == "run" and not (run / "earlier").exists()


def test_of_a_half_and_of_a_damaged_copy_the_one_before_is_taken(tmp_path: Path, capsys: Capture) -> None:
    save(tmp_path, [1, 2, 3], keep_newest=0)
    run = tmp_path / "run"
    store = tmp_path / "store"
    shutil.rmtree(run)
    (checkpoint_path(store, 3) / "meta.json").unlink()
    (checkpoint_path(store, 2) / ".metadata").write_bytes(b"")
    download_newer(run, str(store), "auto")
    assert steps(run) == [1] and not [*run.rglob("*.tmp")]
    assert "step_00000002.tmp is damaged" in capsys.readouterr().out
    shutil.rmtree(run)
    (checkpoint_path(store, 1) / ".metadata").unlink()
    with refused("holds no intact checkpoint .*; give another address"):
        download_newer(run, str(store), "auto")


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
    assert download_newer(run, str(store), "auto")
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
        checkpoint.newest_undamaged(run, "auto", ONE_RANK, str(store))
    assert steps(run) == [4]
    for _ in range(2):
        assert checkpoint.newest_undamaged(run, "auto", ONE_RANK, str(store)) == checkpoint_path(run, 4)
        assert steps(run) == [2, 4]


def test_a_damaged_config_yaml_of_the_store_costs_the_best_checkpoint_alone(tmp_path: Path, capsys: Capture) -> None:
    save(tmp_path, [1])
    run = tmp_path / "run"
    store = tmp_path / "store"
    (store / "config.yaml").write_text("{")
    shutil.rmtree(run)
    assert checkpoint.newest_undamaged(run, "auto", ONE_RANK, str(store)) == checkpoint_path(run, 1)
    assert "the best checkpoint could not be fetched and remains only there" in capsys.readouterr().out


def test_records_of_a_run_that_only_the_store_has_come_back(tmp_path: Path) -> None:
    save(tmp_path, [1])
    (tmp_path / "store/metrics.jsonl").write_text("a line")
    checkpoint.newest_undamaged(tmp_path / "run", "auto", ONE_RANK, str(tmp_path / "store"))
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
            download_newer(tmp_path / run, address.format(tmp_path), resume)


@pytest.mark.parametrize("resume", ["check", "auto"])
def test_a_store_that_cannot_be_read_is_refused_with_the_setting_that_goes_on_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: str
) -> None:
    def fail(*given: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr("clipscale.checkpoint.download.accessible_checkpoints", fail)
    with refused("cannot be read.*the disk is gone.*checkpoint.copy= continues without it"):
        if resume == "check":
            checkpoint.check_copy(tmp_path / "run", str(tmp_path / "store"))
        else:
            download_newer(tmp_path / "run", str(tmp_path / "store"), resume)


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
            download_newer(run, str(store), "auto", checkpoint_path(run, 1))
    left = {*tmp_path.rglob("*")} - before
    assert len(left) == 1
    for path in left:
        path.rename(store / path.name)
        path.write_bytes(b"")
    remove_temporary(run)
    (store / "metrics.jsonl").unlink()
    save(tmp_path, [2])
    assert not [*tmp_path.rglob("*.tmp")]
