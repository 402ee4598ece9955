"""A task that measures nothing, for the tests of processes: `tests.bench.measuring:work`.

Its job is a list of words for each rank, done in order: `answer` replaces the answer, `sleep` waits to be ended, `fail` prints and fails.
"""

import os
import sys
import time

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
