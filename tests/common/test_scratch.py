"""What killed runs leave in /tmp and /dev/shm goes with the next start of the same user; what lives keeps its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HOLD = """\
import multiprocessing, sys
from multiprocessing import forkserver
from clipscale.common.scratch import scratch
print(scratch(), flush=True)
queue = multiprocessing.get_context("spawn").SimpleQueue()  # of two semaphores
forkserver.ensure_running()
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def started(short: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes with temporary files, each the first of its group."""
    environment = os.environ | {"TMPDIR": str(short)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", HOLD],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for _ in range(2)
    ]
    yield processes
    for process in processes:
        process.communicate()


def left(folder: Path) -> int:
    """Its files, and the semaphores of its name."""
    return len(list(folder.glob("*"))) + len(list(Path("/dev/shm").glob(f"sem.{folder.name}-*")))


def test_a_killed_groups_files_go_with_the_next_start(short: Path, started: list[subprocess.Popen[str]]) -> None:
    folders = []
    for process in started:
        assert process.stdout
        folders.append(Path(process.stdout.readline().strip()))
        assert process.stdout.readline() == "holds\n"
    killed, living = folders
    held = [left(folder) for folder in folders]
    assert held == [4, 4], "a lock, a socket, two semaphores"
    others = short / "clipscale-of-something-else"
    others.mkdir()
    os.killpg(started[0].pid, signal.SIGKILL)
    started[0].wait()
    assert left(killed) == 4
    code = "from clipscale.common.scratch import scratch; scratch()"
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(short)}, check=True)
    assert left(killed) == 0 and left(living) == 4
    assert sorted(short.iterdir()) == sorted([living, others])
    started[1].communicate()
    assert left(living) == 0
    assert list(short.iterdir()) == [others]


def test_a_long_place_for_temporary_files_does_not_end_a_start(tmp_path: Path) -> None:
    """A socket's path has at most 107 characters."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    answer = subprocess.run(
        [sys.executable, "-c", HOLD], env=os.environ | {"TMPDIR": str(long)}, input="", capture_output=True, text=True
    )
    assert answer.stdout.splitlines()[1:] == ["holds"], answer.stderr
    assert not Path(answer.stdout.splitlines()[0]).exists()
