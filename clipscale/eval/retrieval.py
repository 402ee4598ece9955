"""Computes image-text retrieval from features: recall at k and ranks in both directions, in tiles that the ranks share.

N: images, M: captions (several an image), D: feature width, n/m: images and captions of one tile.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from clipscale.distributed.world import World

UNREACHABLE = torch.iinfo(torch.int64).max
"""Rank of a query without a usable answer: a miss at every k."""
ALONE = World(0, 1, torch.device("cpu"))


def retrieval_ranks(
    images_ND: Tensor, captions_MD: Tensor, owner_M: Tensor, *, tile: int = 4096, world: World = ALONE
) -> tuple[Tensor, Tensor]:
    """Rank of the first right answer for every image and every caption; 0 is the best.

    owner_M: (M,) int64, the image of each caption; every image has at least one. One tile of tile x tile similarities is in memory at a
    time, and serves both directions. A collective: rank r takes every size-th row of tiles. Ties count against the model: a wrong answer
    ranks before an equally similar right one. A NaN never finds its answer.

    Returns (N,) int64, the number of wrong captions not below the best right one, and (M,) int64, that of wrong images.
    """
    N, M = len(images_ND), len(captions_MD)

    def tiles(*, right: bool) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """This rank's tiles: images, captions, similarities (n, m), and which pairs belong together; `right`: only with such."""
        for i in range(world.rank * tile, N, world.size * tile):
            rows = slice(i, min(i + tile, N))
            inside = (owner_M >= rows.start) & (owner_M < rows.stop)
            for j in range(0, M, tile):
                columns = slice(j, j + tile)
                if right and not bool(inside[columns].any()):
                    continue
                own = owner_M[None, columns] == torch.arange(rows.start, rows.stop, device=owner_M.device)[:, None]
                yield rows, columns, images_ND[rows] @ captions_MD[columns].T, own

    # The score of every right pair first, from the same tiles in which it is compared: equal pictures have equal scores then.
    best_N = images_ND.new_full((N,), -torch.inf)
    own_M = images_ND.new_full((M,), -torch.inf)
    for rows, columns, scores_nm, own in tiles(right=True):
        right = scores_nm.masked_fill(~own, -torch.inf)
        best_N[rows] = torch.maximum(best_N[rows], right.amax(1))  # both keep a NaN among the right ones
        own_M[columns] = torch.where(own.any(0), right.amax(0), own_M[columns])
    n_N, m_M = (torch.arange(count, device=owner_M.device) for count in (N, M))
    best_N = world.gather_rows(best_N[None])[n_N // tile % world.size, n_N]
    own_M = world.gather_rows(own_M[None])[owner_M // tile % world.size, m_M]

    image_ranks = owner_M.new_zeros(N)
    caption_ranks = owner_M.new_zeros(M)
    for rows, columns, scores_nm, own in tiles(right=False):
        image_ranks[rows] += (~(scores_nm < best_N[rows, None]) & ~own).sum(1)
        caption_ranks[columns] += (~(scores_nm < own_M[None, columns]) & ~own).sum(0)
    image_ranks = world.gather_rows(image_ranks[None]).sum(0).masked_fill(best_N.isnan(), UNREACHABLE)
    caption_ranks = world.gather_rows(caption_ranks[None]).sum(0).masked_fill(own_M.isnan(), UNREACHABLE)
    return image_ranks, caption_ranks


def retrieval_metrics(image_ranks_N: Tensor, caption_ranks_M: Tensor) -> dict[str, float]:
    """`image_to_text_r{1,5,10}`: any of the image's captions is in the top k; `text_to_image_r{1,5,10}`: the caption's image is.

    `..._rank_mean` and `..._rank_median` count from 1; a query without a usable answer comes after all candidates. The median of an even
    number of queries is rounded down, as in VSE++ (Faghri et al. 2018).
    """
    metrics: dict[str, float] = {}
    directions = (("image_to_text", image_ranks_N, caption_ranks_M), ("text_to_image", caption_ranks_M, image_ranks_N))
    for name, ranks, candidates in directions:
        metrics |= {f"{name}_r{k}": float((ranks < k).double().mean()) for k in (1, 5, 10)}
        places = ranks.clamp(max=len(candidates)).double().sort().values
        middle = (places[(len(places) - 1) // 2] + places[len(places) // 2]) / 2
        metrics |= {f"{name}_rank_mean": float(places.mean()) + 1, f"{name}_rank_median": float(middle.floor()) + 1}
    return metrics
