"""Computes image-text retrieval from features: recall at k in both directions, in bounded memory.

N: images, M: captions (several an image), D: feature width, n/m: rows of one chunk.
"""

import torch
from torch import Tensor

UNREACHABLE = torch.iinfo(torch.int64).max
"""Rank of a query without a usable answer: a miss at every k."""


def retrieval_ranks(
    images_ND: Tensor, captions_MD: Tensor, owner_M: Tensor, *, max_elements: int = 1 << 24
) -> tuple[Tensor, Tensor]:
    """Rank of the first right answer for every image and every caption; 0 is the best.

    owner_M: (M,) int64, the image of each caption; every image has at least one. At most about `max_elements` similarities are in memory
    at a time. Ties count against the model: a wrong answer ranks before an equally similar right one. A NaN never finds its answer.

    Returns (N,) int64, the number of wrong captions not below the best right one, and (M,) int64, that of wrong images.
    """
    N, M = len(images_ND), len(captions_MD)
    if len(owner_M) != M or N == 0 or M == 0:
        raise ValueError(
            f"retrieval needs images and one owner a caption: {N} images, {M} captions, {len(owner_M)} owners"
        )
    if int(owner_M.min()) < 0 or int(owner_M.max()) >= N:
        raise ValueError(f"owner_M must lie in [0, {N}), got [{int(owner_M.min())}, {int(owner_M.max())}]")
    if bool((torch.bincount(owner_M, minlength=N) == 0).any()):
        raise ValueError("every image needs at least one caption")

    image_ranks = []
    for rows in torch.arange(N, device=owner_M.device).split(max(1, max_elements // M)):
        scores_nM = images_ND[rows] @ captions_MD.T
        own = owner_M[None] == rows[:, None]
        # amax keeps a NaN among the right ones.
        best = scores_nM.masked_fill(~own, -torch.inf).amax(1, keepdim=True)
        image_ranks.append(_rank(scores_nM, best, ~own))

    caption_ranks = []
    for rows in torch.arange(M, device=owner_M.device).split(max(1, max_elements // N)):
        scores_mN = captions_MD[rows] @ images_ND.T
        right = owner_M[rows, None]
        other = torch.ones_like(scores_mN, dtype=torch.bool).scatter_(1, right, False)
        caption_ranks.append(_rank(scores_mN, scores_mN.gather(1, right), other))
    return torch.cat(image_ranks), torch.cat(caption_ranks)


def _rank(scores: Tensor, right: Tensor, other: Tensor) -> Tensor:
    ranks = (~(scores < right) & other).sum(1)
    return torch.where(right[:, 0].isnan(), UNREACHABLE, ranks)


def recall_at(ranks: Tensor, ks: tuple[int, ...] = (1, 5, 10)) -> dict[int, float]:
    """Share of the queries with a right answer among the first k."""
    return {k: float((ranks < k).double().mean()) for k in ks}


def retrieval_metrics(image_ranks_N: Tensor, caption_ranks_M: Tensor) -> dict[str, float]:
    """`image_to_text_r{1,5,10}`: any of the image's captions is in the top k; `text_to_image_r{1,5,10}`: the caption's image is."""
    metrics = {f"image_to_text_r{k}": value for k, value in recall_at(image_ranks_N).items()}
    return metrics | {f"text_to_image_r{k}": value for k, value in recall_at(caption_ranks_M).items()}
