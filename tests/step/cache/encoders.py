"""Two small encoders and a loss, and their gradient in one graph of the whole batch, without clipscale."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Encoder(nn.Module):
    """A small encoder with dropout and a module whose use of parameters is not linear."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(width, 12), nn.LayerNorm(12), nn.GELU(), nn.Dropout(dropout), nn.Linear(12, 5)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.net(x), dim=-1)


class ClipHead(nn.Module):
    """The symmetric softmax loss of one process, with a learnable scale, written without clipscale."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        x = self.log_scale.exp() * u @ v.T
        target = torch.arange(len(u), device=u.device)
        return (F.cross_entropy(x, target) + F.cross_entropy(x.T, target)) / 2


def models(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> nn.ModuleDict:
    """Two encoders and a loss, with the same weights at each call."""
    torch.manual_seed(0)
    return nn.ModuleDict({"image": Encoder(7, dropout), "text": Encoder(9, dropout), "head": ClipHead()}).to(dtype)


def batch(n: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 7, generator=generator, dtype=dtype), torch.randn(n, 9, generator=generator, dtype=dtype)


def one_graph(
    encoders: list[nn.Module], loss: Callable[..., Tensor], inputs: tuple[Tensor, ...], chunks: list[int]
) -> Tensor:
    """Run forward and backward pass in one graph. Returns the loss.

    The forward pass goes chunk by chunk, so that random numbers are drawn in the order of the gradient cache.
    """
    features = [torch.cat([e(rows) for rows in x.split(c)]) for e, x, c in zip(encoders, inputs, chunks, strict=True)]
    value = loss(*features)
    value.backward()
    return value.detach()


# Bytes of kept graphs; with 4000 a second step keeps some of them, after a first one has measured their size.
KEEP = {"keeps_none": 0, "keeps_some": 4000, "keeps_all": math.inf}
