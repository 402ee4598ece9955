"""Starts a run's workers with torchrun's elastic launcher; returns their result, or raises the first failure.

Imports torch only when a run starts.
"""

import logging
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from clipscale.common import ranks, terminal
from clipscale.common.cpu import cores
from clipscale.common.errors import StoppedError, UserError
from clipscale.common.signals import SIGNALS, blocked, set_signal_of_parents_end
from clipscale.config.checks import check_divisible
from clipscale.config.sections import LaunchConfig
from clipscale.config.train_config import TrainConfig
from clipscale.launch.failures import cause_of_end, first_failure
from clipscale.launch.workers import WorkerTask, worker_main
from clipscale.run.stopping import (
    SHUTDOWN_S,
    effective_signal,
    exit_on_signal,
    stop_message,
)

if TYPE_CHECKING:
    from torch.numa.binding import NumaOptions


class LaunchSettings(Protocol):
    """The settings that every verb with several processes has."""

    @property
    def device(self) -> str: ...

    @property
    def launch(self) -> LaunchConfig: ...


# The settings of a verb, and the result of its work.
S = TypeVar("S", bound=LaunchSettings)
R = TypeVar("R")

# Signals that the launcher forwards to its workers.
FORWARDED_SIGNALS = (*SIGNALS, signal.SIGQUIT)
# Folders of the GPUs. In each, `numa_node` is the number of the nearest cores and memory; -1: unknown.
GPUS = Path("/sys/bus/pci/drivers/nvidia")


def no_preparation(config: object) -> None:
    """For a `main` that can be called at once."""


def launch(
    config: S,
    main: Callable[[S], R],
    *,
    prepare: Callable[[S], object] = no_preparation,
    check_plan: Callable[[], None] | None = None,
    isolated: bool = False,
    stop_suffix: str = "",
) -> R:
    """Call `main` in several workers. Under torchrun, or if one worker that is not `isolated` suffices, call it here.

    `prepare` imports what `main` needs; each process calls it first. Both are functions of a module, so that they can
    be pickled.

    `check_plan` waits for the plan of a run, and raises UserError if the run cannot fit. In this process it is called
    between `prepare` and `main`. Several workers do not wait: rank 0 calls it in a thread, and they are ended if it
    raises.

    `stop_suffix` ends the line about a signal that comes while `main` has no handlers of its own.

    Returns the result of `main` on rank 0. Raises UserError if a worker does, WorkerError for other failures,
    StoppedError for a signal. No worker outlives this call.
    """
    ranks.check_variables()
    with exit_on_signal(stop_suffix):
        if ranks.under_launcher():
            return run_under_torchrun(config, main, prepare)
        terminal.show_task("loading torch")
        count = num_processes(config)
        if count == 1 and not isolated:
            prepare(config)
            if check_plan:
                check_plan()
            return main(config)
    # torch has signal handlers of its own
    return launch_workers(count, config, WorkerTask(main, prepare, check_plan, stop_suffix))


def num_processes(config: LaunchSettings) -> int:
    """Processes of the run on this machine. Raises UserError if they cannot share a training batch evenly."""
    import torch

    count = config.launch.procs
    if not count:
        count = 1 if config.device == "cpu" else max(1, torch.cuda.device_count())
    if isinstance(config, TrainConfig):
        check_divisible(config.batch, count, f"{count} processes", ", or fewer processes with launch.procs=N")
    return count


def run_under_torchrun(config: S, main: Callable[[S], R], prepare: Callable[[S], object]) -> R:
    """Do this process's part of a run under torchrun. `record` writes a failure to a file, where torchrun finds it."""
    from torch.distributed.elastic.multiprocessing.errors import record

    if "TORCHELASTIC_RUN_ID" in os.environ:
        set_signal_of_parents_end(signal.SIGKILL)
    try:
        prepare(config)
        result = record(main)(config)
    except UserError as error:
        alone = "TORCHELASTIC_RUN_ID" not in os.environ
        if alone and not terminal.is_main_rank() and not isinstance(error, StoppedError):  # the caller prints rank 0's
            terminal.print_failure(f"rank {ranks.rank()}: {error}")
        raise
    assert result is not None  # record raises every error
    return result


def launch_workers(count: int, config: S, task: WorkerTask[S, R]) -> R:
    """Start `count` workers and wait for their end. Raises as `launch`."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig as ElasticConfig
    from torch.distributed.launcher.api import elastic_launch

    for name in [*logging.root.manager.loggerDict]:  # each of torch's modules has set its own level
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # the exceptions below are reported once, as one line
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_S))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // count)))
    # torch sets its own handlers, and would also set one for a signal that nohup ignores.
    handlers = {signum: signal.getsignal(signum) for signum in FORWARDED_SIGNALS}
    handlers = {signum: handler for signum, handler in handlers.items() if handler != signal.SIG_IGN}
    with tempfile.TemporaryDirectory() as folder:
        elastic = ElasticConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            signals_to_handle=",".join(signum.name for signum in handlers),
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            numa_options=numa_options(config.device, count),
        )
        with blocked():  # starts the resource tracker that the workers share
            pass
        terminal.show_task("starting 1 process" if count == 1 else f"starting {count} processes")
        before = tempfile.tempdir
        tempfile.tempdir = folder  # torch leaves its error files there
        try:
            result: R = elastic_launch(elastic, worker_main)(config, task, Path(folder))[0]
            return result
        except ChildFailedError as error:
            raise cause_of_end(error, Path(folder)) from None
        except SignalException as error:
            first = first_failure(Path(folder))
            if first and isinstance(first.error, UserError):  # stopped, or the last save failed
                raise first.error from None
            signum = effective_signal(error.sigval)
            raise StoppedError(stop_message(signum), signum) from None
        finally:
            tempfile.tempdir = before
            for handled, handler in handlers.items():
                signal.signal(handled, handler)


def numa_options(device: str, count: int) -> "NumaOptions | None":
    """Options that bind each worker to the cores near its GPU.

    None if all GPUs are near the same cores, if their cores are unknown, or without `numactl`, which torch needs.
    """
    import torch
    from torch.numa.binding import AffinityMode, NumaOptions

    near = {file.read_text().strip() for file in GPUS.glob("*/numa_node")}
    unknown = len(near) < 2 or "-1" in near or not shutil.which("numactl")
    if unknown or device == "cpu" or count > torch.cuda.device_count():
        return None
    return NumaOptions(AffinityMode.NODE, should_fall_back_if_binding_fails=True)
