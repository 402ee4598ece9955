"""Plans a run in a process of its own, while the run's process imports what it needs.

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


def send_plan(connection: Connection, config: TrainConfig) -> None:
    """Send the plan and an empty text, or an empty plan and why there is none. Runs in the planner's process."""
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  libraries print; it stays open to the end
    try:
        from clipscale.tools.plan.start import start_plan

        outcome: tuple[Record, str] = start_plan(config), ""
    except Exception as error:
        prefix = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        outcome = {}, prefix + one_line(error)
    connection.send(outcome)


class PlanProcess:
    """The process that plans a run, and a thread that starts it and prints its plan."""

    def __init__(self, config: TrainConfig, *, forked: bool) -> None:
        """`forked`: whether the process is a fork of the data workers' server. Otherwise it imports torch itself."""
        # Why the run cannot fit.
        self.refusal = ""
        self._config = config
        self._forked = forked
        # None until it has started.
        self._process: BaseProcess | None = None
        self._closed = Event()
        self._thread = Thread(target=self._report, daemon=True)

    def start(self) -> None:
        """Begin to plan. Returns at once: a fork starts when its server has imported torch, and this process imports
        meanwhile."""
        self._thread.start()

    def wait(self) -> None:
        """Wait until the plan is printed, or the refusal has interrupted the main thread."""
        self._thread.join()

    def close(self) -> None:
        """End the process. No plan is printed after this."""
        self._closed.set()
        if self._process:
            self._process.kill()
            self._thread.join()

    def _answer(self) -> tuple[Record, str]:
        """Start the process and wait for its plan. Returns the plan, and the reason why there is none; one is empty."""
        try:
            process, connection = self._start_process()
        except (EOFError, OSError) as error:  # the server has ended
            return {}, f"its process does not start: {type(error).__name__} {one_line(error)}".rstrip()
        try:
            return connection.recv()
        except EOFError:
            process.join()
            return {}, f"its process ended with status {process.exitcode}"

    def _start_process(self) -> tuple[BaseProcess, Connection]:
        """Start the process. Returns it, and this process's end of the pipe to it."""
        context: Any = multiprocessing.get_context("forkserver" if self._forked else "spawn")
        connection, planner_end = context.Pipe(duplex=False)
        process = context.Process(target=send_plan, args=(planner_end, self._config), daemon=True)
        with nullcontext() if self._forked else blocked():  # in the server they are blocked already
            process.start()
        planner_end.close()
        self._process = process
        if self._closed.is_set():
            process.kill()
        return process, connection

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


@contextmanager
def planned(plan_process: PlanProcess) -> Iterator[None]:
    """Around a run: prints its plan when it is ready, and ends the planner's process at the run's end.

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
