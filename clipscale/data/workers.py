"""The loader processes of one rank: starting them, telling them which batch to fill, hearing how far they are, and what went wrong."""

import logging
import multiprocessing
import signal
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from clipscale.data.batch import Arena
from clipscale.data.lanes import Plan, Producer
from clipscale.errors import UserError

log = logging.getLogger(__name__)

ALIVE_S = 2.0
"""A worker that reads but finds nothing to deliver says so at most this often."""


def warm_up(*modules: str) -> None:
    """Start the process from which workers are forked, and let it import what they need. Returns at once; a second call does nothing.

    A fork of the training process itself would copy CUDA's and the process group's threads in mid-step.
    """
    multiprocessing.set_forkserver_preload(["__main__", "clipscale.data.workers", *modules])
    forkserver.ensure_running()


@dataclass
class Report:
    """What a worker says: `done` of its places of batch `step` are filled; `positions` come with the last of them."""

    step: int
    done: int
    broken: dict[str, int] = field(default_factory=dict)
    positions: dict[int, tuple[int, int]] | None = None


def reports(producer: Producer, arena: Arena, step: int, batch: int) -> Iterator[Report]:
    """Fill this producer's places of batch `step`, a global batch of `batch` samples, reporting after every piece."""
    for done in producer.fill(arena.slots[step % len(arena.slots)], batch):
        yield Report(step, done, _drained(producer))
    yield Report(step, -1, _drained(producer), producer.positions())


def _drained(producer: Producer) -> dict[str, int]:
    broken = dict(producer.broken)
    producer.broken.clear()
    return broken


def work(connection: Connection, plan: Plan, arena: Arena) -> None:
    """A worker's life: a step and its size come, the worker's places of that batch are filled; ends when the other side closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training process, which then closes the connection
    warnings.filterwarnings(
        "ignore", module=r"PIL\."
    )  # damaged pictures are counted, sizes are judged by data.max_pixels
    torch.set_num_threads(1)
    last = time.monotonic()
    producer: Producer | None = None

    def tick() -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > ALIVE_S:
            last = now
            connection.send(Report(-1, 0, _drained(producer) if producer else {}))

    try:
        try:
            producer = Producer(plan, tick)
            while True:
                for report in reports(producer, arena, *connection.recv()):
                    connection.send(report)
        except UserError as error:
            connection.send(str(error))
        except (EOFError, ConnectionError):
            raise
        except Exception:
            connection.send(RuntimeError(f"a data worker failed:\n{traceback.format_exc()}"))
    except (EOFError, ConnectionError):
        return  # the training process has closed the stream or is gone


class Workers:
    """The worker processes of one rank."""

    def __init__(self, plans: Sequence[Plan], arena: Arena, rank: int, timeout_s: float) -> None:
        self._rank, self._timeout_s = rank, timeout_s
        warm_up(type(plans[0].tokenizer).__module__)
        context = multiprocessing.get_context("forkserver")
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
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

    def allow(self, step: int, batch: int) -> None:
        """Let every worker fill batch `step`, a global batch of `batch` samples."""
        for number, connection in enumerate(self._connections):
            try:
                connection.send((step, batch))
            except ConnectionError as error:
                self._raise_death(number, error)

    def receive(self, needed: Sequence[int]) -> list[tuple[int, Report]]:
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

    def _drain(self, number: int, connection: Connection) -> Iterator[Report]:
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
            "data.workers, data.lanes or data.shuffle"
        ) from cause

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            connection.close()
        until = time.monotonic() + 2
        for process in self._processes:
            process.join(max(0.0, until - time.monotonic()))
            if process.exitcode is None:
                process.kill()  # in the midst of a long read or decode
                process.join()
