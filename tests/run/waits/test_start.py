"""A start that waits ends at a signal: nothing is to be saved."""

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from clipscale.checkpoint.loading import verify
from clipscale.cli.main import main as command
from clipscale.cli.train_verb import NOTHING_TO_SAVE
from clipscale.common.errors import StoppedError
from clipscale.config.sections import EvalConfig, LaunchConfig
from clipscale.config.train_config import TrainConfig
from clipscale.data.shards.index import read_entries, update_indexes
from clipscale.eval.run import evaluate
from clipscale.launch import local
from clipscale.run_folder.paths import checkpoint_path
from tests.data.files import write_shards
from tests.data.shards.web import Web, serving
from tests.eval.sets import ColourModel, classification_set, evaluation
from tests.run.waits.signals import HEARD_S, SilentPictures
from tests.support.checkpoints import ONE_RANK, save
from tests.support.forked_processes import forks


def start_asleep(config: TrainConfig) -> dict:
    """A start that waits in Python, ready when its folder is there."""
    Path(config.run).mkdir()
    time.sleep(60)
    return {}


def start_in_a_library(config: TrainConfig) -> dict:
    """A start that waits where no handler runs."""
    Path(config.run).mkdir()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    store.get("nobody sets it")
    return {}


def start_of_an_evaluation(config: TrainConfig) -> dict:
    """The verb `eval`, waiting for pictures that do not come."""
    sets = evaluation(EvalConfig(sets=[str(classification_set(Path(config.run).with_name("set")))]))
    silent = SilentPictures(lambda: True)

    def make_the_run_folder() -> None:
        silent.waits.wait()
        Path(config.run).mkdir()

    with silent():
        threading.Thread(target=make_the_run_folder, daemon=True).start()
        return evaluate(ColourModel(), sets, ONE_RANK)


def start_of_an_index(config: TrainConfig) -> dict:
    """The state of indexed shards, on a file system that does not answer."""
    folder = Path(config.run).with_name("set")
    urls = [str(folder / f"{number:05}.tar") for number in range(2)]
    write_shards(folder, [3, 3])
    list(update_indexes(urls))

    def silent(path: str) -> None:
        Path(config.run).mkdir(exist_ok=True)
        time.sleep(60)

    with mock.patch("clipscale.data.shards.index.local_state", silent):
        read_entries(urls)
    return {}


def start_of_a_checkpoint(config: TrainConfig) -> dict:
    """The checksums of a checkpoint, on a file system that does not answer."""
    folder = Path(config.run).with_name("earlier")
    save(folder, 1, {"model": {"w": torch.zeros(1)}}, keep=0)

    def silent(path: Path) -> None:
        Path(config.run).mkdir(exist_ok=True)
        time.sleep(60)

    with mock.patch("clipscale.checkpoint.loading.size_and_crc32", silent):
        verify(checkpoint_path(folder, 1))
    return {}


def wait_for_a_plan(run: str) -> None:
    """A planner that does not answer."""
    Path(run).mkdir()
    os.read(os.pipe()[0], 1)


def started(
    config: TrainConfig,
    main: Callable[[TrainConfig], dict],
    output: Path,
    check_plan: Callable[[], None] | None = None,
) -> None:
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 2)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have started the tests
    mock.patch("multiprocessing.parent_process", lambda: None).start()  # as of a command
    try:
        local.launch(config, main, check_plan=check_plan, stop_suffix=NOTHING_TO_SAVE)
    except StoppedError as stopped:
        os.write(2, f"{stopped}\n".encode())
        os._exit(128 + stopped.signum)


@pytest.mark.parametrize(
    ("main", "number"),
    [
        (start_asleep, signal.SIGTERM),
        (start_asleep, signal.SIGINT),
        (start_asleep, signal.SIGHUP),
        (start_asleep, signal.SIGUSR1),
        (start_in_a_library, signal.SIGTERM),
        (start_of_an_evaluation, signal.SIGTERM),
        (start_of_an_evaluation, signal.SIGINT),
        (start_of_an_index, signal.SIGTERM),
        (start_of_a_checkpoint, signal.SIGTERM),
    ],
)
def test_a_start_ends_at_once(tmp_path: Path, main: Callable[[TrainConfig], dict], number: signal.Signals) -> None:
    config = TrainConfig(run=str(tmp_path / "run"), device="cpu", plan=False, launch=LaunchConfig(procs=1))
    process = forks().Process(target=started, args=(config, main, tmp_path / "err"))
    process.start()
    ends_at_once(process, tmp_path, number)


def ends_at_once(process: BaseProcess, folder: Path, number: signal.Signals) -> None:
    """Send the signal when the folder `run` is there, and look at the end of the process that `started` runs in."""
    while not (folder / "run").exists():
        time.sleep(0.01)
    time.sleep(0.2)
    assert process.pid
    os.kill(process.pid, number)
    sent = time.monotonic()
    process.join(HEARD_S + 10)
    counted = signal.SIGTERM if number is signal.SIGUSR1 else number
    assert process.exitcode == 128 + counted
    assert time.monotonic() - sent < HEARD_S
    name = "" if number is signal.SIGINT else f" by {counted.name}"
    assert (folder / "err").read_text().splitlines()[-1].startswith(f"stopped{name}")


def test_a_start_that_waits_for_its_plan_ends_at_once(tmp_path: Path) -> None:
    config = TrainConfig(run=str(tmp_path / "run"), device="cpu", launch=LaunchConfig(procs=1))
    given = (config, start_asleep, tmp_path / "err", partial(wait_for_a_plan, config.run))
    process = forks().Process(target=started, args=given)
    process.start()
    ends_at_once(process, tmp_path, signal.SIGTERM)


def commanded(words: list[str], output: Path) -> None:
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 2)
    mock.patch("multiprocessing.parent_process", lambda: None).start()  # as of a command
    os._exit(command(words))


TRAIN = ["train", "model=vit-b32", "batch=8", "samples=16", "device=cpu", "plan=false", "launch.procs=1"]


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        pytest.param([*TRAIN, "data.train=s3://bucket/*.tar"], "", id="a-first-answer", marks=pytest.mark.slow),
        pytest.param([*TRAIN, "data.train=s3://bucket/*.tar"], "list-type", id="a-listing"),
        pytest.param([*TRAIN, "checkpoint.copy=s3://bucket/run", "data.train={}"], "", id="a-copy"),
        pytest.param(["data", "index", "{}"], "", id="an-index", marks=pytest.mark.slow),
        pytest.param(["data", "check", "{}"], "", id="a-check"),
    ],
)
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_command_whose_server_is_silent_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], asked: str, number: signal.Signals
) -> None:
    """`asked`: in the requests that have no answer."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "tests")
    with serving(Web(tmp_path)) as web:
        monkeypatch.setenv("AWS_ENDPOINT_URL", web.url)
        web.faults = lambda number, path: "silent" if asked in path else None
        given = [word.format(f"{web.url}/00000.tar") for word in words]
        if words[0] == "train":
            given.append(f"run={tmp_path / 'run'}")
        process = forks().Process(target=commanded, args=(given, tmp_path / "err"))
        process.start()
        while not web.done["silent"]:
            time.sleep(0.01)
            assert process.is_alive(), (tmp_path / "err").read_text()
        time.sleep(0.2)
        assert process.pid
        os.kill(process.pid, number)
        sent = time.monotonic()
        process.join(HEARD_S + 10)
    assert process.exitcode in (128 + number, -number)
    assert time.monotonic() - sent < HEARD_S
    assert "Traceback" not in (tmp_path / "err").read_text()
