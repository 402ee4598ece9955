"""The block functions' formulas in float64, a slab of rows at a time, for the tests of the Triton kernels.

Letters: n rows, m columns, D feature width; x scores, r and c their row and column log-sum-exps, a and b weights, G = dloss/dx.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

SLAB = 1024


@dataclass
class Block:
    """One problem: features in the precision under test, and what else the block functions take."""

    u: Tensor
    v: Tensor
    scale: Tensor  # 0-d float32
    positive: int | None = 0
    row_keys: Tensor | None = None
    col_keys: Tensor | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {"positive": self.positive, "row_keys": self.row_keys, "col_keys": self.col_keys}

    def slabs(self) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """(rows, x, true at positives, true at pairs left out), float64, slab by slab."""
        cols = torch.arange(len(self.v), device=self.u.device)
        for i in range(0, len(self.u), SLAB):
            rows = slice(i, min(i + SLAB, len(self.u)))
            x = self.scale.double() * (self.u[rows].double() @ self.v.double().T)
            positives = torch.zeros_like(x, dtype=torch.bool)
            if self.positive is not None:
                at = torch.arange(rows.start, rows.stop, device=self.u.device) + self.positive
                positives = at[:, None] == cols[None, :]
            left_out = torch.zeros_like(positives)
            if self.row_keys is not None and self.col_keys is not None:
                left_out = (self.row_keys[rows, None] == self.col_keys[None, :]) & ~positives
            yield rows, x, positives, left_out

    def log_sum_exps(self) -> tuple[Tensor, Tensor]:
        rows, cols = [], torch.full((len(self.v),), -torch.inf, dtype=torch.float64, device=self.u.device)
        for _, x, _, left_out in self.slabs():
            x = x.masked_fill(left_out, -torch.inf)
            rows.append(x.logsumexp(1))
            cols = torch.logaddexp(cols, x.logsumexp(0))
        return torch.cat(rows), cols

    def softmax_gradients(
        self, a: Tensor | None, b: Tensor | None, smoothing: tuple[float, float] = (0.0, 0.0), epsilon: float = 0.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """scale G V, scale G' U and the scale's gradient; a direction whose weights are None takes no part."""
        r, c = self.log_sum_exps()
        d_scale = torch.zeros((), dtype=torch.float64, device=self.u.device)
        d_u, d_v = [], torch.zeros_like(self.v, dtype=torch.float64)
        for rows, x, positives, left_out in self.slabs():
            g = torch.zeros_like(x)
            if a is not None:
                w = a[rows].double()[:, None]
                g += w * ((x - r[rows, None]).exp() - smoothing[0] - (1 - epsilon) * positives)
            if b is not None:
                w = b.double()[None, :]
                g += w * ((x - c[None, :]).exp() - smoothing[1] - (1 - epsilon) * positives)
            g = g.masked_fill(left_out, 0)
            d_scale += (g * x).sum() / self.scale.double()
            g *= self.scale.double()
            d_u.append(g @ self.v.double())
            d_v += g.T @ self.u[rows].double()
        return torch.cat(d_u), d_v, d_scale

    def sigmoid(self, bias: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The loss, the gradients of the bias and of the scale, scale G V, scale G' U."""
        zero = torch.zeros((), dtype=torch.float64, device=self.u.device)
        loss, d_bias, d_scale, d_u, d_v = zero, zero, zero, [], torch.zeros_like(self.v, dtype=torch.float64)
        for rows, x, positives, left_out in self.slabs():
            z = 1 - 2 * positives.double()
            logits = z * (x + bias)
            loss = loss + softplus(logits).masked_fill(left_out, 0).sum()
            g = (z * logits.sigmoid()).masked_fill(left_out, 0)
            d_bias = d_bias + g.sum()
            d_scale = d_scale + (g * x).sum() / self.scale.double()
            d_u.append(self.scale.double() * g @ self.v.double())
            d_v += self.scale.double() * g.T @ self.u[rows].double()
        return loss, d_bias, d_scale, torch.cat(d_u), d_v


def features(kind: str, n: int, m: int, width: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Normalised features (n, width) and (m, width), float32 numbers rounded to dtype.

    random: independent directions. equal: all the same. pairs: every text near its image. extreme: all cosines near -1 but for one pair
    of duplicates, so that at scale 100 the scores of a tile span 200 nats.
    """
    generator = torch.Generator().manual_seed(1000003 * n + 1009 * m + width)

    def randn(rows: int) -> Tensor:
        return torch.randn(rows, width, generator=generator)

    if kind == "random":
        u, v = randn(n), randn(m)
    elif kind == "equal":
        u = v = torch.ones(1, width)
        u, v = u.expand(n, -1), v.expand(m, -1)
    elif kind == "pairs":
        u, v = randn(n), randn(m)
        v[:n] = u[:m] + 0.5 * v[:n]
    elif kind == "extreme":
        towards = torch.eye(1, width)
        u, v = towards + 0.05 * randn(n) / width**0.5, -towards + 0.05 * randn(m) / width**0.5
        v[m // 2] = u[n // 3]
    else:
        raise ValueError(kind)
    return normalize(u, dim=1).to(device, dtype), normalize(v, dim=1).to(device, dtype)


def distance(got: Tensor, truth: Tensor) -> float:
    """Relative error in the Frobenius norm; NaN counts as infinite."""
    error = float((got.double() - truth).norm() / truth.norm().clamp_min(1e-300))
    return error if error == error else float("inf")


def scale_error_of(got: Tensor, truth: Tensor, *used: Tensor) -> float:
    """Error of the scale's gradient, what is left of weights that cancel, counted against a hundredth of them at least."""
    error = float((got.double() - truth).abs() / truth.abs().clamp_min(sum(float(w.sum()) for w in used) / 100))
    return error if error == error else float("inf")


def error_of(b: Block, got: Tensor, truth: Tensor, *used: Tensor) -> float:
    """Relative error of a gradient. Where training has converged the gradient itself is what is left of weights that cancel, so no
    gradient counts as smaller than a hundredth of what the weights used would give by themselves."""
    size = float(b.scale) * sum(float(w.double().norm()) for w in used)
    error = float((got.double() - truth).norm() / truth.norm().clamp_min(size / 100))
    return error if error == error else float("inf")
