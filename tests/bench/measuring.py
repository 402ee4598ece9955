"""Measures in this process; and a worker that measures nothing, for the tests of processes: `tests.bench.measuring:Words`."""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from clipscale.bench.harness import Answer, Job


class Words:
    """Its job is a list of words for each rank, done in order: `answer` leaves one, `sleep` waits to be ended, `fail` prints and fails."""

    def __init__(self, job: Job, rank: int, leave: Callable[[Answer], object]) -> None:
        self.words, self.rank, self.leave = job.about["words"][rank], rank, leave

    def work(self) -> None:
        answers = 0
        for word in self.words:
            if word == "answer":
                answers += 1
                found = {"rank": self.rank, "answers": answers, "variable": os.environ.get("GIVEN")}
                self.leave({"cases": {"a": {"status": "ok", "steps": [found]}}, "complete": word is self.words[-1]})
                time.sleep(0.1)
            elif word == "sleep":
                time.sleep(60)
            else:
                print("first\nno such thing\n")
                sys.exit(3)


def in_process(worker: Any, patch: pytest.MonkeyPatch) -> None:
    """The jobs of a benchmark are done in this process, by `worker`."""

    def measure(name: str, job: Any, on_answer: Any) -> list[Any]:
        return [worker(job, 0, lambda answer: on_answer([answer])).work()]

    patch.setattr("clipscale.bench.record.measure", measure)
