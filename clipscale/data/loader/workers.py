"""The worker processes of one rank: their start and end, and their messages to the training process."""

import gc
import multiprocessing
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import Array, c_char
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from multiprocessing.util import Finalize

import torch

from clipscale.common.errors import LoaderError, UserError
from clipscale.common.output import prepare_output
from clipscale.common.signals import Poll, no_poll
from clipscale.data.hashing import utf8
from clipscale.data.loader.batch_filler import BatchFiller, Report, open_filler
from clipscale.data.loader.fork_server import warm_up
from clipscale.data.loader.host_batch import Arena
from clipscale.data.loader.shard_stream import WorkerSpec

# A wait for samples calls `poll` this often, in seconds.
POLL_S = 0.25
# Seconds in which workers may end by themselves. Then they are killed: they are in a long read or decode.
EXIT_S = 0.5
# A worker that has nothing to deliver reports this often, in seconds, that it is alive.
HEARTBEAT_S = 2.0
# Most bytes of the text that says what a worker reads.
STATUS_BYTES = 1024


class InProcessWorker:
    """Does a worker's work in the training process, while that waits for samples (data.workers=0)."""

    def __init__(self, filler: BatchFiller) -> None:
        self.filler = filler
        self._steps: deque[int] = deque()
        self._reports = self._work()

    def _work(self) -> Generator[Report, None, None]:
        while True:
            yield from self.filler.fill(self._steps.popleft())

    def fill(self, step: int) -> None:
        self._steps.append(step)

    def receive(self, needed: Sequence[int], poll: Poll = no_poll) -> list[tuple[int, Report]]:
        """Read until one more report, if workers are `needed`. Returns it.

        Calls `poll` between samples and while the storage is waited for. Raises what `poll` raises.
        """
        self.filler.set_poll(poll)
        return [(0, next(self._reports))] if needed else []

    def close(self) -> None:
        self._reports.close()
        self.filler.close()


def run_worker(connection: Connection, spec: WorkerSpec, arena: Arena, status: "Array[c_char]") -> None:
    """The main function of a worker process: fills the requested batches in order.

    Sends an error to the training process. Writes the shard or sample that it reads into `status`, which is shared
    memory.

    Ends when the training process closes the connection. Signals to the whole job do not end it.
    """
    prepare_output()
    gc.freeze()  # a collection would write to all objects shared with the server, and so copy their pages
    torch.set_num_threads(1)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tokenizers of transformers start a thread per core
    beat_at = time.monotonic()

    def send(message: Report) -> None:
        with _ended_if_lost():
            connection.send(message)

    def set_status(text: str) -> None:
        """Called before each shard and each sample."""
        status.value = utf8(text).encode()[: STATUS_BYTES - 1]

    def heartbeat() -> None:
        """Report that the worker is alive. Called between samples and while the storage is waited for."""
        nonlocal beat_at
        if time.monotonic() - beat_at > HEARTBEAT_S:
            beat_at = time.monotonic()
            send(filler.report())

    try:
        filler = open_filler(spec, arena, heartbeat, set_status)
        while True:
            with _ended_if_lost():
                step = connection.recv()
            for report in filler.fill(step):
                send(report)
    except Exception as error:
        failure = RuntimeError(f"in a data worker:\n{traceback.format_exc()}")
        with suppress(ConnectionError):
            connection.send(error if isinstance(error, UserError) else failure)


@contextmanager
def _ended_if_lost() -> Iterator[None]:
    """Context of a worker's use of its connection: ends the worker if the training process is gone."""
    try:
        yield
    except (EOFError, ConnectionError) as error:
        raise SystemExit from error


class Workers:
    """The worker processes of one rank, seen from the training process. The death of one ends the run.

    `start_workers` starts them. A worker and this process exchange messages:

        fill(step)         -> the worker fills its rows of that batch, after those requested before
        receive()         <-  reports of filled rows; the last one of a batch has the positions of its streams
        a failure         <-  an exception, or the end of the connection; raised after all earlier reports
        silence           <-  no message for `timeout_s` while the worker is needed; raised
    """

    def __init__(self, rank: int, timeout_s: float) -> None:
        """`timeout_s`: longest silence of a worker while its samples are waited for."""
        self._rank = rank
        self.timeout_s = timeout_s
        self._connections: list[Connection] = []
        # The shard or sample that each worker reads, in shared memory.
        self._statuses: list[Array[c_char]] = []
        # The time of each worker's last message.
        self._heard_at: list[float] = []
        self._failure: Exception | None = None
        self.processes: list[BaseProcess] = []
        # Ends the processes, also if the program ends without `close`. It has to run before multiprocessing's own exit
        # handler, which would wait for ever: that handler sends children a signal that is blocked in them.
        self.close = Finalize(self, _end, (self._connections, self.processes), exitpriority=10)

    def start(self, spec: WorkerSpec, arena: Arena) -> None:
        """Start one more worker."""
        context = multiprocessing.get_context("forkserver")
        connection, worker_end = context.Pipe()
        status = RawArray("c", STATUS_BYTES)
        name = f"data-worker-{len(self.processes)}"
        process = context.Process(target=run_worker, args=(worker_end, spec, arena, status), name=name, daemon=True)
        process.start()
        worker_end.close()
        self._connections.append(connection)
        self._statuses.append(status)
        self.processes.append(process)
        self._heard_at.append(time.monotonic())

    def fill(self, step: int) -> None:
        """Let every worker fill its part of batch `step`."""
        for connection in self._connections:
            with suppress(ConnectionError):  # the worker has died: `receive` reports that
                connection.send(step)

    def receive(self, needed: Sequence[int], poll: Poll = no_poll) -> list[tuple[int, Report]]:
        """All messages that have arrived, with their workers' numbers. Waits for one if workers are `needed`, and calls
        `poll` every POLL_S.

        Raises UserError if a worker has died, or if one of `needed` is silent for the time-out. Also raises what a
        worker has sent as its failure, and what `poll` raises. Messages that came before a failure are returned first,
        since a save needs their positions; the next call raises.
        """
        begun = time.monotonic()
        while True:
            messages = []
            for worker in range(len(self._connections)):
                messages += [(worker, message) for message in self._drain(worker)]
            if self._failure and not messages:
                raise self._failure
            if messages or not needed:
                return messages
            remaining_s = self._check_silence(needed, begun)
            poll()
            wait(self._connections, timeout=min(remaining_s, POLL_S))

    def _check_silence(self, needed: Sequence[int], begun: float) -> float:
        """The seconds until the first of the `needed` workers is late. Raises LoaderError if one is late already.

        Its silence counts from `begun` on, when the wait began.
        """
        silent_s = {worker: time.monotonic() - max(self._heard_at[worker], begun) for worker in needed}
        longest = max(silent_s, key=silent_s.__getitem__)
        remaining_s = self.timeout_s - silent_s[longest]
        if remaining_s < 0:
            raise LoaderError(
                f"data.timeout_s={self.timeout_s:g}: {self._name(longest)} has been silent for that long"
                f"{self._status(longest)}; the storage may be stuck; raise the time-out or look at the process"
            )
        return remaining_s

    def _drain(self, number: int) -> Iterator[Report]:
        """Yield the messages of a worker that have arrived. Sets `_failure` if the worker has failed or died."""
        connection = self._connections[number]
        while True:
            try:
                if not connection.poll():
                    return
                message = connection.recv()
            except (EOFError, OSError):  # the worker has died; OSError: while it sent a message
                self._failure = self._failure or self._death(number)
                return
            self._heard_at[number] = time.monotonic()
            if isinstance(message, Exception):
                self._failure = message
                return
            yield message

    def _name(self, number: int) -> str:
        return f"data worker {number} (process {self.processes[number].pid}) of rank {self._rank}"

    def _status(self, number: int) -> str:
        """The shard or sample that a worker has read last."""
        return bytes(self._statuses[number].value).decode(errors="replace")

    def _death(self, number: int) -> LoaderError:
        process = self.processes[number]
        process.join(5)
        code = process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return LoaderError(
            f"{self._name(number)} {how}{self._status(number)}; if the machine "
            "ran out of memory, lower data.workers, data.shard_streams or data.shuffle; continue with resume=auto"
        )


def start_workers(specs: Sequence[WorkerSpec], arena: Arena, timeout_s: float) -> Workers:
    """Start a worker process for each of the specs, which are one rank's. `timeout_s`: see `Workers`."""
    warm_up()
    workers = Workers(specs[0].share.rank, timeout_s)
    for spec in specs:
        workers.start(spec, arena)
    return workers


def _end(connections: Sequence[Connection], processes: Sequence[BaseProcess]) -> None:
    for connection in connections:
        connection.close()
    until = time.monotonic() + EXIT_S
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
        if process.exitcode is None:
            process.kill()
            process.join()
