"""The formulas of a block in float64, a slab of rows at a time, for the tests of the Triton backend.

Letters: n rows, m columns, D feature width; x scores, r and c their row and column log-sum-exps, a and b weights, G = dloss/dx.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from clipscale.loss.block import Block, Parameters, RowBlock
from clipscale.loss.machine import Machine
from clipscale.loss.objective import Sigmoid, Softmax
from clipscale.loss.triton.backend import TritonBackend, triton_backend
from clipscale.loss.triton.tuning import Tuning

SLAB = 1024
Weights = tuple[Tensor | None, Tensor | None]  # of rows and columns


@dataclass
class Problem:
    """The features of a block in the precision under test, and its keys, with the backend's answers and the true ones."""

    u: Tensor
    v: Tensor
    scale: Tensor  # 0-d float32
    positive: int | None = 0
    row_keys: Tensor | None = None
    col_keys: Tensor | None = None

    def block(
        self,
        weights: Weights,
        lse: Weights | None = None,
        grads: Weights = (None, None),
        bias: float = 0.0,
    ) -> Block:
        """The block as the backend takes it: for the forward pass, or, given both log-sum-exps, for the backward pass."""
        zero = torch.zeros((), dtype=torch.float64, device=self.u.device)
        rows, cols = (
            RowBlock(x, keys=keys, weight=weight, grad=grad)
            for x, keys, weight, grad in zip((self.u, self.v), (self.row_keys, self.col_keys), weights, grads)
        )
        for i, side in enumerate((rows, cols)):
            side.lse = None if side.weight is None else side.empty_lse() if lse is None else lse[i]
        rows.target = torch.zeros(len(self.u), dtype=torch.float64, device=self.u.device)
        bias_ = torch.tensor(bias, device=self.u.device)
        return Block(rows, cols, Parameters(self.scale, bias_, zero.clone(), zero.clone()), self.positive)

    def computed_lse(self, weights: Weights, precision: str = "ieee", tuning: Tuning | None = None) -> Weights:
        """The backend's log-sum-exps, in the directions that have weights."""
        block = self.block(weights)
        _softmax(self, 0.0, precision, tuning).forward(block)
        return block.rows.lse, block.cols.lse

    def computed_softmax(
        self,
        weights: Weights,
        lse: Weights | None = None,
        smoothing: float = 0.0,
        needed: tuple[bool, bool] = (True, True),
        grads: Weights | None = None,
        precision: str = "ieee",
        tuning: Tuning | None = None,
    ) -> list[Tensor]:
        """The backend's gradients of the features and of the scale, added to `grads`; without `lse` from its own log-sum-exps."""
        lse = lse or self.computed_lse(weights, precision, tuning)
        block = self.block(weights, lse, self.zeros(needed) if grads is None else grads)
        _softmax(self, smoothing, precision, tuning).backward(block)
        return _found(block, "scale_grad")

    def computed_sigmoid(
        self,
        bias: float,
        needed: tuple[bool, bool] = (True, True),
        precision: str = "ieee",
        at_once: bool = True,
        tuning: Tuning | None = None,
    ) -> list[Tensor]:
        """The backend's loss and its gradients, from one sweep or two: the features', then the bias's and the scale's."""
        backend = triton_backend(Sigmoid(), precision, tuning or Tuning(), Machine())
        block = self.block((None, None), grads=self.zeros(needed), bias=bias)
        for sweep in ("forward_backward",) if at_once else ("forward", "backward"):
            getattr(backend, sweep)(block)
        assert block.rows.target is not None
        return [-block.rows.target.sum(), *_found(block, "bias_grad", "scale_grad")]

    def zeros(self, needed: tuple[bool, bool]) -> Weights:
        rows, cols = (
            torch.zeros(x.shape, device=x.device) if wanted else None for x, wanted in zip((self.u, self.v), needed)
        )
        return rows, cols

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
        self, a: Tensor | None, b: Tensor | None, smoothing: float = 0.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """scale G V, scale G' U and the gradient of the scale. A direction whose weights are None takes no part."""
        r, c = self.log_sum_exps()
        d_scale = torch.zeros((), dtype=torch.float64, device=self.u.device)
        d_u, d_v = [], torch.zeros_like(self.v, dtype=torch.float64)
        for rows, x, positives, left_out in self.slabs():
            g = torch.zeros_like(x)
            if a is not None:
                w = a[rows].double()[:, None]
                g += w * ((x - r[rows, None]).exp() - smoothing / len(self.v) - (1 - smoothing) * positives)
            if b is not None:
                w = b.double()[None, :]
                g += w * ((x - c[None, :]).exp() - smoothing / len(self.u) - (1 - smoothing) * positives)
            g = g.masked_fill(left_out, 0)
            d_scale += (g * x).sum() / self.scale.double()
            g *= self.scale.double()
            d_u.append(g @ self.v.double())
            d_v += g.T @ self.u[rows].double()
        return torch.cat(d_u), d_v, d_scale

    def sigmoid(self, bias: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The loss, scale G V, scale G' U, the gradients of the bias and of the scale."""
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
        return loss, torch.cat(d_u), d_v, d_bias, d_scale


def _softmax(problem: Problem, smoothing: float, precision: str, tuning: Tuning | None) -> TritonBackend:
    objective = Softmax(smoothing, len(problem.u), len(problem.v))
    return triton_backend(objective, precision, tuning or Tuning(), Machine())


def _found(block: Block, *names: str) -> list[Tensor]:
    """The gradients that the block asks for: features, then the named parameters."""
    found = [block.rows.grad, block.cols.grad, *(getattr(block.parameters, name) for name in names)]
    return [x for x in found if x is not None]


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
    elif kind in ("low", "far row"):  # all cosines near -1; all near 1 but for one row
        towards = torch.eye(1, width)
        u, v = towards + 0.05 * randn(n) / width**0.5, towards + 0.05 * randn(m) / width**0.5
        (u if kind == "low" else u[n // 2]).neg_()
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


def error_of(b: Problem, got: Tensor, truth: Tensor, *used: Tensor) -> float:
    """Relative error of a gradient. Where training has converged the gradient itself is what is left of weights that cancel, so no
    gradient counts as smaller than a hundredth of what the weights used would give by themselves."""
    size = float(b.scale) * sum(float(w.double().norm()) for w in used)
    error = float((got.double() - truth).norm() / truth.norm().clamp_min(size / 100))
    return error if error == error else float("inf")
