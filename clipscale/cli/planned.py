"""The plan of a run that starts, made in a process of its own while the run loads.

A failure of the planner, or of what it needs of torch, costs a line.
"""

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, Thread

from clipscale.common.errors import StoppedError, UserError
from clipscale.common.terminal import tell
from clipscale.config.train import TrainConfig

LIMIT_S = 300.0
"""Time for a plan. It takes 10 to 20 s, but much longer where the loader takes all cores."""


@contextmanager
def planned(config: TrainConfig) -> Iterator[None]:
    """Plan a run, and print the plan when it is there. The body is the run; it is interrupted if it cannot fit.

    Raises UserError then, from the main thread.
    """
    command = [sys.executable, "-m", "clipscale.tools.plan"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)
    ended, refusal = Lock(), ""

    def read() -> None:
        nonlocal refusal
        try:
            out, errors = process.communicate(pickle.dumps(config), LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            out, errors = b"", f"not ready in {LIMIT_S:.0f} s".encode()
        if not ended.acquire(blocking=False):
            return
        try:
            if not out:
                tell(f"no plan: {errors.decode(errors='replace').strip().rpartition(chr(10))[2]}", error=True)
                return
            plan = json.loads(out)
            if plan["fits"]:
                for line in plan["lines"]:
                    tell(f"plan: {line}")
                return
            refusal = f"this run {plan['lines'][0]}; plan=false starts it all the same"
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            ended.release()

    Thread(target=read, daemon=True).start()
    try:
        try:
            yield
        finally:
            ended.acquire()  # no plan is printed after the run
            process.kill()
    except (KeyboardInterrupt, StoppedError):
        if refusal:
            raise UserError(refusal) from None
        raise
