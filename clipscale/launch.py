"""From a composed configuration to running workers: checked once, carried to every worker by torch's own elastic launcher, and their
result, or the failure that came first, brought back.
"""

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig as ElasticConfig
from torch.distributed.launcher.api import elastic_launch

from clipscale.config import checks
from clipscale.config.train import TrainConfig, warnings
from clipscale.errors import StoppedError, UserError
from clipscale.hardware import cores

GRACE_S = 300
"""Seconds that workers get to end their step and save when the launcher is told to stop; torch 2.11 gives them 30, whatever it is told."""
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class WorkerError(Exception):
    """A worker died of something that is not the user's mistake. The message is one line; `details` is its traceback."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class Interrupted(KeyboardInterrupt):
    """The launcher was told to stop by a signal; the workers have saved what they could and are gone."""

    def __init__(self, signum: int, run: str) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}; go on with run={run} resume=auto")
        self.signum = signum


def make_ready(config: TrainConfig, *, named: bool) -> None:
    """The last checks of a checked configuration, which need torch; and under torchrun, one default name for all ranks.

    named: the user has named the run. Raises UserError.
    """
    if under_torchrun() and not named:
        config.run = shared(config.run)
    if config.data.on_device and (config.device == "cpu" or not torch.cuda.is_available()):
        raise UserError("data.decode=gpu needs a GPU, and this run has none; take data.decode=fast, or exact")
    if os.environ.get("RANK", "0") == "0":
        for warning in warnings(config):
            print(f"warning: {warning}", file=sys.stderr)


def under_torchrun() -> bool:
    """Whether something else (torchrun, or a scheduler that sets the same variables) has started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def shared(name: str) -> str:
    """The first rank's default name on every rank, also after torchrun restarts them: clocks differ, the store's value does not."""
    store, rank, _ = next(torch.distributed.rendezvous("env://"))
    if rank == 0:
        store.compare_set("clipscale/run", "", name)
    store.wait(["clipscale/run"])
    return store.get("clipscale/run").decode()


def join(config: TrainConfig) -> dict[str, Any]:
    """This process's part of a run that torchrun has started; a failure is left where torchrun looks for it."""
    result = record(work)(config)
    assert result is not None  # None is record's answer to an error it was told to swallow, which it was not
    return result


def workers(config: TrainConfig) -> int:
    """How many processes the run takes on this machine. Raises UserError where the batch cannot be shared among them."""
    count = config.launch.procs
    if count is None:
        count = 1 if config.device == "cpu" else max(1, torch.cuda.device_count())
    checks.shared(config.batch, count, f"{count} processes (one per GPU)", ", or fewer processes with launch.procs=N")
    return count


def run(config: TrainConfig, *, isolated: bool = False) -> dict[str, Any]:
    """Train in this process, or in several workers; `isolated`: in a process of its own even if there is only one.

    Returns what `train` returns on rank 0. Raises UserError as the workers do, WorkerError for their other failures, Interrupted for
    a signal. No worker outlives this call; should this process be killed outright, the kernel interrupts its workers.
    """
    count = workers(config)
    if count == 1 and not isolated:
        return work(config)
    if multiprocessing.get_start_method(allow_none=True) not in (None, *multiprocessing.get_all_start_methods()):
        multiprocessing.set_start_method("spawn", force=True)  # a Hydra launcher's own method is unknown to our workers
    threads = config.launch.threads or max(1, cores() // count)
    with tempfile.TemporaryDirectory(prefix="clipscale-") as folder, _quiet(threads):
        elastic = ElasticConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            results: dict[int, dict[str, Any]] = elastic_launch(elastic, work)(config)
            return results[0]
        except ChildFailedError as error:
            raise first_failure(error) from None
        except SignalException as error:
            raise Interrupted(error.sigval, config.run) from None


def work(config: TrainConfig) -> dict[str, Any]:
    """One worker's part."""
    from clipscale.train import train

    return train(config)


def first_failure(error: ChildFailedError) -> UserError | WorkerError:
    """The failure that came first, as the exception to show: a worker's UserError is shown as if it had been raised here."""
    rank, failure = error.get_first_failure()
    message, details = failure.message, ""
    if isinstance(message, dict):
        details = message["extraInfo"]["py_callstack"]
        message = message["message"]
        for kind in (UserError, StoppedError):
            if message.startswith(f"{kind.__name__}: "):
                return kind(message.removeprefix(f"{kind.__name__}: "))
    elif failure.exitcode < 0:
        name = failure.signal_name()
        hint = "; the machine may be out of memory" if name == "SIGKILL" else ""
        message = f"killed by {name}{hint}"
    else:
        message = f"ended with status {failure.exitcode}"
    return WorkerError(f"worker {rank} failed: {message.strip().splitlines()[0]}", details)


@contextmanager
def _quiet(threads: int) -> Iterator[None]:
    """The launcher without its own log lines, with the workers' variables set and our signal handlers back afterwards."""
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.multiprocessing")]
    levels = [logger.level for logger in loggers]
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    grace = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE_S))
    variables = {"OMP_NUM_THREADS": str(threads), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": grace}
    before = {name: os.environ.get(name) for name in variables}
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    os.environ.update(variables)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
