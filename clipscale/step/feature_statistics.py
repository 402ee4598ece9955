"""Statistics of a batch's features: whether they have collapsed, and how far apart images and texts lie."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from clipscale.step.measurements import Readback

# Statistics are computed in the first step, and in every step that is a multiple of this.
STATISTICS_INTERVAL = 100
# Most pairs that the statistics use.
MAX_PAIRS = 4096


@dataclass(frozen=True)
class PendingStatistics:
    """Statistics that a thread of the host computes while the step goes on. `start_statistics` starts it."""

    result: Future[dict[str, float]]

    @property
    def is_ready(self) -> bool:
        """Whether reading would not wait."""
        return self.result.done()

    def read(self) -> dict[str, float]:
        """Each statistic by its name."""
        return self.result.result()


@torch.no_grad()
def start_statistics(images: Tensor, texts: Tensor) -> PendingStatistics:
    """Statistics of unit rows (N, D): image i and text i are a pair.

    - `modality_gap`: the distance between the mean image and the mean text (Liang et al. 2022, arXiv 2203.02053).
    - `uniformity_image`, `uniformity_text`: ln of the mean of exp(-2 |x - y|^2) over two rows (Wang and Isola 2020,
      arXiv 2005.10242, section 4.2): 0 if all are equal, about -4 if they are uniform on the sphere.
    - `rank_image`, `rank_text`: the effective rank, exp of the entropy of the normalised singular values (Roy and
      Vetterli 2007): 1 if all are equal, D if they use every direction equally. NaN for features that are not finite.
    - `nearest`: the share of images whose nearest text is their own.

    The device computes sums and products, and the host does not wait for them. A thread computes the eigenvalues, which
    take tenths of a second for each tower.
    """
    u = images[:MAX_PAIRS].float()
    v = texts[: len(u)].float()
    hits = (u @ v.mT).argmax(1) == torch.arange(len(u), device=u.device)
    scalars = {
        "modality_gap": torch.linalg.vector_norm(u.mean(0) - v.mean(0)),
        "uniformity_image": _uniformity(u),
        "uniformity_text": _uniformity(v),
        "nearest": hits.float().mean(),
    }
    arriving = Readback.start_scalars(*scalars.values())
    products = [Readback.start_tensor(rows.double().mT @ rows.double()) for rows in (u, v)]

    def finish() -> dict[str, float]:
        image, text = (_effective_rank(product.wait()) for product in products)
        return dict(zip(scalars, arriving.read())) | {"rank_image": image, "rank_text": text}

    executor = ThreadPoolExecutor(1, thread_name_prefix="statistics")
    result = executor.submit(finish)
    executor.shutdown(wait=False)
    return PendingStatistics(result)


def _uniformity(rows: Tensor) -> Tensor:
    """ln of the mean of exp(-2 |x - y|^2) over two different rows, 0-d float64."""
    count = len(rows)
    total = (4 * (rows @ rows.mT) - 4).exp().sum(dtype=torch.float64)
    return ((total - count) / (count * (count - 1))).log()  # without the pairs of a row with itself, exp(0) each


def _effective_rank(product: Tensor) -> float:
    """The effective rank of rows X, given X'X (D, D) float64.

    The product must be float64: in float32 the roots of rounding errors would count as singular values.
    """
    if not product.isfinite().all():
        return float("nan")
    values = torch.linalg.eigvalsh(product).clamp_min(0).sqrt()
    return torch.special.entr(values / values.sum()).sum().exp().item()
