"""A run that waits for samples, or for the pictures of an evaluation, hears a signal, and saves."""

import os
import signal
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from clipscale.common.errors import StoppedError
from clipscale.config.data import DataConfig
from clipscale.config.sections import CheckpointConfig, EvalConfig
from clipscale.config.train_config import TrainConfig
from clipscale.data.loader.shard_stream import ShardStream
from clipscale.run_folder.paths import checkpoints_of, step_of
from clipscale.run_folder.records import read_metrics
from clipscale.train import train
from tests.data.files import write_shards
from tests.data.shards.web import Web, serving
from tests.eval.sets import classification_set
from tests.run.waits.signals import SilentPictures, signalled
from tests.support.checkpoints import steps
from tests.support.ranks import run_ranks
from tests.support.runs import curve, four_step_config, train_on_rank


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_run_whose_storage_falls_silent_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """The training process or a worker reads it. The resumed run has the curve of an undisturbed one."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    write_shards(tmp_path / "set", [24, 24])
    with serving(Web(tmp_path)) as web:
        data = DataConfig(train=[f"{web.url}/set/{{00000..00001}}.tar"], workers=workers, shard_streams=2)
        config = four_step_config("", tmp_path / "run", samples=168, data=data, checkpoint=CheckpointConfig(every="0"))
        web.faults = lambda number, path: "silent" if number > 5 else None
        with signalled(lambda: web.done["silent"] > 0), pytest.raises(StoppedError, match=r"after step . and saved"):
            train(config)
        (saved,) = checkpoints_of(tmp_path / "run")
        assert 0 < step_of(saved) == len(curve(tmp_path / "run")) < 14
        web.faults = lambda number, path: None
        train(config)
        train(replace(config, run=str(tmp_path / "whole")))
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def test_the_first_batch_that_never_comes_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    write_shards(tmp_path / "set", [24, 24])
    with serving(Web(tmp_path)) as web:
        data = DataConfig(train=[f"{web.url}/set/{{00000..00001}}.tar"], workers=0, shard_streams=2)
        web.faults = lambda number, path: "silent" if number > 1 else None
        with (
            signalled(lambda: web.done["silent"] > 0, signal.SIGINT),
            pytest.raises(StoppedError, match=r"^stopped before step 1 was complete: nothing is saved"),
        ):
            train(four_step_config("", tmp_path / "run", data=data))
    assert not checkpoints_of(tmp_path / "run")


def late(rank: int, world_size: int, config: TrainConfig, port: int, asked: int) -> str:
    """A rank of a run; in the third step the storage of rank 1 is silent, and then rank `asked` gets a signal."""
    dist.destroy_process_group()  # the run makes its own, with a store
    os.environ["MASTER_PORT"] = str(port)
    next_sample = ShardStream.next_sample
    taken = 0
    waits = threading.Event()

    def silent(stream: ShardStream, row: Any) -> Any:
        nonlocal taken
        taken += rank
        while taken > 15:
            waits.set()
            stream._readers[0]._store.poll()
            time.sleep(0.05)
        return next_sample(stream, row)

    records = Path(config.run) / "metrics.jsonl"
    with mock.patch.object(ShardStream, "next_sample", silent), pytest.raises(StoppedError) as stopped:
        if rank == asked:
            with signalled(waits.is_set if rank else lambda: len(read_metrics(records)) == 2):
                train(config)
        else:
            train(config)
    return str(stopped.value)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@pytest.mark.parametrize("asked", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_all_ranks_leave_when_one_is_late_and_either_is_asked(shards: str, tmp_path: Path, asked: int) -> None:
    """Rank 0 waits for rank 1 in a collective, where no handler runs, and rank 1 for its storage. The slow case also
    resumes the run, as one process does in the first test."""
    config = four_step_config(shards, tmp_path / "run", samples=60, checkpoint=CheckpointConfig(every="0"))
    lines = run_ranks(late, 2, config, free_port(), asked)
    (saved,) = checkpoints_of(tmp_path / "run")
    step = step_of(saved)
    assert step > 0 and lines == [f"stopped by SIGTERM after step {step} and saved"] * 2
    if asked:
        run_ranks(train_on_rank, 2, config)
        run_ranks(train_on_rank, 2, replace(config, run=str(tmp_path / "whole")))
        assert curve(tmp_path / "run") == curve(tmp_path / "whole")


# ---- an evaluation ----


def evaluated(shards: str, tmp_path: Path, batch: int) -> TrainConfig:
    """A run that evaluates six pictures after each step, in batches of so many."""
    sets = EvalConfig(every=1, sets=[str(classification_set(tmp_path / "set"))], batch=batch)
    return four_step_config(shards, tmp_path / "run", samples=36, eval=sets, checkpoint=CheckpointConfig(every="0"))


@pytest.mark.slow  # below two ranks do it
def test_a_run_whose_pictures_of_an_evaluation_do_not_come_is_saved(shards: str, tmp_path: Path) -> None:
    """It is saved after the step before the evaluation. The resumed run has the curve of an undisturbed one."""
    config = evaluated(shards, tmp_path, 3)
    results = tmp_path / "run/eval"
    silent = SilentPictures(lambda: (results / "step_00000001.json").exists())
    with silent(), signalled(silent.waits.is_set), pytest.raises(StoppedError, match="SIGTERM after step 2 and saved"):
        train(config)
    assert steps(tmp_path / "run") == [2]
    assert not (results / "step_00000002.json").exists(), "half of the pictures are not a result"
    train(config)
    train(replace(config, run=str(tmp_path / "whole"), eval=EvalConfig()))
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def late_pictures(rank: int, world_size: int, config: TrainConfig, port: int, asked: int) -> str:
    """A rank of a run; after step 2 the pictures of rank 1 do not come, and then rank `asked` gets a signal."""
    dist.destroy_process_group()  # the run makes its own, with a store
    os.environ["MASTER_PORT"] = str(port)
    folder = Path(config.run)
    silent = SilentPictures(lambda: rank == 1 and (folder / "eval/step_00000001.json").exists())
    records = folder / "metrics.jsonl"
    with silent(), pytest.raises(StoppedError) as stopped:
        if rank == asked:
            with signalled(silent.waits.is_set if rank else lambda: len(read_metrics(records)) == 2):
                train(config)
        else:
            train(config)
    return str(stopped.value)


@pytest.mark.parametrize(("asked", "batch"), [(0, 3), pytest.param(1, 1, marks=pytest.mark.slow)])
def test_all_ranks_leave_an_evaluation_when_the_pictures_of_one_do_not_come(
    shards: str, tmp_path: Path, asked: int, batch: int
) -> None:
    """Rank 0 waits for rank 1 in a collective, where no handler runs. A rank's only batch is the last, after which no
    vote follows."""
    config = evaluated(shards, tmp_path, batch)
    lines = run_ranks(late_pictures, 2, config, free_port(), asked)
    assert lines == ["stopped by SIGTERM after step 2 and saved"] * 2
    assert steps(tmp_path / "run") == [2]
    assert not (tmp_path / "run/eval/step_00000002.json").exists()
