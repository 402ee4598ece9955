"""Optimizers (timm's factory), parameter groups and learning-rate schedules."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import timm.optim
import torch
from torch import nn

from clipscale.common.errors import UserError
from clipscale.common.terminal import say
from clipscale.common.units import nearest
from clipscale.config.sections import LR_SCALING, OptimConfig, ScheduleConfig


def peak_lr(config: OptimConfig, batch: int) -> float:
    """The peak learning rate at this batch: lr x (batch / reference_batch) ^ (0, 1/2 or 1).

    Linear: Goyal et al. 2017 (arXiv 1706.02677), for SGD below the noise scale. Square root: Krizhevsky 2014 (arXiv 1404.5997), the usual
    choice for Adam and similar optimizers. Raises UserError for a rule without `reference_batch`.
    """
    if config.lr_scaling == "none":
        return config.lr
    if config.reference_batch is None:
        raise UserError(
            f"optim.lr_scaling={config.lr_scaling} needs optim.reference_batch, the batch that optim.lr={config.lr:g} is meant for"
        )
    return float(config.lr * (batch / config.reference_batch) ** LR_SCALING[config.lr_scaling])


ELEMENTWISE = ("adamw", "lion", "adam", "nadamw", "sgd")
"""Optimizers whose update of a shard is the shard of their update."""
SHARDED = (*ELEMENTWISE, "adafactorbv", "lamb", "muon", "lars", "adopt", "laprop", "radam", "rmsprop")
"""Optimizers whose update of a matrix in shards is the one of the whole matrix: a test compares them."""
OWN_CLIP = {"lamb": 1.0}
"""Optimizers that clip by the global norm themselves, at timm's `max_grad_norm`."""


def largest_norm(config: OptimConfig, *, sharded: bool) -> float | None:
    """The norm at which gradients are clipped before the optimizer; `sharded`: it leaves its own clipping to us."""
    own = config.options.get("max_grad_norm", OWN_CLIP[config.name]) if sharded and config.name in OWN_CLIP else None
    return min((limit for limit in (config.clip_norm, own) if limit), default=None)


def build_optimizer(
    model: nn.Module, config: OptimConfig, masters: Mapping[int, nn.Parameter] | None = None, *, sharded: bool = False
) -> torch.optim.Optimizer:
    """timm's optimizer over the trainable parameters, with weight decay on matrices only.

    `masters` maps the id of a parameter to the copy that the optimizer updates instead. `sharded`: matrices and vectors are in shards,
    the scalars are not.

    Raises UserError for an optimizer that timm does not have, and for options that the optimizer does not take.
    """
    known = [str(name) for name in timm.optim.list_optimizers()]
    if config.name not in known:
        raise UserError(f"optim.name={config.name!r} is not one of timm's optimizers{nearest(config.name, known)}")
    options: dict[str, Any] = dict(config.options)
    info = timm.optim.get_optimizer_info(config.name)
    if info.has_betas:
        options.setdefault("betas", tuple(config.betas))
    elif config.name == "adafactorbv":
        options.setdefault("beta2_cap", config.betas[1])
    if config.eps is not None and info.has_eps:
        options.setdefault("eps", config.eps)
    if sharded and config.name not in SHARDED:
        raise UserError(
            f"optim.name={config.name}: not with launch.parallel=fsdp, where a parameter is in shards; choose one of {', '.join(SHARDED)}, "
            "or launch.parallel=ddp"
        )
    if sharded and config.name in OWN_CLIP:  # it would join the norms of shards with those of whole scalars
        options |= {"max_grad_norm": None, "foreach": False}
    groups = parameter_groups(model, config.weight_decay)
    for group in groups:
        group["params"] = [(masters or {}).get(id(p), p) for p in group["params"]]
    try:
        return timm.optim.create_optimizer_v2(
            groups, opt=config.name, lr=config.lr, momentum=config.betas[0], **options
        )
    except (TypeError, ValueError) as error:
        raise UserError(
            f"optim: {config.name} refuses its settings ({error}); look at optim.betas, eps, lr and options"
        ) from error


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in four groups: matrices and token embeddings, with weight decay; vectors and scalars, without.

    Embeddings are a group because Muon's orthogonal steps suit matrices that multiply activations; it falls back to AdamW for them.
    Scalars (logit scale and bias, outside the towers) are a group because FSDP2 shards all others, and fused optimizer loops do not mix
    sharded with whole tensors.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    trainable = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trainable if p.ndim >= 2]
    groups = [
        {"params": [p for p in matrices if id(p) not in embeddings], "weight_decay": weight_decay},
        {"params": [p for p in matrices if id(p) in embeddings], "weight_decay": weight_decay, "use_fallback": True},
        {"params": [p for p in trainable if p.ndim == 1], "weight_decay": 0.0},
        {"params": [p for p in trainable if p.ndim == 0], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def parse_steps(text: str, setting: str, *, total: int, per_epoch: float | None) -> int:
    """`2000` (steps), `5%` (of the run) or `0.5ep` (epochs) as a number of steps.

    Raises UserError for anything else, and for epochs if their length is unknown.
    """
    if text.endswith("ep") and per_epoch is None:
        raise UserError(
            f"{setting}={text}: the number of samples an epoch is not known here; give steps or a percentage"
        )
    try:
        if text.endswith("%"):
            steps = round(float(text[:-1]) / 100 * total)
        elif text.endswith("ep"):
            steps = round(float(text[:-2]) * (per_epoch or 0))
        else:
            steps = int(text)
        if steps < 0:
            raise ValueError(text)
        return steps
    except (ValueError, OverflowError) as error:
        raise UserError(f"{setting}={text!r}: give steps (2000), a share (5%) or epochs (0.5ep)") from error


@dataclass(frozen=True)
class Schedule:
    """Learning rate as a pure function of the step, so that a resumed run needs no state."""

    peak: float
    total: int
    warmup: int
    cooldown: int
    final: float
    cosine: bool

    @staticmethod
    def build(config: ScheduleConfig, *, peak: float, total: int, per_epoch: float | None) -> "Schedule":
        warmup = parse_steps(config.warmup, "schedule.warmup", total=total, per_epoch=per_epoch)
        cooldown = parse_steps(config.cooldown, "schedule.cooldown", total=total, per_epoch=per_epoch)
        return Schedule(peak, total, min(warmup, total), min(cooldown, total), config.final, config.name == "cosine")

    @staticmethod
    def of_run(
        config: ScheduleConfig, optim: OptimConfig, *, batch: int, samples: int, epoch: int | None, announce: bool
    ) -> "Schedule":
        """The schedule of a run of `samples` in full batches; `epoch` is the samples of an epoch. `announce` prints a scaled peak."""
        peak = peak_lr(optim, batch)
        if optim.lr_scaling != "none" and announce:
            say(f"peak learning rate {peak:.4g}: optim.lr={optim.lr:g}, {optim.lr_scaling} in batch / reference_batch")
        per_epoch = None if epoch is None else epoch / batch
        return Schedule.build(config, peak=peak, total=max(1, samples // batch), per_epoch=per_epoch)

    def lr(self, step: float) -> float:
        """Learning rate of step 0, 1, ..., total - 1, or in between: a linear warm-up, then a cosine or a constant with a cooldown."""
        if self.warmup and step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        low = self.peak * self.final
        if self.cosine:
            progress = (step - self.warmup) / max(1, self.total - self.warmup)
            return low + (self.peak - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        left = self.total - step
        return self.peak if left >= self.cooldown else low + (self.peak - low) * left / self.cooldown

    def apply(self, optimizer: torch.optim.Optimizer, step: float, factor: float = 1.0) -> float:
        """Set every parameter group's learning rate for this step to `factor` times the schedule's; returns it."""
        lr = factor * self.lr(step)
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        return lr
