"""Plans a run in a process of its own, while the run's process imports what it needs.

If the planner fails, for example because torch has moved its private modules, the run prints one line and goes on.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

from clipscale.common.errors import UserError, one_line
from clipscale.common.record import Record
from clipscale.common.signals import blocked
from clipscale.common.terminal import log_line
from clipscale.config.train_config import TrainConfig


@contextmanager
def planning(config: TrainConfig, *, forked: bool) -> Iterator[Callable[[], None]]:
    """Context of a run: plans it in a process of its own. Yields `check_plan` of this plan.

    Exactly one process may call it: this one, or a worker, which it is sent to.

    `forked`: whether the planner is a fork of the data workers' server. Otherwise it imports torch itself.
    """
    context: Any = multiprocessing.get_context("forkserver" if forked else "spawn")
    connection, planner_end = context.Pipe(duplex=False)
    process = context.Process(target=send_plan, args=(planner_end, config), daemon=True)

    def start() -> None:
        with planner_end, blocked(), suppress(EOFError, OSError):  # raised if the server has ended
            process.start()

    # A fork starts when its server has imported torch. This process imports meanwhile.
    Thread(target=start, daemon=True).start()
    try:
        yield partial(check_plan, connection)
    finally:
        connection.close()  # a planner that starts later fails when it sends
        if process.pid:
            process.kill()


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


def check_plan(connection: Connection) -> None:
    """Wait for the plan, and print it. Raises UserError if the run cannot fit."""
    try:
        plan, reason = connection.recv()
    except EOFError:
        plan, reason = {}, "its process has ended"
    if reason:
        log_line(f"no plan: {reason}", error=True)
        return
    if not plan["fits"]:
        raise UserError(f"this run {plan['lines'][0]}; plan=false starts it all the same")
    for line in plan["lines"]:
        log_line(f"plan: {line}")
