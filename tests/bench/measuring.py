"""Measures in this process; and a task that measures nothing, for the tests of processes: `tests.bench.measuring:work`.

Its job is a list of words for each rank, done in order: `answer` replaces the answer, `sleep` waits to be ended, `fail` prints and fails.
"""

import os
import sys
import time
from typing import Any

import pytest

from clipscale.bench.harness import Task


def work(task: Task) -> None:
    answers = 0
    for word in task.job["words"][task.rank]:
        if word == "answer":
            answers += 1
            task.leave({"rank": task.rank, "answers": answers, "variable": os.environ.get("GIVEN")})
            time.sleep(0.1)
        elif word == "sleep":
            time.sleep(60)
        else:
            print("first\nno such thing\n")
            sys.exit(3)


def in_process(worker: Any, patch: pytest.MonkeyPatch) -> None:
    """The driver's jobs are done in this process, by `worker`."""

    def measure(target: str, job: Any, on_answer: Any) -> list[Any]:
        return [worker(job, 0, lambda answer: on_answer([answer])).work()]

    patch.setattr("clipscale.bench.driver.measure", measure)
