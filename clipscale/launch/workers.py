"""What a process that `local.py` starts does: it prepares, works, and writes its failure to a file."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from clipscale.common import ranks, terminal
from clipscale.common.errors import UserError
from clipscale.common.output import ignore_output_errors, prepare_output
from clipscale.common.signals import set_signal_of_parents_end
from clipscale.launch.failures import write_failure
from clipscale.run.stopping import exit_on_signal, has_received_signal

S = TypeVar("S")
R = TypeVar("R")

# A worker that returns after a signal waits this many seconds for its launcher.
ANSWER_WITHIN_S = 5.0


@dataclass(frozen=True)
class WorkerTask(Generic[S, R]):
    """What each worker calls. The fields are as the arguments of `launch` in `local.py`."""

    main: Callable[[S], R]
    prepare: Callable[[S], object]
    check_plan: Callable[[], None] | None
    stop_suffix: str


def worker_main(config: S, task: WorkerTask[S, R], folder: Path) -> R:
    """The main function of a process that `launch_workers` starts. It writes its failure to the folder."""
    set_signal_of_parents_end(signal.SIGKILL)
    prepare_output()
    ignore_output_errors()
    terminal.show_task("loading torch")
    if task.check_plan and ranks.rank() == 0:
        threading.Thread(target=exit_if_plan_refuses, args=(task.check_plan, folder), daemon=True).start()
    try:
        with exit_on_signal(task.stop_suffix):
            task.prepare(config)
            result = task.main(config)
    except BaseException as error:
        write_failure(folder, ranks.rank(), error)
        raise
    if has_received_signal():
        exit_after_timeout()
    return result


def exit_if_plan_refuses(check_plan: Callable[[], None], folder: Path) -> None:
    """Wait for the plan of the run, and end this process if the run cannot fit. The launcher then ends the others.

    Runs in a thread, so that the workers' first step does not wait: they are ready about as soon as the plan is.
    """
    try:
        check_plan()
    except UserError as error:
        write_failure(folder, ranks.rank(), error)
        os._exit(2)


def exit_after_timeout() -> None:
    """End this process in ANSWER_WITHIN_S, unless its launcher ends it before.

    A worker that has returned waits for the launcher to take its result. After a signal torch's launcher takes none: it
    waits for the worker's end, and kills it after SHUTDOWN_S.
    """
    sys.stdout.flush()
    end = threading.Timer(ANSWER_WITHIN_S, os._exit, [0])
    end.daemon = True
    end.start()
