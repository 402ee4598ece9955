"""A process that measures nothing, for the tests of how such processes are run: `python -m tests.bench.measuring FOLDER RANK`.

Its job is a list of words for each rank, done in turn: `answer` leaves one more, `sleep` waits to be ended, `fail` says why and fails.
"""

import os
import sys
import time
from pathlib import Path

from clipscale.bench.processes import job_in, leave


def main(folder: Path, rank: int) -> int:
    answers = 0
    for word in job_in(folder)["words"][rank]:
        if word == "answer":
            answers += 1
            leave(folder, {"rank": rank, "answers": answers, "variable": os.environ.get("GIVEN")}, rank)
            time.sleep(0.1)
        elif word == "sleep":
            time.sleep(60)
        else:
            print("first\nno such thing\n")
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
