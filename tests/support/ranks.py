"""Run a function in several gloo processes and collect what each returns."""

import io
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.forks import forks


def run_ranks(function: Callable[..., Any], world: int, *args: Any, timeout_s: float = 120) -> list[Any]:
    """`function(rank, world, *args)` in `world` processes that form one gloo group; their return values in rank order.

    Fails with the first failing rank's traceback. Functions and arguments must be importable from the test's module.
    """
    context = forks()
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            receive, send = context.Pipe(duplex=False)
            process = context.Process(
                target=_entry, args=(send, Path(folder) / "store", function, rank, world, args), daemon=True
            )
            process.start()
            send.close()
            pipes.append(receive)
            processes.append(process)
        try:
            answers = []
            for rank, pipe in enumerate(pipes):
                assert pipe.poll(timeout_s), f"rank {rank} of {world} did not answer within {timeout_s} s"
                ok, value = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
                assert ok, f"rank {rank} of {world} failed:\n{value}"
                answers.append(value)
        finally:
            for process in processes:
                process.join(10)
                process.kill()
    return answers


def _entry(
    pipe: Connection, store: Path, function: Callable[..., Any], rank: int, world: int, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        answer = (True, function(rank, world, *args))
        if dist.is_initialized():  # a whole run leaves it by itself
            dist.destroy_process_group()
    except BaseException:
        answer = (False, traceback.format_exc())
    # As bytes: a pipe would pass tensors as handles to this process's memory, which ends with it.
    buffer = io.BytesIO()
    torch.save(answer, buffer)
    pipe.send_bytes(buffer.getvalue())
