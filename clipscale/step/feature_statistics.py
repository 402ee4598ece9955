"""What the features of a batch say of the model: whether they differ, and whether both towers share one space."""

import torch
from torch import Tensor

EVERY = 100
"""Steps from one look to the next, after that at the first step."""
SAMPLE = 4096
"""Most pairs that are looked at."""


@torch.no_grad()
def feature_statistics(images: Tensor, texts: Tensor) -> dict[str, Tensor]:
    """Of unit rows (N, D), pair by pair, and of at most SAMPLE of them. Each value is 0-d.

    - `modality_gap`: the distance between the mean image and the mean text (Liang et al. 2022, arXiv 2203.02053).
    - `uniformity_image`, `uniformity_text`: ln of the mean of exp(-2 |x - y|^2) over two rows (Wang and Isola 2020,
      arXiv 2005.10242, section 4.2): 0 where all are alike, about -4 where they are even on the sphere.
    - `rank_image`, `rank_text`: exp of the entropy of the singular values over their sum, the effective rank (Roy and
      Vetterli 2007): 1 where all are alike, D where they use every direction equally.
    - `nearest`: the share of images whose own text is the nearest.
    """
    u = images[:SAMPLE].float()
    v = texts[: len(u)].float()
    hits = (u @ v.mT).argmax(1) == torch.arange(len(u), device=u.device)
    return {
        "modality_gap": torch.linalg.vector_norm(u.mean(0) - v.mean(0)),
        "uniformity_image": _uniformity(u),
        "uniformity_text": _uniformity(v),
        "rank_image": _effective_rank(u),
        "rank_text": _effective_rank(v),
        "nearest": hits.float().mean(),
    }


def _uniformity(rows: Tensor) -> Tensor:
    count = len(rows)
    total = (4 * (rows @ rows.mT) - 4).exp().sum(dtype=torch.float64)
    return ((total - count) / (count * (count - 1))).log()  # without each row's own


def _effective_rank(rows: Tensor) -> Tensor:
    rows = rows.double()  # the roots of float32's rounding would count as directions
    values = torch.linalg.eigvalsh(rows.mT @ rows).clamp_min(0).sqrt()
    return torch.special.entr(values / values.sum()).sum().exp()
