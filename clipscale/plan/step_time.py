"""Estimates the time of a step: operations over a share of the GPU's peak, and bytes over the slowest link.

b: samples of one rank, P: ranks, D: feature width.
"""

from dataclasses import asdict, dataclass
from typing import Any

from clipscale.common.hardware import Hardware
from clipscale.config.tools import PlanConfig
from clipscale.data.loader.captions import GRAIN
from clipscale.models.captions import expected_to_cut
from clipscale.models.flops import forward_flops
from clipscale.plan.dry_run import DryRun

LAP_BYTES, GRADIENT_BYTES = 2, 4
"""Bytes that a GPU sends for each number of each column of the batch: in bf16 with each sweep over the scores, and a
float32 gradient once (docs/loss.md)."""


CAPTION_TOKENS, NETWORK = 20, 25.0
"""Assumed: mean tokens of a caption, and GB/s from a GPU to another node."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, by part. The ring's transfers overlap the loss's arithmetic."""

    encode: float
    loss: float
    ring: float
    replay: float
    gradients: float
    """Summing the parameters' gradients over the ranks."""

    @property
    def step(self) -> float:
        return self.encode + max(self.loss, self.ring) + self.replay + self.gradients

    def record(self, config: PlanConfig) -> dict[str, Any]:
        """The seconds by their names in JSON, samples/s, and the hours of the whole run if `samples` is set."""
        return {
            **{f"{name}_s": value for name, value in asdict(self).items()},
            "step_s": self.step,
            "samples_per_s": config.batch / self.step,
            "hours": config.samples / config.batch * self.step / 3600 if config.samples else None,
        }


def step_time(config: PlanConfig, gpu: Hardware, run: DryRun, batch: int, kept: tuple[float, float]) -> StepTime:
    """A step of `batch` samples on each rank; `kept`: share of each tower's chunks whose graphs are kept."""
    ranks = config.gpus * config.nodes
    rate = gpu.peak(config.precision.name) * config.utilisation
    link = 1e9 * (NETWORK if config.nodes > 1 else gpu.link)
    image, text = forward_flops(config.model, caption_width(config, run))
    forward = (0 if run.state.stored else image, text)
    trained = [tower.trained for tower in run.state.cache.towers]
    recomputed = 1 if config.model.grad_checkpointing else 0
    # Forward and backward passes cost 1 and 2 forward passes.
    replay = sum(f * (3 - share + recomputed) for f, share, one in zip(forward, kept, trained) if one)
    pairs = batch * batch * ranks * (ranks if config.loss.exchange == "replicated" else 1)
    sweeps = 1 if config.loss.objective == "sigmoid" or not any(trained) else 2
    matmuls = sweeps + sum(trained)
    columns = batch * (ranks - 1) * run.width
    return StepTime(
        encode=batch * sum(forward) / rate,
        loss=matmuls * 2 * pairs * run.width / rate,
        ring=(sweeps * LAP_BYTES + GRADIENT_BYTES) * columns / link,
        replay=batch * replay / rate,
        gradients=2 * (ranks - 1) / ranks * run.gradient_bytes() / link,
    )


def caption_width(config: PlanConfig, run: DryRun) -> int:
    """Tokens at which the text tower computes a caption, on average: the whole context, or fewer of sorted captions."""
    if not (config.data.sort_captions and expected_to_cut(run.state.model.text.encoder)):
        return run.context_length
    return min(run.context_length, round(CAPTION_TOKENS + GRAIN / 2))
