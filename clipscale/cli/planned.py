"""Plans a run in a process of its own, while the run starts.

If the planner fails, for example because torch has moved its private modules, the run prints one line and goes on.
"""

import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Event, Thread
from typing import Any

from clipscale.common.errors import StoppedError, UserError, one_line
from clipscale.common.record import Record
from clipscale.common.signals import blocked
from clipscale.common.terminal import log_line
from clipscale.config.train_config import TrainConfig
from clipscale.lifecycle.stopping import interrupt, interruptible

# Niceness of the planner's process, so that it does not slow the start of the run.
NICENESS = 10


def send_plan(connection: Connection, config: TrainConfig) -> None:
    """Send the plan and an empty text, or an empty plan and why there is none. Runs in the planner's process."""
    os.nice(NICENESS)
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  libraries print; it stays open to the end
    try:
        from clipscale.tools.plan.start import start_plan

        outcome: tuple[Record, str] = start_plan(config), ""
    except Exception as error:
        prefix = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        outcome = {}, prefix + one_line(error)
    connection.send(outcome)


class PlanProcess:
    """The process that plans a run, and a thread that prints its plan. `start_plan_process` starts both."""

    def __init__(self, process: BaseProcess, connection: Connection) -> None:
        """`connection`: the one to the process."""
        self.process = process
        self._connection = connection
        # Why the run cannot fit.
        self.refusal = ""
        self._closed = Event()
        self._thread = Thread(target=self._report, daemon=True)

    def start(self) -> None:
        """Begin to wait for the plan, and print it."""
        self._thread.start()

    def close(self) -> None:
        """End the process. No plan is printed after this."""
        self._closed.set()
        self.process.kill()
        self._thread.join()

    def _answer(self) -> tuple[Record, str]:
        """Wait for the plan. Returns the plan, and the reason why there is none; one of them is empty."""
        try:
            return self._connection.recv()
        except EOFError:
            self.process.join()
            return {}, f"its process ended with status {self.process.exitcode}"

    def _report(self) -> None:
        """Print the plan. If the run cannot fit, interrupt its main thread, which raises the refusal."""
        plan, reason = self._answer()
        if self._closed.is_set():
            return
        if reason:
            log_line(f"no plan: {reason}", error=True)
            return
        if plan["fits"]:
            for line in plan["lines"]:
                log_line(f"plan: {line}")
            return
        self.refusal = f"this run {plan['lines'][0]}; plan=false starts it all the same"
        interrupt()


def start_plan_process(config: TrainConfig, *, forked: bool = False) -> PlanProcess:
    """Start the planner's process.

    `forked`: whether the process is a fork of the data workers' server, which imports torch first; the fork waits for
    that. Otherwise the process imports torch itself.
    """
    context: Any = multiprocessing.get_context("forkserver" if forked else "spawn")
    connection, planner_end = context.Pipe(duplex=False)
    process = context.Process(target=send_plan, args=(planner_end, config), daemon=True)
    with nullcontext() if forked else blocked():  # in the server they are blocked already
        process.start()
    planner_end.close()
    return PlanProcess(process, connection)


@contextmanager
def planned(plan_process: PlanProcess) -> Iterator[None]:
    """Around a run: prints its plan when it is ready, and ends the process at the run's end.

    If the run cannot fit, the body is interrupted, and UserError is raised in the main thread.
    """
    plan_process.start()
    try:
        with interruptible():
            try:
                yield
            finally:
                plan_process.close()  # a refusal that comes at the run's very end raises KeyboardInterrupt here
    except (KeyboardInterrupt, StoppedError):
        if plan_process.refusal:
            raise UserError(plan_process.refusal) from None
        raise
