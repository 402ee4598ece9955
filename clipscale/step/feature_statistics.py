"""Statistics of a batch's features: whether they have collapsed, and how far apart images and texts lie."""

import torch
from torch import Tensor

# They are computed in the first step and in every step that is a multiple of this.
EVERY = 100
# They use at most this many pairs.
SAMPLE = 4096


@torch.no_grad()
def feature_statistics(images: Tensor, texts: Tensor) -> dict[str, Tensor]:
    """The statistics, each 0-d, of unit rows (N, D): image i and text i are a pair.

    - `modality_gap`: the distance between the mean image and the mean text (Liang et al. 2022, arXiv 2203.02053).
    - `uniformity_image`, `uniformity_text`: ln of the mean of exp(-2 |x - y|^2) over two rows (Wang and Isola 2020,
      arXiv 2005.10242, section 4.2): 0 if all are equal, about -4 if they are uniform on the sphere.
    - `rank_image`, `rank_text`: the effective rank, exp of the entropy of the normalised singular values (Roy and
      Vetterli 2007): 1 if all are equal, D if they use every direction equally.
    - `nearest`: the share of images whose nearest text is their own.
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
    rows = rows.double()  # in float32 the roots of rounding errors would count as singular values
    values = torch.linalg.eigvalsh(rows.mT @ rows).clamp_min(0).sqrt()
    return torch.special.entr(values / values.sum()).sum().exp()
