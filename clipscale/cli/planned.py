"""Plans a run that starts, in a process of its own, while the run loads.

If the planner fails, also by a torch with other private parts, the run prints one line and goes on.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event, Thread
from typing import Any

from clipscale.common.errors import StoppedError, UserError, one_line
from clipscale.common.record import Record
from clipscale.common.signals import blocked
from clipscale.common.terminal import tell
from clipscale.config.train import TrainConfig

# Longest time for a plan. Usual are 3 to 20 s, but far more where the loader takes all cores.
LIMIT_S = 300.0
# Niceness of the planner's process, so that it does not slow the start of the run.
NICENESS = 10


def answer(connection: Connection, config: TrainConfig) -> None:
    """In the planner's process: send the plan, empty if there is none, and the reason for that."""
    os.nice(NICENESS)
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  libraries print; it stays open to the end
    try:
        from clipscale.tools.plan.start import before

        found: tuple[Record, str] = before(config), ""
    except Exception as error:  # for example, torch has moved its private modules
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        found = {}, kind + one_line(error)
    connection.send(found)


class Planner:
    """The planner's process, and a thread that prints what it answers."""

    def __init__(self, config: TrainConfig, *, forked: bool) -> None:
        """`forked`: from the data workers' server, which has imported torch; else the process imports it itself."""
        context: Any = multiprocessing.get_context("forkserver" if forked else "spawn")
        self._connection, sends = context.Pipe(duplex=False)
        self.process = context.Process(target=answer, args=(sends, config), daemon=True)
        with blocked():
            self.process.start()
        sends.close()
        # Why the run cannot fit.
        self.refusal = ""
        self._closed = Event()
        self._thread = Thread(target=self._report, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the process. No plan is printed after this."""
        self._closed.set()
        self.process.kill()
        self._thread.join()

    def _answer(self) -> tuple[Record, str]:
        """The plan, and the reason why there is none; one of them is empty."""
        try:
            if self._connection.poll(LIMIT_S):
                return self._connection.recv()
            return {}, f"not ready in {LIMIT_S:.0f} s"
        except EOFError:
            self.process.join()
            return {}, f"its process ended with status {self.process.exitcode}"

    def _report(self) -> None:
        """Print the plan. If the run cannot fit, interrupt its main thread, which raises the refusal."""
        plan, reason = self._answer()
        if self._closed.is_set():
            return
        if reason:
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
def planned(config: TrainConfig, *, forked: bool = False) -> Iterator[None]:
    """Plan a run and print the plan when it is ready. The body is the run.

    If the run cannot fit, the body is interrupted, and UserError is raised in the main thread.
    """
    planner = Planner(config, forked=forked)
    try:
        try:
            yield
        finally:
            planner.close()  # a plan that is ready at the run's very end interrupts here
    except (KeyboardInterrupt, StoppedError):
        if planner.refusal:
            raise UserError(planner.refusal) from None
        raise
