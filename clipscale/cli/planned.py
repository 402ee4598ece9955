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
from threading import Event, Lock, Thread

from clipscale.common.errors import StoppedError, UserError
from clipscale.common.terminal import tell
from clipscale.config.train import TrainConfig

LIMIT_S = 300.0
"""Time for a plan. It takes 10 to 20 s, but much longer where the loader takes all cores."""


class Planner:
    """The planner's process, and a thread that prints what it answers."""

    def __init__(self, config: TrainConfig) -> None:
        command = [sys.executable, "-m", "clipscale.tools.plan"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)
        self.refusal = ""
        """Why the run cannot fit."""
        self._settings = pickle.dumps(config)
        self._printing = Lock()
        self._closed = Event()
        Thread(target=self._read, daemon=True).start()

    def close(self) -> None:
        """End the process. No plan is printed after this."""
        self._closed.set()
        self._printing.acquire()
        self.process.kill()

    def _read(self) -> None:
        answer, reason = self._answer()
        if not self._printing.acquire(blocking=False):
            return
        try:
            self._report(answer, reason)
        finally:
            self._printing.release()

    def _answer(self) -> tuple[bytes, str]:
        """The plan as JSON; where it is empty, the reason."""
        try:
            answer, errors = self.process.communicate(self._settings, LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return b"", f"not ready in {LIMIT_S:.0f} s"
        status = self.process.returncode
        lines = errors.decode(errors="replace").strip().splitlines() if status > 0 else []
        return b"" if status else answer, lines[-1] if lines else f"its process ended with status {status}"

    def _report(self, answer: bytes, reason: str) -> None:
        """Print the plan. Interrupt a run that cannot fit: its main thread raises the refusal."""
        try:
            plan = json.loads(answer)
        except ValueError:
            tell(f"no plan: {reason}", error=True)
            return
        if plan["fits"]:
            for line in plan["lines"]:
                tell(f"plan: {line}")
            return
        self.refusal = f"this run {plan['lines'][0]}; plan=false starts it all the same"
        loading = signal.getsignal(signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        # An import may swallow the first SIGINT, and background shells ignore it: send another to the run's own
        # handler.
        while not self._closed.wait(0.2):
            if signal.getsignal(signal.SIGINT) is not loading:
                os.kill(os.getpid(), signal.SIGINT)
                break


@contextmanager
def planned(config: TrainConfig) -> Iterator[None]:
    """Plan a run, and print the plan when it is there. The body is the run; it is interrupted if it cannot fit.

    Raises UserError then, from the main thread.
    """
    planner = Planner(config)
    try:
        try:
            yield
        finally:
            planner.close()  # the interrupt of a plan that comes at the run's end arrives here
    except (KeyboardInterrupt, StoppedError):
        if planner.refusal:
            raise UserError(planner.refusal) from None
        raise
