"""Problems for the loss, and how far an answer is from the oracle's.

Letters: n images and m texts, D feature width, T tokens of an image, S of a text.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipscale.loss.reference import dense_contrastive_loss
from clipscale.loss.runtime import LossRuntime, running_on
from clipscale.loss.similarity import DotProduct, ModuleSimilarity
from clipscale.loss.triton.tuning import TileShape

LossFunction = Callable[..., Tensor]


class Tiled(LossRuntime):
    """This machine with these tiles, with or without TMA."""

    def __init__(self, tiles: TileShape, tma: bool | None = None) -> None:
        super().__init__()
        self.shape = tiles
        self.tma = tma

    def tile_shape(self, device: torch.device, dtype: torch.dtype) -> TileShape:
        return self.shape

    def has_descriptors(self, x: Tensor) -> bool:
        return super().has_descriptors(x) if self.tma is None else self.tma


class Gpu(LossRuntime):
    """Says that this machine's CPU is a GPU."""

    def is_gpu(self, device: torch.device) -> bool:
        return True


class Phi(nn.Module):
    """A small deep similarity: an MLP on each pair of features, of `width` numbers."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.hidden = nn.Linear(2 * width, 5)
        self.dropout = nn.Dropout(dropout)
        self.score = nn.Linear(5, 1)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        u = u.flatten(1)
        v = v.flatten(1)
        shape = (len(u), len(v), u.shape[1])
        pairs = torch.cat([u[:, None].expand(shape), v[None, :].expand(shape)], dim=2)
        return self.score(self.dropout(torch.tanh(self.hidden(pairs)))).squeeze(2)


def features(n: int, m: int, width: int, kind: str = "random", seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two tensors of unit rows, (n, D) and (m, D), in float64, of the named kind."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(n, width, generator=generator, dtype=torch.float64)
    v = torch.randn(m, width, generator=generator, dtype=torch.float64)
    if kind == "aligned":  # the positives stand out, as after training
        v[:n] = u + 0.3 * v[:n]
    elif kind == "equal":
        u[:] = u[0]
        v[:] = u[0]
    elif kind == "orthogonal":
        u = torch.eye(n, width, dtype=torch.float64)
        v = torch.eye(m, width, dtype=torch.float64)
    elif kind == "low":  # every cosine near -1
        u, v = u[:1] + 0.05 * u, -u[:1] + 0.05 * v
    elif kind == "obtuse":  # every cosine near -0.6: at scale 100 all log-sum-exps lie 60 to 120 nats below a shift
        towards = F.normalize(u[:1], dim=1)
        across = F.normalize(v[:1] - (v[:1] @ towards.T) * towards, dim=1)
        u = towards + 0.03 * u
        v = 0.8 * across - 0.6 * towards + 0.03 * v
    elif kind == "duplicates":
        u = u[torch.arange(n) // 2]
        v = v[torch.arange(m) // 2]
    return F.normalize(u, dim=1), F.normalize(v, dim=1)


def keys(n: int, seed: int = 0) -> Tensor:
    """Keys of images among which about half have a double."""
    return torch.randint(0, n, (n,), generator=torch.Generator().manual_seed(seed))


@contextmanager
def tiles_of(side: int | None) -> Iterator[None]:
    """In this context, the torch backend's tiles have this side; None: its own choice."""
    with ExitStack() as stack:
        for similarity in (DotProduct, ModuleSimilarity) if side else ():
            stack.enter_context(mock.patch.object(similarity, "tile_shape", lambda *_: (side, side)))
        yield


def results(
    loss: LossFunction,
    u: Tensor,
    v: Tensor,
    scale: float,
    bias: float = -2.0,
    tile: int | None = None,
    runtime: LossRuntime | None = None,
    **options: Any,
) -> list[Tensor]:
    """The loss's value and its gradients: images, texts, scale, bias, then the parameters of a similarity module."""
    number_type = u.dtype if u.dtype == torch.float64 else torch.float32
    numbers = [torch.tensor(x, dtype=number_type, device=u.device, requires_grad=True) for x in (scale, bias)]
    u, v = (x.detach().clone().requires_grad_() for x in (u, v))
    module = options.get("similarity")
    parameters = list(module.parameters()) if isinstance(module, nn.Module) else []
    inputs = [u, v, *numbers, *parameters]
    with tiles_of(tile), running_on(runtime or LossRuntime()):
        value = loss(u, v, numbers[0], logit_bias=numbers[1], **options)
        grads = torch.autograd.grad(value, inputs, allow_unused=True)
    return [value.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads))]


def oracle(u: Tensor, v: Tensor, scale: float, bias: float = -2.0, **options: Any) -> list[Tensor]:
    """`results` of the oracle in float64."""
    if isinstance(options.get("similarity"), nn.Module):
        options["similarity"] = options["similarity"].double()
    return results(dense_contrastive_loss, u.double(), v.double(), scale, bias, **options)


def error(actual: Tensor, true: Tensor, floor: float) -> float:
    """The largest difference relative to the largest true number, or to `floor` where that is larger."""
    assert actual.shape == true.shape, f"shape {tuple(actual.shape)} instead of {tuple(true.shape)}"
    if not bool(actual.isfinite().all()):
        return float("inf")
    return float((actual.double() - true).abs().max() / true.abs().max().clamp_min(floor))


def errors(actual: Sequence[Tensor], true: Sequence[Tensor], scale: float) -> dict[str, float]:
    """The error of each result, by name.

    Where a result is zero or nearly so (a lone pair, a duplicate), it counts against the size of what it is the
    difference of: a tenth of the scale for the value, scale / N for a feature's gradient.
    """
    n = len(true[1])
    names = ["value", "images", "texts", "scale", "bias", *(f"parameter {i}" for i in range(len(true) - 5))]
    floors = [scale / 10, scale / n, scale / n, 0.1, 0.1, *(scale for _ in true[5:])]
    return {name: error(f, t, floor) for name, f, t, floor in zip(names, actual, true, floors, strict=True)}


def assert_near_plain_torch(actual: Sequence[Tensor], u: Tensor, v: Tensor, scale: float, **options: Any) -> None:
    """Assert that no error in half precision is larger than twice the error of plain torch, and a little.

    On a GPU the value may differ by more. Tensor cores cut off the sums of a score, by 1e-6 of it on an H100. The value
    is a difference of such sums and exact products; plain torch takes both from one rounded matrix.
    """
    true = oracle(u, v, scale, **options)
    plain = errors(results(dense_contrastive_loss, u, v, scale, **options), true, scale)
    for name, x in errors(actual, true, scale).items():
        case = f"{name} of {tuple(u.shape)} at scale {scale:g}, {options}"
        little = 2e-5 if u.is_cuda and name == "value" else 5e-6
        assert x <= 2 * plain[name] + little, f"{case}: {x:.1e} against plain torch's {plain[name]:.1e}"


def assert_exact(actual: Sequence[Tensor], true: Sequence[Tensor], scale: float, bar: float, case: object) -> None:
    worst = errors(actual, true, scale)
    assert max(worst.values()) <= bar, f"{case}: " + ", ".join(f"{k} {v:.1e}" for k, v in worst.items())
