"""Estimates the time of a step: operations over a share of the GPU's peak, and bytes over the slowest link.

b: samples of one rank, P: ranks, D: feature width.
"""

from typing import Any

from clipscale.common.hardware import Hardware
from clipscale.config.tools import PlanConfig
from clipscale.data.loader.captions import GRAIN
from clipscale.models.flops import forward_flops
from clipscale.plan.dry_run import DryRun
from clipscale.step.captions import expected_to_cut

LAP_BYTES, GRADIENT_BYTES = 2, 4
"""Bytes that a GPU sends for each number of each column of the batch: in bf16 with each sweep over the scores, and a
float32 gradient once (docs/loss.md)."""
CAPTION_TOKENS, NETWORK = 20, 25.0
"""Assumed: mean tokens of a caption, and GB/s from a GPU to another node."""


def step_time(config: PlanConfig, gpu: Hardware, run: DryRun, kept: list[float]) -> dict[str, Any]:
    """Seconds of a step by part and in all, samples/s, and the hours of the run if `samples` is set.

    `kept`: share of each tower's chunks whose graphs are kept. The ring's transfers overlap the loss's arithmetic.
    """
    ranks = config.gpus * config.nodes
    batch = config.batch // ranks
    rate = gpu.peak(config.precision.name) * config.utilisation
    link = 1e9 * (NETWORK if config.nodes > 1 else gpu.link)
    image, text = forward_flops(config.model, caption_width(config, run))
    forward = (0 if run.state.stored else image, text)
    trained = [tower.trained for tower in run.state.cache.towers]
    # Forward and backward passes cost 1 and 2 forward passes, and checkpointing one more.
    passes = 4 if config.model.grad_checkpointing else 3
    replay = sum(flops * (passes - share) * train for flops, share, train in zip(forward, kept, trained))
    pairs = batch * batch * ranks * (ranks if config.loss.exchange == "replicated" else 1)
    sweeps = 1 if config.loss.objective == "sigmoid" or not any(trained) else 2
    columns = batch * (ranks - 1) * run.width
    seconds = {
        "encode_s": batch * sum(forward) / rate,
        "loss_s": (sweeps + sum(trained)) * 2 * pairs * run.width / rate,
        "ring_s": (sweeps * LAP_BYTES + GRADIENT_BYTES) * columns / link,
        "replay_s": batch * replay / rate,
        "gradients_s": 2 * (ranks - 1) / ranks * sum(p.nbytes for p in run.state.trained) / link,  # the sum over ranks
    }
    step = sum(seconds.values()) - min(seconds["loss_s"], seconds["ring_s"])
    hours = config.samples / config.batch * step / 3600 if config.samples else None
    return seconds | {"step_s": step, "samples_per_s": config.batch / step, "hours": hours}


def caption_width(config: PlanConfig, run: DryRun) -> int:
    """Tokens at which the text tower computes a caption, on average: the whole context, or fewer of sorted captions."""
    if not (config.data.sort_captions and expected_to_cut(run.state.model.text.encoder)):
        return run.context_length
    return min(run.context_length, round(CAPTION_TOKENS + GRAIN / 2))
