"""A whole training run in a fresh process: `python -m clipscale.bench.runs_work FOLDER RANK` does the job in FOLDER (processes.py)."""

import resource
import sys
import traceback
from importlib import import_module
from pathlib import Path

from clipscale.bench.memory import address_space, is_out_of_memory, name_first
from clipscale.bench.processes import job_in, leave
from clipscale.errors import UserError

NO_ROOM = ("are free for each of", "larger than foreseen", "was killed by SIGKILL", "samples fit the device")
"""What the program's own refusals for want of memory say (data/room.py, tiers.py, workers.py, probe.py)."""


def main(folder: Path) -> int:
    """The run, and how it ended, as status and reason."""
    from clipscale.cli import main as cli

    asked = job_in(folder)
    name_first()
    if asked["memory"] is not None:
        import_module("clipscale.train")  # it is the program itself, which does not count
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (address_space() + asked["memory"], hard))
    try:
        status = cli.dispatch(["train", *asked["words"]])
        outcome = ("ok", "") if status == 0 else ("failed", f"status {status}")
    except Exception as error:
        traceback.print_exc()
        outcome = judged(error)
    leave(folder, dict(zip(("status", "reason"), outcome)))
    return 0


def judged(error: Exception) -> tuple[str, str]:
    """Status and reason of a run that raised."""
    reason = " ".join(str(error).split())[:300]
    if isinstance(error, UserError):
        return ("refused" if any(sign in reason for sign in NO_ROOM) else "failed"), reason
    return ("out of memory" if is_out_of_memory(error) else "failed"), f"{type(error).__name__}: {reason}"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
