"""One run a folder: a second one waits a moment, and is refused with the holder's name."""

import errno
import fcntl
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from clipscale.cli import train_verb
from clipscale.config.data import DataConfig
from clipscale.config.train_config import TrainConfig
from clipscale.run import run_lock
from clipscale.run.run_lock import RunLock, wait_until_free
from clipscale.train import train
from tests.support.forked_processes import forks
from tests.support.user_errors import refused


def hold(folder: Path, test: Connection) -> None:
    lock = RunLock(folder)
    lock.acquire()
    test.send("held")
    test.recv()


def test_a_second_run_is_refused_with_the_holder_and_a_killed_one_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "WAIT_S", 0.0)
    ours, theirs = forks().Pipe()
    holder = forks().Process(target=hold, args=(tmp_path, theirs))
    holder.start()
    assert ours.recv() == "held"
    with refused(rf"^run={tmp_path} is in use by process {holder.pid} on .*; stop that run"):
        RunLock(tmp_path).acquire()
    holder.kill()
    holder.join()
    lock = RunLock(tmp_path)
    lock.acquire()
    with refused(rf"^run={tmp_path} is in use by process {os.getpid()} "):
        RunLock(tmp_path).acquire()
    lock.release()
    lock.release()
    RunLock(tmp_path).acquire()


@pytest.mark.parametrize("start", [train_verb.main, train])
def test_a_second_start_is_refused_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Callable[[TrainConfig], object]
) -> None:
    """The command line refuses the start. Under torchrun the run does."""
    monkeypatch.setattr(run_lock, "WAIT_S", 0.0)
    lock = RunLock(tmp_path)
    lock.acquire()
    with refused(f"run={tmp_path} is in use by process {os.getpid()}"):
        start(TrainConfig(run=str(tmp_path), device="cpu", data=DataConfig(workers=0)))
    lock.release()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "run.lock"]


def test_a_run_that_is_about_to_end_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = RunLock(tmp_path)
    second = RunLock(tmp_path)
    first.acquire()
    threading.Timer(0.1, first.release).start()
    second.acquire()
    assert "waiting up to 10 s for its end" in caplog.text
    second.release()


def test_a_failed_start_leaves_no_folder_and_one_that_holds_something_stays(tmp_path: Path) -> None:
    """A folder that was there stays, too. A start that has waited for the lock makes the folder anew."""
    for name, left in (("new", []), ("kept", ["checkpoints", "config.yaml", "run.lock"]), ("old", ["checkpoints"])):
        folder = tmp_path / name
        if name == "old":
            folder.mkdir()
        first = RunLock(folder)
        second = RunLock(folder)
        first.acquire()
        if name == "kept":
            (folder / "config.yaml").touch()
        first.release()
        assert sorted(path.name for path in folder.glob("*") if name != "old" or path.name != "run.lock") == left
        first.acquire()
        threading.Timer(0.1, first.release).start()
        second.acquire()
        assert (folder / "run.lock").read_text().startswith(f"process {os.getpid()} ")


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_without_locks_there_is_a_warning_and_half_written_files_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """A run may be going on there, and may be writing them. With a lock they are a dead run's, and removed."""

    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    half_written = tmp_path / "checkpoints/step_00000002.tmp"
    half_written.mkdir(parents=True)
    (tmp_path / "run.lock").touch()
    lock = RunLock(tmp_path)
    with monkeypatch.context() as without_locks:
        without_locks.setattr(fcntl, "flock", flock)
        wait_until_free(tmp_path)
        lock.acquire()
        lock.release()
        assert half_written.exists()
    assert f"run={tmp_path}: its file system has no locks ({os.strerror(number)})" in caplog.text
    lock.acquire()
    assert not half_written.exists()


def test_a_look_whether_a_folder_is_free_changes_nothing_in_it(tmp_path: Path) -> None:
    wait_until_free(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    half_written = tmp_path / "checkpoints/step_00000002.tmp"
    half_written.mkdir(parents=True)
    (tmp_path / "run.lock").write_text("process 1 on another host")
    wait_until_free(tmp_path)
    assert half_written.exists()
    assert (tmp_path / "run.lock").read_text() == "process 1 on another host"
