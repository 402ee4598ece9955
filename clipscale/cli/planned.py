"""The plan of a run that starts, made in a process of its own while the run loads.

A failure of the planner, or of what it needs of torch, costs a line.
"""

import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

from clipscale.common.errors import StoppedError, UserError, one_line
from clipscale.common.signals import blocked
from clipscale.common.terminal import tell
from clipscale.config.train import TrainConfig

LIMIT_S = 300.0
"""Time for a plan. It takes 3 to 20 s, but much longer where the loader takes all cores."""
BESIDE = 10
"""By so much nicer than the run, which loads meanwhile."""


def answer(connection: Connection, config: TrainConfig) -> None:
    """In the planner's process: send the plan as JSON, or an empty text and why there is none."""
    os.nice(BESIDE)
    with Path(os.devnull).open("w") as silent, redirect_stdout(silent), redirect_stderr(silent):  # libraries print
        try:
            from clipscale.tools.plan.start import before

            found = before(config), ""
        except UserError as error:
            found = "", one_line(error)
        except Exception as error:  # as of a torch that has moved its private modules
            found = "", f"{type(error).__name__}: {one_line(error)}"
    with suppress(BrokenPipeError):  # the run has ended
        connection.send(found)


class Planner:
    """The planner's process, and a thread that prints what it answers."""

    def __init__(self, config: TrainConfig, *, forked: bool) -> None:
        """`forked`: by the server of the data workers, which has torch and open_clip; else it imports them itself."""
        context: Any = multiprocessing.get_context("forkserver" if forked else "spawn")
        self._connection, sends = context.Pipe(duplex=False)
        self.process = context.Process(target=answer, args=(sends, config), name="planner", daemon=True)
        with blocked():
            self.process.start()
        sends.close()
        self.refusal = ""
        """Why the run cannot fit."""
        self._printing = Lock()
        self._closed = Event()
        Thread(target=self._read, daemon=True).start()

    def close(self) -> None:
        """End the process. No plan is printed after this."""
        self._closed.set()
        self._printing.acquire()
        self.process.kill()

    def _read(self) -> None:
        plan, reason = self._answer()
        if not self._printing.acquire(blocking=False):
            return
        try:
            self._report(plan, reason)
        finally:
            self._printing.release()

    def _answer(self) -> tuple[str, str]:
        """The plan as JSON; where it is empty, the reason."""
        try:
            if self._connection.poll(LIMIT_S):
                return self._connection.recv()
            self.process.kill()
            return "", f"not ready in {LIMIT_S:.0f} s"
        except EOFError:
            self.process.join()
            return "", f"its process ended with status {self.process.exitcode}"

    def _report(self, plan: str, reason: str) -> None:
        """Print the plan. Interrupt a run that cannot fit: its main thread raises the refusal."""
        if reason:
            tell(f"no plan: {reason}", error=True)
            return
        result = json.loads(plan)
        if result["fits"]:
            for line in result["lines"]:
                tell(f"plan: {line}")
            return
        self.refusal = f"this run {result['lines'][0]}; plan=false starts it all the same"
        loading = signal.getsignal(signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        # An import may swallow the first SIGINT, and background shells ignore it: send another to the run's own
        # handler.
        while not self._closed.wait(0.2):
            if signal.getsignal(signal.SIGINT) is not loading:
                os.kill(os.getpid(), signal.SIGINT)
                break


@contextmanager
def planned(config: TrainConfig, *, forked: bool = False) -> Iterator[None]:
    """Plan a run, and print the plan when it is there. The body is the run; it is interrupted if it cannot fit.

    Raises UserError then, from the main thread.
    """
    planner = Planner(config, forked=forked)
    try:
        try:
            yield
        finally:
            planner.close()  # the interrupt of a plan that comes at the run's end arrives here
    except (KeyboardInterrupt, StoppedError):
        if planner.refusal:
            raise UserError(planner.refusal) from None
        raise
