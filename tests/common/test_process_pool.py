"""Workers of a pool end with the process that started them, and one that is killed is named."""

import os
import signal
import subprocess
import sys
import time
from subprocess import PIPE

import psutil
import pytest

from clipscale.common.process_pool import spawned_pool
from tests.support.interpreter import interpreted
from tests.support.user_errors import refused

KILLED = """
import os, signal
from clipscale.common.process_pool import spawned_pool

with spawned_pool(2) as pool:
    print(*{pool.submit(os.getpid).result() for _ in range(2)}, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_workers_of_a_killed_process_end() -> None:
    done = interpreted(KILLED)
    workers = [int(word) for word in done.stdout.split()]
    assert workers, done.stderr
    end = time.monotonic() + 30
    while any(psutil.pid_exists(worker) for worker in workers):
        assert time.monotonic() < end, "a worker goes on"
        time.sleep(0.1)


INTERRUPTED = """
import time
from clipscale.common.process_pool import pool_map, spawned_pool
from clipscale.common.errors import StoppedError
from clipscale.run.stopping import exit_on_signal

try:
    with exit_on_signal(), spawned_pool(2) as pool:
        calls = [pool.submit(time.sleep, 60) for _ in range(9)]
        print("ready", flush=True)
        list(pool_map(pool, time.sleep, [60]))
except StoppedError as stopped:
    print(stopped)
"""


@pytest.mark.parametrize("after_s", [0.0, 0.2, 0.8])
def test_ctrl_c_ends_the_workers_without_a_word_of_theirs(after_s: float) -> None:
    """The terminal sends it to all processes. The workers are starting, or computing."""
    command = [sys.executable, "-c", INTERRUPTED]
    process = subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True, start_new_session=True)
    assert process.stdout and process.stdout.readline() == "ready\n"
    time.sleep(after_s)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (out, err) == ("stopped\n", "")


def test_a_killed_worker_is_one_line() -> None:
    with refused("was killed.*out of memory"), spawned_pool(1) as pool:
        worker = pool.submit(os.getpid).result()
        os.kill(worker, signal.SIGKILL)
        pool.submit(os.getpid).result()
