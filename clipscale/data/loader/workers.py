"""The loader processes of one rank: starting them, telling them which batch to fill, hearing how far they are, and what went wrong."""

import logging
import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from typing import Any

import torch

from clipscale.data.loader.host_batch import Arena
from clipscale.data.loader.shard_stream import Plan, Producer
from clipscale.errors import UserError

log = logging.getLogger(__name__)

ALIVE_S = 2.0
"""A worker that reads but finds nothing to deliver says so at most this often."""


def warm_up(*modules: str) -> None:
    """Start the process from which workers are forked, and let it import what they need. Returns at once; a second call does nothing.

    A fork of the training process itself would copy CUDA's and the process group's threads in mid-step.
    """
    multiprocessing.set_forkserver_preload(["__main__", "clipscale.data.loader.workers", *modules])
    forkserver.ensure_running()


@dataclass
class Report:
    """What a worker says: `done` of its places of batch `step` are filled; `positions` come with the last of them."""

    step: int
    done: int
    broken: dict[str, int] = field(default_factory=dict)
    positions: dict[int, tuple[int, int]] | None = None


@dataclass(frozen=True)
class Fill:
    """The word to fill batch `step`, of so many samples over all ranks."""

    step: int
    batch: int


@dataclass(frozen=True)
class Load:
    """The word to make image rows start..stop of a slot ready, in a buffer of the window from row `at` on."""

    ticket: int
    slot: int
    start: int
    stop: int
    buffer: int
    at: int


@dataclass(frozen=True)
class Loaded:
    """What a worker says after it."""

    ticket: int


def reports(producer: Producer, arena: Arena, step: int, batch: int) -> Iterator[Report]:
    """Fill this producer's places of batch `step`, reporting after every piece."""
    for done in producer.fill(arena.slots[step % len(arena.slots)], batch):
        yield Report(step, done, _drained(producer))
    yield Report(step, -1, _drained(producer), producer.positions())


def _drained(producer: Producer) -> dict[str, int]:
    broken = dict(producer.broken)
    producer.broken.clear()
    return broken


class GoneError(Exception):
    """The training process has closed the stream or is no more."""


@contextmanager
def _line() -> Iterator[None]:
    """Around what a worker says and hears: only there do these errors mean that the other side is gone."""
    try:
        yield
    except (EOFError, ConnectionError) as error:
        raise GoneError from error


class Worker:
    """A worker's life: fill the batches that it is told to, in their order. Image rows that a pass waits for come before all else."""

    def __init__(self, connection: Connection, plan: Plan, arena: Arena) -> None:
        self._connection, self._arena = connection, arena
        self._fills: deque[Fill] = deque()
        self._last = time.monotonic()
        self._producer = Producer(plan, arena, self._tick)

    def run(self) -> None:
        """Work until the other side closes, which raises GoneError."""
        while True:
            while not self._fills:
                self._hear()
            fill = self._fills.popleft()
            for report in reports(self._producer, self._arena, fill.step, fill.batch):
                self._say(report)

    def _say(self, message: Report | Loaded) -> None:
        with _line():
            self._connection.send(message)

    def _hear(self) -> None:
        with _line():
            message = self._connection.recv()
        if isinstance(message, Fill):
            self._fills.append(message)
            return
        out = self._arena.window[message.buffer, message.at : message.at + message.stop - message.start]
        self._producer.tier.load(self._arena.slots[message.slot], message.start, out)
        self._say(Loaded(message.ticket))

    def _tick(self) -> None:
        while self._heard():
            self._hear()
        now = time.monotonic()
        if now - self._last > ALIVE_S:
            self._last = now
            self._say(Report(-1, 0, _drained(self._producer)))

    def _heard(self) -> bool:
        with _line():
            return self._connection.poll()


def work(connection: Connection, plan: Plan, arena: Arena) -> None:
    """What a worker process runs; what goes wrong in it is sent to the training process."""
    # Ctrl-C, and a scheduler's warning to all processes of a job, are for the training process, which closes the connection at its end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    warnings.filterwarnings(
        "ignore", module=r"PIL\."
    )  # damaged pictures are counted, sizes are judged by data.max_pixels
    torch.set_num_threads(1)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # those of transformers would start a thread a core, too
    try:
        try:
            Worker(connection, plan, arena).run()
        except GoneError:
            raise
        except UserError as error:
            with _line():
                connection.send(str(error))
        except Exception:
            with _line():
                connection.send(RuntimeError(f"a data worker failed:\n{traceback.format_exc()}"))
    except GoneError:
        return


class Workers:
    """The worker processes of one rank."""

    def __init__(self, plans: Sequence[Plan], arena: Arena, rank: int, timeout_s: float) -> None:
        self._rank, self._timeout_s = rank, timeout_s
        warm_up(type(plans[0].tokenizer).__module__)
        context = multiprocessing.get_context("forkserver")
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        # also when the program ends without `close`, before multiprocessing ends its children by the signal that they ignore, and waits
        self.close = Finalize(self, _end, (self._connections, self._processes), exitpriority=10)
        """End the processes."""
        for number, plan in enumerate(plans):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=work, args=(theirs, plan, arena), name=f"data-worker-{number}", daemon=True
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self._heard = [time.monotonic()] * len(plans)

    def __len__(self) -> int:
        return len(self._processes)

    def fill(self, fill: Fill) -> None:
        """Let every worker fill its part of a batch."""
        for number in range(len(self)):
            self._send(number, fill)

    def load(self, ticket: int, slot: int, start: int, stop: int, buffer: int) -> None:
        """Let the workers make image rows ready, each a stretch of them."""
        bounds = [start + (stop - start) * number // len(self) for number in range(len(self) + 1)]
        for number in range(len(self)):
            first, last = bounds[number : number + 2]
            self._send(number, Load(ticket, slot, first, last, buffer, first - start))

    def _send(self, number: int, message: Fill | Load) -> None:
        try:
            self._connections[number].send(message)
        except ConnectionError as error:
            self._raise_death(number, error)

    def receive(self, needed: Sequence[int]) -> list[tuple[int, Report | Loaded]]:
        """Block until some worker has reported; the reports with their workers' numbers.

        Raises UserError when a worker cannot go on, has died, or one of `needed` has been silent for the time-out.
        """
        begun = time.monotonic()
        while True:
            # only a worker that we wait for can be late, and only since we have been waiting
            deadline = min(max(self._heard[number], begun) for number in needed) + self._timeout_s
            ready = wait(self._connections, timeout=max(0.0, min(deadline - time.monotonic(), 1.0)))
            received = []
            for number, connection in enumerate(self._connections):
                if connection in ready:
                    received += [(number, report) for report in self._drain(number, connection)]
            if received:
                return received
            late = [n for n in needed if time.monotonic() - max(self._heard[n], begun) > self._timeout_s]
            if late:
                names = ", ".join(f"{n} (process {self._processes[n].pid})" for n in late)
                raise UserError(
                    f"data.timeout_s={self._timeout_s:g}: data worker {names} of rank {self._rank} has been silent for that long; "
                    "the storage may be stuck; raise the time-out or look at the process"
                )

    def heard(self) -> list[tuple[int, Report | Loaded]]:
        """The reports that have come already, with their workers' numbers."""
        return [(n, report) for n, connection in enumerate(self._connections) for report in self._drain(n, connection)]

    def _drain(self, number: int, connection: Connection) -> Iterator[Report | Loaded]:
        try:
            while connection.poll():
                message = connection.recv()
                self._heard[number] = time.monotonic()
                if isinstance(message, str):
                    raise UserError(message)
                if isinstance(message, Exception):
                    raise message
                yield message
        except (EOFError, ConnectionError) as error:
            self._raise_death(number, error)

    def _raise_death(self, number: int, cause: Exception) -> None:
        process = self._processes[number]
        process.join(5)
        code = process.exitcode
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code is not None and code < 0
            else f"ended with status {code}"
        )
        raise UserError(
            f"data worker {number} (process {process.pid}) of rank {self._rank} {how}; if the machine ran out of memory, lower "
            "data.workers, data.shard_streams or data.shuffle"
        ) from cause


def _end(connections: Sequence[Connection], processes: Sequence[Any]) -> None:
    for connection in connections:
        connection.close()
    until = time.monotonic() + 2
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
        if process.exitcode is None:
            process.kill()  # in the midst of a long read or decode
            process.join()
