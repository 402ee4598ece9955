"""Workers of a pool end with the process that started them."""

import time

import psutil

from tests.support.interpreter import interpreted

KILLED = """
import os, signal
from clipscale.common.process_pool import spawned_pool

pool = spawned_pool(2)
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
