"""The gradient noise scale (McCandlish et al. 2018, arXiv 1812.06162, appendix A), by the chunks' gradients.

A batch well below the noise scale gains from growing. A batch well above it learns hardly more from each step.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clipscale.distributed.world import World, gradient_norm
from clipscale.step.grad_cache import GradCache


class NoiseScale:
    """Estimates tr(S) and |G|^2 of one step, S being the covariance of one sample's gradient and G its mean.

    Cut into K groups (chunks, of all ranks) of b_c samples that add up to B, the step's gradient is g = sum_c g_c.
    Group means m_c = (B / b_c) g_c scatter around g with expectation  sum_c b_c |m_c - g|^2 = (K - 1) tr(S),  hence,
    without bias,

        tr(S) = (sum_c B^2 / b_c |g_c|^2 - B |g|^2) / (K - 1),      |G|^2 = |g|^2 - tr(S) / B,      noise scale = tr(S)
        / |G|^2,

    which for equal groups is the paper's estimate from two batch sizes. Each tower has its own chunks and parameters;
    the towers' tr(S) and |G|^2 add up. Autograd hooks take the norms of g_c, without another pass and without copies.

    A contrastive loss is not a mean over samples. "One sample's gradient" is B times what flows through its own
    representations with all others fixed. So the estimate includes the noise of which samples are drawn, but not of
    which negatives they meet.
    """

    def __init__(self, towers: Sequence[nn.Module]) -> None:
        self.towers = [[p for p in tower.parameters() if p.requires_grad] for tower in towers]
        self.square: Tensor | None = None
        self.scatter: list[Tensor | float] = []
        self.groups: list[int] = []

    @contextmanager
    def measure(self, cache: GradCache) -> Iterator[None]:
        """Measures the chunks' gradients during the cache's second pass."""
        self.square, self.scatter, self.groups = None, [0.0] * len(self.towers), [0] * len(self.towers)
        handles = [p.register_hook(self._add) for tower in self.towers for p in tower]
        cache.after_chunk = self._chunk
        try:
            yield
        finally:
            cache.after_chunk = lambda tower, rows: None
            for handle in handles:
                handle.remove()

    def _add(self, gradient: Tensor) -> None:
        square = torch.linalg.vector_norm(
            gradient.detach(), dtype=torch.float64 if gradient.dtype == torch.float64 else torch.float32
        )
        self.square = square.square() if self.square is None else self.square + square.square()

    def _chunk(self, tower: int, rows: int) -> None:
        if self.square is not None:
            self.scatter[tower] = self.scatter[tower] + self.square / rows
            self.groups[tower] += 1
        self.square = None

    def estimate(self, world: World, batch: int, scale: float) -> dict[str, float | None]:
        """`noise_trace` tr(S), `noise_signal` |G|^2 and their quotient `noise_scale` in samples.

        All ranks call it when the gradients are finished.

        Args:
            batch: samples of all ranks.
            scale: the gradient scaler's factor in the chunks' gradients.

        All are None if a tower had one chunk or a gradient is not finite. The quotient is None if the estimated signal
        is not positive.
        """
        sums = torch.tensor([[float(s) for s in self.scatter], self.groups], dtype=torch.float64, device=world.device)
        if world.size > 1:
            dist.all_reduce(sums)
        unknown: dict[str, float | None] = {"noise_scale": None, "noise_trace": None, "noise_signal": None}
        trace = signal = 0.0
        for scatter, groups, parameters in zip(*sums.tolist(), self.towers, strict=True):
            if groups == 0:
                continue  # a frozen tower
            if groups == 1:
                return unknown
            square = gradient_norm(parameters).double().item() ** 2
            of_tower = (batch**2 * scatter / scale**2 - batch * square) / (groups - 1)
            trace, signal = trace + of_tower, signal + square - of_tower / batch
        if not math.isfinite(trace + signal):
            return unknown
        return {"noise_scale": trace / signal if signal > 0 else None, "noise_trace": trace, "noise_signal": signal}
