"""Optimizers (timm's factory), parameter groups and learning-rate schedules."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class OptimConfig:
    """The optimizer, by timm's name."""

    name: str = "adamw"
    """Any of timm's optimizers: adamw, adafactorbv, lion, lamb, muon, ..."""
    lr: float = 5e-4
    weight_decay: float = 0.2
    """Applied to matrices only: gains, biases and the logit scale are never decayed."""
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float | None = 1e-6
    """None: the optimizer's own default."""
    clip_norm: float | None = None
    """Largest global gradient norm; None: no clipping."""
    max_logit_scale: float = 100.0
    """The logit scale is clamped to at most this after each step."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of timm's factory."""


@dataclass
class ScheduleConfig:
    """The learning rate over the run."""

    name: str = "cosine"
    """`cosine`, or `constant` with an optional linear cooldown at the end."""
    warmup: str = "2000"
    """Linear warm-up: steps (`2000`), a share of the run (`5%`) or epochs (`0.5ep`)."""
    cooldown: str = "0"
    """Linear cooldown at the end of a constant schedule, in the same forms."""
    final: float = 0.0
    """Learning rate at the end, as a share of the peak."""
