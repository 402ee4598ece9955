"""Starts the workers of a run with torch's elastic launcher and returns their result, or the failure that came first.

Imports torch only when a run starts.
"""

import logging
import math
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NoReturn

import psutil

from clipscale.common import terminal
from clipscale.common.errors import LOST, LostRankError, StoppedError, UserError
from clipscale.common.files import read_json
from clipscale.common.hardware import cores
from clipscale.common.units import unused
from clipscale.config import checks
from clipscale.config.redact import redact, redacted_output
from clipscale.config.tools import EmbedConfig, EvalRunConfig
from clipscale.config.train import TrainConfig, warnings
from clipscale.launch import agent, heartbeat
from clipscale.launch.affinity import bound
from clipscale.launch.processes import as_launcher, end_with_launcher
from clipscale.launch.restarts import WorkerError, go_on, group_size, restarted, spare

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

Launched = TrainConfig | EvalRunConfig | EmbedConfig
TRAIN = "clipscale.train:train"
"""What the workers of a training run call."""
MARGIN_S = 30
"""After a signal, the launcher kills workers that have not ended so long after `launch.grace_s`: a save may take longer than it should."""
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Seconds that torch's agent gives workers to end after a signal; torch 2.11 always gives 30."""
AGAIN_S, ALONE_S = 1.0, 3.0
"""A second Ctrl-C within the first time is the same one. After a second one, workers have the other time to end by themselves."""
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


class Interrupted(KeyboardInterrupt):
    """A signal stopped the launcher. The workers have saved and ended."""

    def __init__(self, signum: int, run: str = "") -> None:
        """`run`: the run that can go on."""
        remedy = f"; go on with run={run} resume=auto" if run else ""
        super().__init__(f"stopped by {signal.Signals(signum).name}{remedy}")
        self.signum = signum


def make_ready(config: TrainConfig, *, named: bool) -> None:
    """The checks of a configuration that look at this machine, and a default name that no other run has, for all ranks.

    `named`: whether the user has named the run. Raises UserError.
    """
    if not under_torchrun():  # there all ranks find it out together
        from clipscale.data.shards import listing

        listing.check_local(config.data)
        if config.resume not in ("auto", "none") and not Path(config.resume).expanduser().exists():
            raise UserError(f"resume={config.resume}: there is no such file or run folder")
    if not named:
        again, shared = requeued_run(), under_torchrun()
        config.run = agent.shared_name(again or config.run) if shared else again or claimed(config.run)
    if os.environ.get("RANK", "0") == "0":
        for warning in warnings(config):
            terminal.say(f"warning: {warning}", error=True)


def claimed(name: str) -> str:
    """The default name of a run, whose folder is made here: of two runs that start in the same second, one gets another name."""
    from clipscale.launch import run_lock

    while True:
        folder = unused(Path(name))
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError:
            return name  # `make_folder` names the reason
        (folder / run_lock.FILE).touch()
        return str(folder)


def requeued_run(runs: Path = Path("runs")) -> str | None:
    """The newest run that this Slurm job has begun before it was requeued; None if it runs for the first time."""
    job = os.environ.get("SLURM_JOB_ID")
    if not job or os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        return None
    found = []
    for file in runs.glob("*/env.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):  # a damaged one
            if read_json(file)["variables"]["SLURM_JOB_ID"] == job:
                found.append((file.stat().st_mtime, str(file.parent)))
    return max(found)[1] if found else None


def gpus() -> int:
    """Visible GPUs."""
    import torch

    return torch.cuda.device_count()


def under_torchrun() -> bool:
    """Whether torchrun, or a scheduler that sets the same variables, has started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def join(config: Launched, main: str = TRAIN) -> dict[str, Any]:
    """This process's part of a run that torchrun has started. A failure is recorded for torchrun's report."""
    from torch.distributed.elastic.multiprocessing.errors import record

    agent.begin()
    if isinstance(config, TrainConfig):
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            go_on(config)
        if spare(config.batch):
            agent.wait_for_end()
            return {}
    try:
        result = record(work)(config, main)
        agent.end(0)
    except BaseException as error:
        file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
        if file.is_file():
            file.write_text(redact(file.read_text()))  # torchrun prints it
        if isinstance(error, StoppedError):
            agent.end(error.number)
        elif isinstance(error, LostRankError):
            if error.first:
                terminal.say(redact(terminal.message(f"error: {error}")), error=True)
            leave()
        raise
    assert result is not None  # record raises every error, unless it is asked to swallow them
    return result


def workers(config: Launched) -> int:
    """Processes of the run on this machine. Raises UserError if they cannot share a training batch evenly."""
    count = config.launch.procs or (1 if config.device == "cpu" else max(1, gpus()))
    if isinstance(config, TrainConfig):
        checks.shared(
            config.batch, count, f"{count} processes (one per GPU)", ", or fewer processes with launch.procs=N"
        )
    return count


def run(config: Launched, main: str = TRAIN, *, isolated: bool = False) -> dict[str, Any]:
    """Call `main` in this process or in several workers. With `isolated` or restarts, a single worker gets a process of its own too.

    Returns its result on rank 0. Raises UserError if a worker does, WorkerError for other failures, Interrupted for a signal.
    No worker outlives this call. If this process is killed, the kernel kills its workers.
    """
    count = workers(config)
    if isinstance(config, TrainConfig) and config.launch.restarts:
        return restarted(config, lambda now: start(now, main, remaining(now, count)))
    return start(config, main, count) if count > 1 or isolated else work(config, main)


def remaining(config: TrainConfig, count: int) -> int:
    """The processes of a restart: `count`, or fewer where GPUs are gone, as many as share the batch evenly."""
    if config.device == "cpu" or not (found := gpus()) or found >= count:
        return count
    smaller = group_size(config.batch, found)
    terminal.say(f"{found} of {count} GPUs are left: the run goes on with {smaller} processes", error=True)
    return smaller


def start(config: Launched, main: str, count: int) -> dict[str, Any]:
    """One start of `count` workers, to their end. Raises as `run` does."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    threads = config.launch.threads or max(1, cores() // count)
    end_s = MARGIN_S + (math.ceil(config.launch.grace_s) if isinstance(config, TrainConfig) else 0)
    variables = {SHUTDOWN: os.environ.get(SHUTDOWN, str(end_s)), "OMP_NUM_THREADS": str(threads)} | as_launcher()
    with (
        tempfile.TemporaryDirectory(prefix="clipscale-") as folder,
        _quiet(variables | private(folder), folder),
        _interruptible(),
    ):
        elastic = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{folder}/agent",
            rdzv_configs={"store_type": "file"},
            local_addr="localhost",
            max_restarts=0,
            start_method="spawn",
            signals_to_handle=",".join(number.name for number in HANDLED if number != signal.SIGINT),
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            results: dict[int, dict[str, Any]] = elastic_launch(elastic, worker)(config, main)
            return results[0]
        except ChildFailedError as error:
            raise first_failure(error, Path(config.run) if main == TRAIN else None) from None
        except SignalException as error:
            number = signal.SIGTERM if error.sigval == signal.SIGUSR1 else error.sigval  # as in a worker
            raise Interrupted(number, config.run if main == TRAIN else "") from None


def private(folder: str) -> dict[str, str]:
    """Variables by which processes of this machine meet in a folder of the user, and listen on loopback alone.

    A store of torch's on TCP listens on all interfaces, and gives whoever connects the rights of the user.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    interfaces = {name: os.environ.get(name, loopback) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    return {"CLIPSCALE_STORE": f"{folder}/group", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **interfaces}


def leave() -> NoReturn:
    """End this process now: Python would wait for threads that write a checkpoint, and these for the lost rank."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def worker(config: Launched, main: str = TRAIN) -> dict[str, Any]:
    """The main function of a process that `start` starts. The launcher reads why it failed from a file."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    end_with_launcher()
    try:
        return work(config, main)
    except LostRankError as error:
        get_error_handler().record_exception(error)
        leave()


def work(config: Launched, main: str = TRAIN) -> dict[str, Any]:
    """One worker's part."""
    terminal.prepare()
    with redacted_output(), bound(config.launch.bind, config.device):
        result: dict[str, Any] = resolve_name(main)(config)
        return result


def first_failure(error: "ChildFailedError", run: Path | None = None) -> UserError | WorkerError:
    """The first failure as an exception, without secrets. A worker's UserError comes back as a UserError.

    `run`: the folder of the ranks' heartbeats.
    """
    rank, failure = min(error.failures.items(), key=lambda item: (_follows(item[1].message), item[1].timestamp))
    message, details = failure.message, ""
    if isinstance(message, dict):
        details = redact(message["extraInfo"]["py_callstack"])
        message = redact(message["message"])
        for kind in (UserError, StoppedError):
            if message.startswith(f"{kind.__name__}: "):
                return kind(message.removeprefix(f"{kind.__name__}: "))
        if message.startswith(f"{LostRankError.__name__}: "):
            line = message.removeprefix(f"{LostRankError.__name__}: ")
            where, mistake, what = line.partition(f": {UserError.__name__}: ")  # of a rank on another machine
            return UserError(f"{where}: {what}") if mistake else WorkerError(line)
    elif failure.exitcode < 0:
        name = failure.signal_name()
        hint = "; the machine may be out of memory" if name == "SIGKILL" else ""
        message = f"killed by {name}{heartbeat.where(run, rank)}{hint}"
    else:
        message = f"ended with status {failure.exitcode}{heartbeat.where(run, rank)}"
    return WorkerError(f"worker {rank} failed: {message.strip().splitlines()[0]}", details)


def _follows(message: str | dict[str, Any]) -> bool:
    """Whether a rank failed because it has lost another one. Times are in whole seconds, and do not show which failed first."""
    text = message["message"] if isinstance(message, dict) else message
    return any(sign in text for sign in LOST)


@contextmanager
def _quiet(variables: dict[str, str], folder: str) -> Iterator[None]:
    """Runs the launcher without its log lines and with the workers' variables; restores these and our signal handlers afterwards.

    Temporary files lie in `folder`: torch leaves some with its workers' tracebacks, which can hold secrets.
    """
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    before, temporary = {name: os.environ.get(name) for name in variables}, tempfile.tempdir
    tempfile.tempdir = folder
    os.environ.update(variables)
    try:
        yield
    finally:
        tempfile.tempdir = temporary
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for name, value in before.items():
            del os.environ[name]
            os.environ |= {} if value is None else {name: value}


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends the workers as other signals do. A later one kills those that wait for a hanging rank, and cannot react to it."""
    from torch.distributed.elastic.multiprocessing import SignalException

    first, killer = 0.0, threading.Timer(ALONE_S, kill_children)

    def interrupt(number: int, _: object) -> None:
        nonlocal first
        now = time.monotonic()
        if not first:
            first = now
            raise SignalException("stopped", sigval=signal.Signals(number))
        if now - first > AGAIN_S and killer.ident is None:
            killer.start()

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        killer.cancel()


def kill_children() -> None:
    """End every process that this one has started."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()
