"""The loss against its definition, in one process or in several: what `clipscale doctor` tries. Imports no model, so that the processes
start at once.

N: pairs, D: feature width.
"""

import torch
import torch.nn.functional as F

from clipscale import distributed
from clipscale.distributed import World
from clipscale.loss.api import contrastive_loss
from clipscale.loss.reference import dense_contrastive_loss

PAIRS, WIDTH, SCALE = 96, 64, 20.0
"""N of each process, D, and the logit scale."""


def loss_error(world: World) -> float:
    """Largest error of this process's share of the float32 gradient, relative to the largest entry of the dense float64 one."""
    draws = torch.Generator().manual_seed(0)
    u, v = (
        F.normalize(torch.randn(PAIRS * world.size, WIDTH, generator=draws, dtype=torch.float64), dim=-1)
        for _ in range(2)
    )
    true = u.clone().requires_grad_(), v.clone().requires_grad_()
    dense_contrastive_loss(*true, SCALE).backward()
    own = slice(PAIRS * world.rank, PAIRS * (world.rank + 1))
    found = tuple(x[own].float().to(world.device).requires_grad_() for x in (u, v))
    contrastive_loss(*found, torch.tensor(SCALE, device=world.device), fp32_precision="ieee").backward()
    worst = 0.0
    for ours, truth in zip(found, true):
        assert ours.grad is not None and truth.grad is not None
        difference = (ours.grad.double().cpu() - truth.grad[own]).abs().max() / truth.grad.abs().max()
        worst = max(worst, difference.item()) if difference.isfinite() else float("inf")
    return worst


def rank() -> None:
    """One of the processes that torchrun starts for the doctor."""
    world = distributed.start("auto")
    try:
        errors = world.gather(loss_error(world))
        if world.main:
            print(f"error={max(errors)}", flush=True)
    finally:
        distributed.stop()


if __name__ == "__main__":
    rank()
