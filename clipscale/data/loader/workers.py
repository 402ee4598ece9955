"""The worker processes of one rank: how they start and end, and the messages between them and the training process."""

import logging
import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from typing import Any

import torch

from clipscale.common.errors import UserError
from clipscale.common.terminal import prepare
from clipscale.data.loader.host_batch import Arena
from clipscale.data.loader.shard_stream import BatchFiller, Fill, Report, WorkerSpec

log = logging.getLogger(__name__)

ALIVE_S = 2.0
"""A worker that reads but has nothing to deliver reports at most this often."""


@dataclass(frozen=True)
class Load:
    """Asks a worker to load rows start..stop of a slot to place `at` of the buffers. It sends this back when done."""

    slot: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class Restarted:
    """A worker has died. Another one does its work again, from its last complete batch on, with the same result."""


Message = Report | Load | Restarted


class InProcess:
    """Stands for one worker process, and does its work here when someone waits for it (data.workers=0)."""

    def __init__(self, spec: WorkerSpec, arena: Arena) -> None:
        self.filler = BatchFiller(spec, arena, lambda: None)
        self._arena = arena
        self._fills: deque[Fill] = deque()
        self._reports = self._work()

    def _work(self) -> Generator[Report, None, None]:
        while True:
            yield from self.filler.fill(self._fills.popleft())

    def fill(self, fill: Fill) -> None:
        self._fills.append(fill)

    def load(self, slot: int, start: int, stop: int, at: int) -> Callable[[], list[int]]:
        self.filler.backend.load(self._arena.slots[slot], start, self._arena.buffers[at : at + stop - start])
        return lambda: []

    def receive(self, needed: Sequence[int]) -> list[tuple[int, Report]]:
        return [(0, next(self._reports))] if needed else []

    def close(self) -> None:
        self._reports.close()
        self.filler.close()


class Worker:
    """A worker's answers to the training process while it fills batches. Loads come first: a pass waits for them."""

    def __init__(self, connection: Connection, spec: WorkerSpec, arena: Arena) -> None:
        self._connection, self._arena = connection, arena
        self.fills: deque[Fill] = deque()
        self.filler = BatchFiller(spec, arena, self._tick)
        self._last = time.monotonic()

    def send(self, message: Report | Load) -> None:
        with _ended_if_lost():
            self._connection.send(message)

    def handle_message(self) -> None:
        """Wait for a message: a batch to fill later, or rows to load now."""
        with _ended_if_lost():
            message = self._connection.recv()
        if isinstance(message, Fill):
            self.fills.append(message)
            return
        rows = self._arena.buffers[message.at : message.at + message.stop - message.start]
        self.filler.backend.load(self._arena.slots[message.slot], message.start, rows)
        self.send(message)

    def _tick(self) -> None:
        """Called between samples and while the storage is waited for."""
        while self._waiting():
            self.handle_message()
        now = time.monotonic()
        if now - self._last > ALIVE_S:
            self._last = now
            self.send(self.filler.report())

    def _waiting(self) -> bool:
        with _ended_if_lost():
            return self._connection.poll()


@contextmanager
def _ended_if_lost() -> Iterator[None]:
    """Around a worker's use of its connection: only there do these errors mean that the training process is gone."""
    try:
        yield
    except (EOFError, ConnectionError) as error:
        raise SystemExit from error


def work(connection: Connection, spec: WorkerSpec, arena: Arena) -> None:
    """A worker process: fills the requested batches in order. An error is sent to the training process."""
    # Ctrl-C, and a scheduler's warning to all processes of a job, are for the training process, which closes the
    # connection at its end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Damaged pictures are counted, and data.max_pixels judges sizes.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    prepare()
    torch.set_num_threads(1)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # those of transformers would start a thread a core, too
    try:
        worker = Worker(connection, spec, arena)
        while True:
            while not worker.fills:
                worker.handle_message()
            for report in worker.filler.fill(worker.fills.popleft()):
                worker.send(report)
    except Exception as error:
        failure = RuntimeError(f"a data worker failed:\n{traceback.format_exc()}")
        with suppress(ConnectionError):
            connection.send(str(error) if isinstance(error, UserError) else failure)


def warm_up(*modules: str) -> None:
    """Start the server that workers are forked from, with what they import. Returns at once; may be called again.

    A fork of the training process itself would copy CUDA's and the process group's threads in mid-step.
    """
    multiprocessing.set_forkserver_preload(["__main__", "clipscale.data.loader.workers", *modules])
    forkserver.ensure_running()


class Workers:
    """The worker processes of one rank, as the training process sees them.

    A worker that dies is replaced: the order of samples is exact, so another one starts where the last complete batch
    ended, and writes the same bytes into the same places. A second death in the same epoch ends the run.
    """

    def __init__(self, specs: Sequence[WorkerSpec], arena: Arena, timeout_s: float) -> None:
        self._specs, self._arena, self._timeout_s = list(specs), arena, timeout_s
        warm_up(type(getattr(specs[0].tokenizer, "inner", specs[0].tokenizer)).__module__)
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        # Also runs when the program ends without `close`, before multiprocessing sends its children the signal that
        # they ignore, and waits.
        self.close = Finalize(self, _end, (self._connections, self._processes), exitpriority=10)
        """End the processes."""
        self._asked: list[list[Fill | Load]] = [[] for _ in specs]  # what each worker has not done yet
        self._epochs: set[int] = set()  # those in which a worker has died
        self._last = [0.0] * len(specs)  # when each worker's last message came
        for number in range(len(specs)):
            self._start(number)

    def __len__(self) -> int:
        return len(self._processes)

    def _start(self, number: int) -> None:
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        arguments = (theirs, self._specs[number], self._arena)
        process = context.Process(target=work, args=arguments, name=f"data-worker-{number}", daemon=True)
        process.start()
        theirs.close()
        self._connections[number : number + 1] = [ours]
        self._processes[number : number + 1] = [process]
        self._last[number] = time.monotonic()

    def fill(self, fill: Fill) -> None:
        """Let every worker fill its part of a batch."""
        for number in range(len(self)):
            self._ask(number, fill)

    def load(self, slot: int, start: int, stop: int, at: int) -> Callable[[], list[int]]:
        """Let each worker load a part of rows start..stop. The function returned names those that have not done it."""
        bounds = pairwise(start + (stop - start) * number // len(self) for number in range(len(self) + 1))
        loads = [Load(slot, first, last, at + first - start) for first, last in bounds]
        for number, load in enumerate(loads):
            self._ask(number, load)
        return lambda: [number for number, load in enumerate(loads) if load in self._asked[number]]

    def _ask(self, number: int, message: Fill | Load) -> None:
        self._asked[number].append(message)
        with suppress(ConnectionError):  # it has died: whoever waits for it replaces it, and asks again
            self._connections[number].send(message)

    def receive(self, needed: Sequence[int]) -> list[tuple[int, Message]]:
        """All messages that are there, each with its worker's number. Blocks for one if workers are `needed`.

        Raises UserError when a worker cannot go on or has died again, or when one of `needed` has been silent for the
        time-out.
        """
        begun = time.monotonic()
        while True:
            connections = enumerate(self._connections)
            messages = [(n, message) for n, connection in connections for message in self._drain(n, connection)]
            if messages or not needed:
                return messages
            # Only a worker that is waited for can be late, and only since the wait began.
            silent = {n: time.monotonic() - max(self._last[n], begun) for n in needed}
            if late := [n for n, seconds in silent.items() if seconds > self._timeout_s]:
                names = ", ".join(f"{n} (process {self._processes[n].pid})" for n in late)
                raise UserError(
                    f"data.timeout_s={self._timeout_s:g}: data worker {names} of rank {self._specs[0].rank} has been "
                    "silent for that "
                    "long; the storage may be stuck; raise the time-out or look at the process"
                )
            wait(self._connections, timeout=min(self._timeout_s - max(silent.values()), 1.0))

    def _drain(self, number: int, connection: Connection) -> Iterator[Message]:
        while True:
            try:
                message = connection.recv() if connection.poll() else None
            except (EOFError, OSError) as error:  # OSError: it has died within a message
                self._replace(number, error)
                yield Restarted()
                return
            if message is None:
                return
            self._last[number] = time.monotonic()
            if isinstance(message, str):
                raise UserError(message)
            if isinstance(message, Exception):
                raise message
            # Keep what a worker in this one's place would have to do, and from where on.
            if isinstance(message, Load):
                self._asked[number].remove(message)
            elif message.positions is not None:
                fills = [asked for asked in self._asked[number] if isinstance(asked, Fill)]
                self._asked[number].remove(fills[0])  # it fills them in order
                self._specs[number] = replace(self._specs[number], streams=message.positions)
            yield message

    def _replace(self, number: int, cause: Exception) -> None:
        """Let another worker take the place of one that has died. Raises UserError for a second death in an epoch."""
        process, spec = self._processes[number], self._specs[number]
        process.join(5)
        code = process.exitcode
        killed = code is not None and code < 0
        how = f"was killed by {signal.Signals(-code).name}" if killed else f"ended with status {code}"
        who = f"data worker {number} (process {process.pid}) of rank {spec.rank}"
        remedy = "if the machine ran out of memory, lower data.workers, data.shard_streams or data.shuffle"
        epoch = max(place.epoch for place in spec.streams)
        if epoch in self._epochs:
            raise UserError(f"{who} {how}, the second death of a loader in epoch {epoch}; {remedy}") from cause
        self._epochs.add(epoch)
        log.warning("%s %s; another one goes on where it was; %s", who, how, remedy)
        self._connections[number].close()
        self._start(number)
        asked, self._asked[number] = self._asked[number], []
        for message in asked:
            self._ask(number, message)


def _end(connections: Sequence[Connection], processes: Sequence[Any]) -> None:
    for connection in connections:
        connection.close()
    until = time.monotonic() + 2
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
        if process.exitcode is None:
            process.kill()  # in the middle of a long read or decode
            process.join()
