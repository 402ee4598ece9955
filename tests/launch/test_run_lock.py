"""One run at a time in a folder: the second is refused, and a dead run holds nothing up."""

import errno
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from clipscale.common.errors import UserError
from clipscale.launch import processes, run_lock
from clipscale.launch.run_lock import FILE, RunLock


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "SAME_HOST_S", 0.0)
    monkeypatch.setattr(run_lock, "OTHER_HOST_S", 0.0)


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    monkeypatch.setattr(run_lock, "HEARTBEAT_S", 0.05)


def record(run: Path, **changes: object) -> None:
    me = os.getpid()
    own = {"host": socket.gethostname(), "pid": me, "started": processes.started(me), "since": "2026-01-01 00:00:00"}
    (run / FILE).write_text(json.dumps(own | changes))


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("flock", [True, False])
def test_a_second_run_is_refused_in_one_line(tmp_path: Path, flock: bool, request: pytest.FixtureRequest) -> None:
    if not flock:
        request.getfixturevalue("no_flock")
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    first.acquire()
    with pytest.raises(UserError) as refused:
        second.acquire()
    assert f"is in use by process {os.getpid()} on {socket.gethostname()}, since 20" in str(refused.value)
    assert "\n" not in str(refused.value)
    second.release()
    with pytest.raises(UserError):
        RunLock(tmp_path).acquire()
    first.release()
    second.acquire()
    second.release()


def test_a_run_that_ends_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    first.acquire()
    threading.Timer(0.3, first.release).start()
    with caplog.at_level(logging.WARNING):
        second.acquire()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].endswith("waiting up to 10 s for its end")
    second.release()


@pytest.mark.usefixtures("at_once")
@pytest.mark.slow  # a run of its own process
def test_a_killed_run_leaves_no_lock(tmp_path: Path) -> None:
    code = f"from clipscale.launch.run_lock import *; lock = RunLock(Path({str(tmp_path)!r})); lock.acquire(); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while not ((tmp_path / FILE).exists() and (tmp_path / FILE).read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lock = RunLock(tmp_path)
    with pytest.raises(UserError, match=f"process {process.pid} "):
        lock.acquire()
    process.kill()
    process.wait()
    lock.acquire()
    lock.release()


@pytest.mark.usefixtures("no_flock", "at_once")
@pytest.mark.parametrize("changes", [{"pid": 2**22 + 1}, {"started": 1.0}, {"pid": "1"}, {"started": None}])
def test_without_flock_a_dead_process_holds_nothing(tmp_path: Path, changes: dict[str, object]) -> None:
    """Its number may belong to another process by now."""
    record(tmp_path, **changes)
    lock = RunLock(tmp_path)
    lock.acquire()
    lock.release()


@pytest.mark.usefixtures("no_flock")
def test_without_flock_another_machine_holds_while_it_touches_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path, host="elsewhere")
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.01):
            os.utime(tmp_path / FILE)

    other = threading.Thread(target=beat)
    other.start()
    monkeypatch.setattr(run_lock, "OTHER_HOST_S", 0.5)
    with pytest.raises(UserError, match="on elsewhere"):
        RunLock(tmp_path).acquire()
    ended.set()
    other.join()
    lock = RunLock(tmp_path)
    lock.acquire()  # no heartbeat: dead
    lock.release()
