"""The loss on ranks, and how it is compared with the oracle of the whole batch.

Letters: P ranks, n images and m texts of one rank, D feature width.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from clipscale import contrastive_loss
from tests.loss.cases import assert_exact, features, oracle, results
from tests.support.ranks import Workers


def local_results(
    group: dist.ProcessGroup | DeviceMesh,
    rank: int,
    u: Tensor,
    v: Tensor,
    scale: float,
    keys: Tensor | None,
    options: dict,
) -> list[Tensor]:
    """This rank's `results` for its images, texts and keys, all of which are given stacked by rank."""
    if options.get("exchange") == "auto":  # the group as a mesh of one dimension
        group = DeviceMesh.from_group(group, "cpu")
    mine = None if keys is None else keys[rank]
    return results(contrastive_loss, u[rank], v[rank], scale, group=group, keys=mine, **options)


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


def stacked_again(x: Tensor, world_size: int, n: int) -> Tensor:
    """Undo `positives_first`."""
    positives = x[: world_size * n]
    extras = x[world_size * n :]
    return torch.cat([positives.view(world_size, n, *x.shape[1:]), extras.view(world_size, -1, *x.shape[1:])], 1)


def check(
    ranks: Workers,
    world: int | tuple[int, ...],
    u: Tensor,
    v: Tensor,
    scale: float,
    options: dict,
    bar: float = 1e-10,
    keys: Tensor | None = None,
) -> None:
    """Compare the ranks' results with the oracle's, for features (P, n, ...) and (P, m, ...), and keys (P, n), stacked
    by rank."""
    n = u.shape[1] * options.get("captions", 1)
    oracle_options = {k: x for k, x in options.items() if k in ("objective", "similarity", "captions")}
    flat = None if keys is None else keys.flatten()
    true = oracle(u.flatten(0, 1), positives_first(v, n), scale, **oracle_options, keys=flat)
    actual = whole(ranks.run(local_results, world, u, v, scale, keys, options))
    actual[1] = actual[1].flatten(0, 1)
    actual[2] = positives_first(actual[2], n)
    assert_exact(actual, true, scale, bar, (world, tuple(u.shape), tuple(v.shape), scale, options))


def stacked(world_size: int, n: int, m: int, width: int, kind: str = "random", seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features (P, n, D) and (P, m, D)."""
    u, v = features(world_size * n, world_size * m, width, kind, seed)
    return u.view(world_size, n, width), stacked_again(v, world_size, n)
