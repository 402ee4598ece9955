"""Workers of a pool end with the process that started them, and one that is killed is named."""

import os
import signal
import time

import psutil

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


def test_a_killed_worker_is_one_line() -> None:
    with refused("was killed.*out of memory"), spawned_pool(1) as pool:
        worker = pool.submit(os.getpid).result()
        os.kill(worker, signal.SIGKILL)
        pool.submit(os.getpid).result()
