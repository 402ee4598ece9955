"""Optimizers (timm's factory), parameter groups and learning-rate schedules."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import timm.optim
import timm.optim.muon
import torch
from torch import nn

from clipscale.common.errors import UserError
from clipscale.common.units import nearest
from clipscale.config.sections import LR_SCALING, OptimConfig, ScheduleConfig
from clipscale.data.loader.ramp import BatchSizes

SHARDED = (
    "adamw", "lion", "adam", "nadamw", "sgd", "adafactorbv", "muon", "lars", "adopt", "laprop", "radam", "rmsprop"
)  # fmt: skip
"""Optimizers whose update of a matrix in shards is the one of the whole matrix: a test compares them."""


def known_optimizer(name: str) -> None:
    """Raise UserError for an optimizer that timm does not have."""
    known = [str(name) for name in timm.optim.list_optimizers()]
    if name not in known:
        raise UserError(f"optim.name={name!r} is not one of timm's optimizers{nearest(name, known)}")


def build_optimizer(model: nn.Module, config: OptimConfig, *, sharded: bool = False) -> torch.optim.Optimizer:
    """timm's optimizer over the trainable parameters, with weight decay on matrices only.

    `sharded`: matrices and vectors are in shards, the scalars are not.

    Raises UserError for an optimizer that timm does not have, and for options that the optimizer does not take.
    """
    known_optimizer(config.name)
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
            f"optim.name={config.name}: not with launch.parallel=fsdp, where a parameter is in shards; choose one of "
            f"{', '.join(SHARDED)}, or launch.parallel=ddp"
        )
    groups = parameter_groups(model, config.weight_decay)
    if config.name == "muon" and all(p.device.type == "cpu" for p in model.parameters()):
        # timm iterates in bf16, which a CPU without bf16 instructions computes many times slower than float32.
        orthogonal = timm.optim.muon.zeropower_via_newtonschulz
        timm.optim.muon.zeropower_via_newtonschulz = partial(orthogonal, dtype=torch.float32)
    try:
        return timm.optim.create_optimizer_v2(
            groups, opt=config.name, lr=config.lr, momentum=config.betas[0], **options
        )
    except (TypeError, ValueError) as error:
        raise UserError(
            f"optim: {config.name} refuses its settings ({error}); look at optim.betas, eps, lr and options"
        ) from error


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in four groups: matrices and token embeddings with weight decay; vectors, scalars without.

    Embeddings are a group because Muon's orthogonal steps suit matrices that multiply activations; it falls back to
    AdamW for them. Scalars (logit scale and bias, outside the towers) are a group because FSDP2 shards all others, and
    fused optimizer loops do not mix sharded with whole tensors.
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
    """Learning rate as a pure function of the step, so that a resumed run needs no state.

    Under a batch ramp steps count full batches.
    """

    peak: float
    total: int
    warmup: int
    cooldown: int
    final: float
    cosine: bool
    sizes: BatchSizes
    power: float = 0.0
    """Of a ramped batch's share of the full one, by which the rate of its step is scaled. Linear: Goyal et al. 2017
    (arXiv 1706.02677), for SGD below the noise scale. The square root: Krizhevsky 2014 (arXiv 1404.5997), the usual
    choice for Adam and similar optimizers."""

    @staticmethod
    def build(
        config: ScheduleConfig, optim: OptimConfig, sizes: BatchSizes, samples: int, epoch: int | None
    ) -> "Schedule":
        """The schedule of a run of `samples`; `epoch` is the samples of an epoch, None if that is not known.

        Raises UserError.
        """
        total, per_epoch = max(1, samples // sizes.batch), None if epoch is None else epoch / sizes.batch
        warmup = parse_steps(config.warmup, "schedule.warmup", total=total, per_epoch=per_epoch)
        cooldown = parse_steps(config.cooldown, "schedule.cooldown", total=total, per_epoch=per_epoch)
        return Schedule(
            optim.lr, total, min(warmup, total), min(cooldown, total), config.final,
            config.name == "cosine", sizes, LR_SCALING[optim.lr_scaling],
        )  # fmt: skip

    def at(self, position: float) -> float:
        """Learning rate of full batch 0 to total - 1: linear warm-up, then a cosine, or a constant and a cooldown."""
        if self.warmup and position < self.warmup:
            return self.peak * (position + 1) / self.warmup
        low = self.peak * self.final
        if self.cosine:
            progress = (position - self.warmup) / max(1, self.total - self.warmup)
            return low + (self.peak - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        left = self.total - position
        return self.peak if left >= self.cooldown else low + (self.peak - low) * left / self.cooldown

    def lr(self, step: int) -> float:
        """Learning rate of step 0, 1, ... of the run. A scaled peak follows the step's own batch."""
        factor = (self.sizes.at(step) / self.sizes.batch) ** self.power
        return factor * self.at(self.sizes.before(step + 1) / self.sizes.batch - 1)

    def apply(self, optimizer: torch.optim.Optimizer, step: int) -> float:
        """Set every parameter group's learning rate for this step; returns it."""
        lr = self.lr(step)
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        return lr
