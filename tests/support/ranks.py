"""Gloo processes: some live for a whole test module (a start takes seconds, a call milliseconds), some for one call."""

import io
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.forked_processes import forks

TIMEOUT_S = 600.0


class Workers:
    """`run(function, ranks, *args)` calls `function(group, rank in it, *args)` on the ranks and returns what each
    returned, in order."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    def run(self, function: Callable[..., Any], ranks: int | tuple[int, ...], *args: Any) -> list[Any]:
        """Run it on the named ranks, or on the first so many. Fails with the traceback of each failed rank."""
        chosen = tuple(range(ranks)) if isinstance(ranks, int) else ranks
        order = _packed((function, chosen, args))
        for pipe in self._pipes:  # every rank: all ranks make a group
            pipe.send_bytes(order)
        answers = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(TIMEOUT_S), f"rank {rank} did not answer within {TIMEOUT_S} s"
            answers.append(torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False))
        failed = [f"rank {rank} failed:\n{value}" for rank, (ok, value) in enumerate(answers) if not ok]
        assert not failed, "\n".join(failed)
        return [answers[rank][1] for rank in chosen]


@contextmanager
def workers(world_size: int, context: Any = None) -> Iterator[Workers]:
    """The processes, for as long as the context lasts. `context` of multiprocessing starts them, or `forks()`."""
    context = context or forks()
    with tempfile.TemporaryDirectory() as folder:
        ends = [context.Pipe() for _ in range(world_size)]
        processes = [
            context.Process(target=_serve, args=(reference, Path(folder) / "store", rank, world_size), daemon=True)
            for rank, (_, reference) in enumerate(ends)
        ]
        for process, (_, reference) in zip(processes, ends):
            process.start()
            reference.close()
        try:
            yield Workers([ours for ours, _ in ends])
        finally:
            for ours, _ in ends:
                with suppress(OSError):  # of a rank that has failed
                    ours.send_bytes(b"")  # a fork holds copies of other ranks' ends, so closing them ends nothing
                ours.close()
            for process in processes:
                process.join(10)
                process.kill()


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """`function(rank, world_size, *args)` in `world_size` processes of their own; their return values in rank order.

    Functions and arguments must be importable from the test's module.
    """
    with workers(world_size) as started:
        return started.run(_called, world_size, function, world_size, args)


def _called(group: dist.ProcessGroup, rank: int, function: Callable[..., Any], world_size: int, args: Any) -> Any:
    return function(rank, world_size, *args)


def _serve(pipe: Connection, store: Path, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # as torchrun gives one; the group is there already
    os.environ.update(address, RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    groups = {}
    while True:
        try:
            order = pipe.recv_bytes()
        except EOFError:
            break
        if not order:
            break
        function, ranks, args = torch.load(io.BytesIO(order), weights_only=False)
        if ranks not in groups:
            groups[ranks] = dist.new_group(list(ranks))
        try:
            answer = (True, function(groups[ranks], ranks.index(rank), *args) if rank in ranks else None)
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send_bytes(_packed(answer))
    if dist.is_initialized():  # a whole run leaves it by itself
        dist.destroy_process_group()


def _packed(x: object) -> bytes:
    """x as bytes. A pipe would send tensors as handles to this process's memory."""
    buffer = io.BytesIO()
    torch.save(x, buffer)
    return buffer.getvalue()
