"""What goes wrong around a run while it trains: its disk, its folder, its shards and its storage."""

import os
import re
import shutil
import zlib
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch

from clipscale.common.errors import UserError
from clipscale.common.files import read_yaml
from clipscale.config.data import DataConfig
from clipscale.config.sections import CheckpointConfig, OptimConfig
from clipscale.data.shards import index, requests, store
from clipscale.run.run_lock import RunLock
from clipscale.run.train_loop import TrainLoop
from clipscale.run_folder.paths import checkpoints_of, step_of
from clipscale.step.train_step import StepResult
from clipscale.tools.trained_model import load_model
from clipscale.train import train
from tests.data.files import write_shards
from tests.data.shards.web import FAULTS, Web, serving
from tests.support.runs import curve, four_step_config, records
from tests.support.user_errors import refused


def between_steps(work: Callable[[int], Any]) -> Any:
    """`work(step)` before each step of the runs inside."""
    run_step = TrainLoop.run_step

    def disturbed(run: TrainLoop) -> StepResult:
        work(run.step)
        return run_step(run)

    return mock.patch.object(TrainLoop, "run_step", disturbed)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_that_could_not_save_is_refused_at_its_start(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    config = four_step_config(shards, tmp_path / "run", optim=OptimConfig(name=optimizer))
    usage = namedtuple("usage", "free")
    room = 0
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(room))
    with refused(rf"^run={tmp_path}/run: its disk has 0 B free") as full, monkeypatch.context() as before:
        before.setattr("clipscale.start.build.build_model", None)
        train(config)
    assert not (tmp_path / "run/metrics.jsonl").exists()
    (size,) = re.findall(
        r"a checkpoint takes at least ([\d.]+) MiB, and the first one needs room for two; ", str(full.value)
    )
    room = round(2.01 * float(size) * 2**20)
    train(config)
    (saved,) = checkpoints_of(tmp_path / "run")
    files = sum(file.stat().st_size for file in saved.iterdir())
    assert float(size) * 2**20 == pytest.approx(files, rel=0.02)


@pytest.fixture(scope="module")
def undisturbed(shards: str, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run that no fault disturbs."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    train(four_step_config(shards, run))
    return curve(run)


@pytest.mark.parametrize("used", [False, True])
def test_a_removed_folder_ends_the_run_with_a_checkpoint_in_a_new_one(
    shards: str, undisturbed: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: bool
) -> None:
    """If another run has begun there (`used`), nothing is written into its folder."""
    monkeypatch.setattr("clipscale.run.run_lock.WAIT_S", 0.0)
    run, other = tmp_path / "run", RunLock(tmp_path / "run")

    def remove(step: int) -> None:
        if step == 1:
            run.rename(tmp_path / "gone")  # at once, as a checkpoint may be on its way into it
            if used:
                other.acquire()

    config = four_step_config(shards, run, checkpoint=CheckpointConfig(every="2"))
    line = "is in use by process" if used else "its folder was removed .* a new one holds step 2: continue"
    with between_steps(remove), refused(line):
        train(config)
    assert bool(checkpoints_of(run)) != used
    other.release()
    if not used:
        train(config)
        assert [record["loss"] for record in records(run)] == undisturbed[2:]


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (Path.unlink, "unreadable_shard"),
        # data/shards/test_reader.py reads truncated shards.
        pytest.param(lambda path: os.truncate(path, 20_000), "truncated_shard", marks=pytest.mark.slow),
    ],
)
def test_a_shard_that_goes_while_it_is_read_is_left_out(
    tmp_path: Path, harm: Callable[[Path], None], reason: str
) -> None:
    first, _ = write_shards(tmp_path / "set", [40, 40])
    data = DataConfig(train=[str(tmp_path / "set")], workers=0, shard_streams=2)
    with between_steps(lambda step: harm(first) if step == 2 else None):
        assert train(four_step_config("", tmp_path / "run", samples=144, data=data))["step"] == 12
    assert records(tmp_path / "run")[-1]["broken_by"][reason] > 0


def test_shards_that_are_replaced_are_counted_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = write_shards(tmp_path / "set", [40, 40])
    dict(index.update_indexes([str(path) for path in paths]))
    data = DataConfig(train=[str(tmp_path / "set")], workers=0, shard_streams=2)

    def replace_all(step: int) -> None:
        for path in paths:
            path.touch()

    with between_steps(replace_all):
        train(four_step_config("", tmp_path / "run", samples=240, data=data))
    assert records(tmp_path / "run")[-1]["faults_by"]["changed_shard"] > 2
    assert caplog.text.count("have changed since they were indexed") == 1


def test_what_is_trained_is_saved_when_all_data_goes(tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "set", [40, 40])
    config = four_step_config(str(tmp_path / "set/{00000..00001}.tar"), tmp_path / "run", samples=144)

    def remove_all(step: int) -> None:
        for path in paths if step == 2 else []:
            path.unlink(missing_ok=True)

    with between_steps(remove_all), refused(r"no usable sample among the last .* No such file"):
        train(config)
    (saved,) = checkpoints_of(tmp_path / "run")
    assert step_of(saved) > 2
    write_shards(tmp_path / "set", [40, 40])
    train(config)
    train(replace(config, run=str(tmp_path / "whole")))
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


@pytest.mark.parametrize(
    ("part", "error", "saved"),
    [
        ("step.cache.grad_cache.GradCache.replay", UserError("a mistake"), [2]),
        pytest.param(
            "step.cache.grad_cache.GradCache.replay",
            OSError(28, "No space left on device"),
            [2],
            marks=pytest.mark.slow,
        ),
        ("step.train_step.TrainStep.update", OSError(24, "Too many open files"), []),
        pytest.param(
            "step.train_step.TrainStep.update", torch.OutOfMemoryError("no memory"), [], marks=pytest.mark.slow
        ),
        ("step.train_step.TrainStep.size_graph_budget", OSError(24, "Too many open files"), [3]),
    ],
)
def test_what_ends_a_run_saves_first(
    shards: str, undisturbed: list[float], tmp_path: Path, part: str, error: Exception, saved: list[int]
) -> None:
    """It does not if its weights may be half updated."""
    config = four_step_config(shards, tmp_path / "run")
    work = resolve_name(f"clipscale.{part}")
    third = mock.Mock(side_effect=[mock.DEFAULT] * 2 + [error])
    patch = mock.patch(f"clipscale.{part}", lambda *given, **named: third() and work(*given, **named))
    with patch, pytest.raises((UserError, OSError)):
        train(config)
    assert [*map(step_of, checkpoints_of(tmp_path / "run"))] == saved
    if saved:
        train(config)
        assert curve(tmp_path / "run") == undisturbed


def test_a_server_with_faults_does_not_change_the_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses, resets, is silent, cuts answers off or gives wrong ones; all is counted."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(store, "REQUEST_BYTES", 8192)
    monkeypatch.setattr(store, "MAX_WAIT_S", 0.01)
    monkeypatch.setattr(requests, "WAIT_S", 0.3)
    paths = write_shards(tmp_path / "set", [40, 40])
    random = Random(7)
    with serving(Web(tmp_path)) as web:
        dict(index.update_indexes([f"{web.url}/set/{path.name}" for path in paths]))
        kinds = (*FAULTS, "stall")
        web.faults = lambda number, path: random.choice(kinds) if random.random() < 0.4 else None
        for name, source in (("local", tmp_path / "set"), ("remote", f"{web.url}/set/{{00000..00001}}.tar")):
            data = DataConfig(train=[str(source)], workers=0, shard_streams=2)
            train(four_step_config("", tmp_path / name, samples=72, data=data))
    assert curve(tmp_path / "remote") == curve(tmp_path / "local")
    last = records(tmp_path / "remote")[-1]
    assert 5 < last["faults"] <= web.done.total() and not last["broken"], last
    assert set(last["faults_by"]) <= {"http_503", "failed_request", "short_answer", "wrong_range", "no_answer"}


def test_a_checkpoint_of_wrong_content_is_one_line(shards: str, tmp_path: Path) -> None:
    train(four_step_config(shards, tmp_path, samples=12))
    meta = tmp_path / "checkpoints/step_00000001/meta.json"
    whole = meta.read_text().partition('"meta": ')[2][:-2]
    for pattern, instead in read_yaml(Path(__file__).with_name("meta.yaml")).values():
        text = re.sub(pattern, instead, whole, count=1)
        meta.write_text(f'{{"crc32": {zlib.crc32(text.encode())}, "meta": {text}}}\n')
        with refused("^checkpoint"):
            load_model(tmp_path)
