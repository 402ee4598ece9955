"""Gloo processes that live for a whole test module (a start takes seconds, a case milliseconds), and the loss on them.

Letters: P ranks, n images and m texts of one rank, D feature width.
"""

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
from torch import Tensor

from clipscale import contrastive_loss
from tests.loss.cases import assert_exact, features, oracle, results
from tests.support.forks import forks

TIMEOUT_S = 120.0


class Workers:
    """`run(function, ranks, *args)` calls `function(group, rank in it, *args)` on the ranks and returns what each
    returned, in order."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    def run(self, function: Callable[..., Any], ranks: int | tuple[int, ...], *args: Any) -> list[Any]:
        """On the named ranks, or on the first so many. Fails with the traceback of each rank that failed."""
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
def workers(world: int, context: Any = None) -> Iterator[Workers]:
    """The processes, for as long as the context lasts. `context` of multiprocessing starts them, or `forks()`."""
    context = context or forks()
    with tempfile.TemporaryDirectory() as folder:
        ends = [context.Pipe() for _ in range(world)]
        processes = [
            context.Process(target=_serve, args=(theirs, Path(folder) / "store", rank, world), daemon=True)
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
                process.kill()
                process.join()


def _serve(pipe: Connection, store: Path, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
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
    """x as bytes. A pipe would send tensors as handles to this process's memory."""
    buffer = io.BytesIO()
    torch.save(x, buffer)
    return buffer.getvalue()


def local_results(
    group: dist.ProcessGroup | None,
    rank: int,
    u: Tensor,
    v: Tensor,
    scale: float,
    pairs: dict[str, tuple[Tensor, Tensor]],
    options: dict[str, Any],
) -> list[Tensor]:
    """This rank's `results` for its images and texts, and its masks and keys in `pairs`, all of which are given stacked
    by rank."""
    mine = {name: (images[rank], texts[rank]) for name, (images, texts) in pairs.items()}
    return results(contrastive_loss, u[rank], v[rank], scale, group=group, **mine, **options)


def whole(per_rank: list[list[Tensor]]) -> list[Tensor]:
    """The results of the whole batch: the value, rows in rank order, and the sums of the other gradients over the
    ranks."""
    for other in per_rank[1:]:
        assert torch.equal(other[0], per_rank[0][0]), (
            f"the value differs between ranks: {[float(s[0]) for s in per_rank]}"
        )
    rows = [torch.stack([s[i] for s in per_rank]) for i in (1, 2)]
    return [per_rank[0][0], *rows, *(sum(parts[1:], parts[0]) for parts in zip(*(s[3:] for s in per_rank)))]


def positives_first(x: Tensor, n: int) -> Tensor:
    """Texts stacked by rank (P, m, ...), as one batch: all positives, then all hard negatives."""
    return torch.cat([x[:, :n].flatten(0, 1), x[:, n:].flatten(0, 1)])


def stacked_again(x: Tensor, world: int, n: int) -> Tensor:
    """The inverse of `positives_first`."""
    positives, extras = x[: world * n], x[world * n :]
    return torch.cat([positives.view(world, n, *x.shape[1:]), extras.view(world, -1, *x.shape[1:])], 1)


def check(
    ranks: Workers,
    world: int | tuple[int, ...],
    u: Tensor,
    v: Tensor,
    scale: float,
    options: dict[str, Any],
    bar: float = 1e-10,
    **pairs: tuple[Tensor, Tensor],
) -> None:
    """Compare the ranks' results with the oracle's, for features (P, n, ...) and (P, m, ...), and masks and keys
    (`pairs`), stacked by rank."""
    n = u.shape[1] * options.get("captions", 1)
    oracle_options = {k: x for k, x in options.items() if k in ("objective", "similarity", "shared", "captions")}
    flat = {name: (images.flatten(0, 1), positives_first(texts, n)) for name, (images, texts) in pairs.items()}
    true = oracle(u.flatten(0, 1), positives_first(v, n), scale, **oracle_options, **flat)
    found = whole(ranks.run(local_results, world, u, v, scale, pairs, options))
    found[1], found[2] = found[1].flatten(0, 1), positives_first(found[2], n)
    assert_exact(found, true, scale, bar, (world, tuple(u.shape), tuple(v.shape), scale, options))


def stacked(world: int, n: int, m: int, width: int, kind: str = "random", seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features (P, n, D) and (P, m, D)."""
    u, v = features(world * n, world * m, width, kind, seed)
    return u.view(world, n, width), stacked_again(v, world, n)
