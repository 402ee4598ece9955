"""Four gloo processes that stay alive for a whole test module, since starting one takes seconds and a case milliseconds."""

import io
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 4
TIMEOUT_S = 120.0


class Workers:
    """`run(function, ranks, *args)` calls `function(group, rank in it, *args)` on the ranks and returns what each returned, in order."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    def run(self, function: Callable[..., Any], ranks: int | tuple[int, ...], *args: Any) -> list[Any]:
        """On the named ranks, or on the first so many. Fails with the traceback of each rank that failed."""
        chosen = tuple(range(ranks)) if isinstance(ranks, int) else ranks
        order = _packed((function, chosen, args))
        for pipe in self._pipes:  # all of them: a group is made by all ranks
            pipe.send_bytes(order)
        answers = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(TIMEOUT_S), f"rank {rank} did not answer within {TIMEOUT_S} s"
            answers.append(torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False))
        failed = [f"rank {rank} failed:\n{value}" for rank, (ok, value) in enumerate(answers) if not ok]
        assert not failed, "\n".join(failed)
        return [answers[rank][1] for rank in chosen]


@contextmanager
def workers() -> Iterator[Workers]:
    """The processes, for as long as the context lasts."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ends = [context.Pipe() for _ in range(WORLD)]
        processes = [
            context.Process(target=_serve, args=(theirs, Path(folder) / "store", rank), daemon=True)
            for rank, (_, theirs) in enumerate(ends)
        ]
        for process, (_, theirs) in zip(processes, ends):
            process.start()
            theirs.close()
        try:
            yield Workers([ours for ours, _ in ends])
        finally:
            for ours, _ in ends:
                ours.close()
            for process in processes:
                process.join(10)
                process.kill()


def _serve(pipe: Connection, store: Path, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    while True:
        try:
            order = pipe.recv_bytes()
        except EOFError:
            break
        function, ranks, args = torch.load(io.BytesIO(order), weights_only=False)
        if ranks not in groups:
            groups[ranks] = dist.new_group(list(ranks))
        try:
            answer = (True, function(groups[ranks], ranks.index(rank), *args) if rank in ranks else None)
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send_bytes(_packed(answer))
    dist.destroy_process_group()


def _packed(x: object) -> bytes:
    """As bytes: a pipe would pass tensors as handles to this process's memory."""
    buffer = io.BytesIO()
    torch.save(x, buffer)
    return buffer.getvalue()
