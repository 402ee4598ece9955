"""Time of a step by arithmetic alone: operations over an assumed share of the peak, bytes over the slowest link. Nothing is measured.

b: samples of one rank, P: ranks, D: feature width.
"""

from dataclasses import dataclass

from clipscale.config.tools import PlanConfig
from clipscale.hardware import Hardware
from clipscale.models.towers import forward_flops
from clipscale.plan.rehearsal import Rehearsal

RING_BYTES = 8
"""Sent by each GPU for each column of the batch and each of its numbers (docs/loss.md): bf16 columns twice, and their float32 gradients."""


@dataclass(frozen=True)
class Seconds:
    """Of one step, by part; the columns' journey round the ring runs beside the loss's arithmetic."""

    encode: float
    loss: float
    ring: float
    replay: float
    gradients: float
    """Their sum over the ranks."""

    @property
    def step(self) -> float:
        return self.encode + max(self.loss, self.ring) + self.replay + self.gradients


def seconds(config: PlanConfig, gpu: Hardware, rehearsal: Rehearsal, batch: int, kept: tuple[float, float]) -> Seconds:
    """A step of `batch` samples on each rank; `kept`: share of either tower's chunks that need no second pass."""
    ranks = config.gpus * config.nodes
    rate = gpu.peak(config.precision.name, config.precision.tf32) * config.utilisation
    link = 1e9 * (config.network if config.nodes > 1 else gpu.link)
    image, text = forward_flops(config.model)
    forward = (0 if rehearsal.learner.stored else image, text)
    again = 1 if config.model.grad_checkpointing else 0
    trained = [tower.trained for tower in rehearsal.learner.cache.towers]
    replay = sum(f * (3 - share + again) for f, share, one in zip(forward, kept, trained) if one)
    pairs = batch * batch * ranks * (ranks if config.loss.exchange == "replicated" else 1)
    units = 2 + sum(trained) if any(trained) else 1
    columns = batch * (ranks - 1) * rehearsal.width
    sent = 2 * (ranks - 1) / ranks * rehearsal.gradient_bytes()
    return Seconds(
        encode=batch * sum(forward) / rate,
        loss=units * 2 * pairs * rehearsal.width / rate,
        ring=RING_BYTES * columns / link,
        replay=batch * replay / rate,
        gradients=sent / link,
    )
