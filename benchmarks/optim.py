"""Processor time of an optimizer's step on a CPU: as `clipscale train` builds it, as timm's factory does, and fused.

    OMP_NUM_THREADS=1 python benchmarks/optim.py model=tiny optimizers=adamw,muon

All take the same steps, with random gradients, one after another in every round; each is compared with ours.
"""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import timm.optim
import torch
from measure import Row, main, model_preset, spread

from clipscale.common.errors import UserError
from clipscale.common.text import did_you_mean
from clipscale.config.sections import OptimConfig
from clipscale.models.towers import ClipModel, build_model
from clipscale.step.optim import build_optimizer, parameter_groups

DEFAULTS = {
    "model": "tiny",  # a preset of conf/model
    "optimizers": "adamw,muon",
    "repeats": 9,
    "out": "runs/bench",
}
# Rates and decays of Gaussian gradients of this size change little.
GRADIENT = 1e-3
CONFIGS = {
    "adamw": OptimConfig(),
    "muon": OptimConfig(name="muon", lr=5e-3, betas=(0.9, 0.95), eps=None),  # as of the demo
}
Build = Callable[[ClipModel, OptimConfig], torch.optim.Optimizer]


def as_timm(**options: Any) -> Build:
    """timm's optimizer over the same groups of parameters."""

    def build(model: ClipModel, config: OptimConfig) -> torch.optim.Optimizer:
        named: dict[str, Any] = {"betas": config.betas, **options}
        if config.eps is not None:
            named["eps"] = config.eps
        groups: Any = parameter_groups(model, config, {})
        return timm.optim.create_optimizer_v2(groups, opt=config.name, lr=config.lr, momentum=config.betas[0], **named)

    return build


WAYS: dict[str, dict[str, Build]] = {
    "adamw": {"ours": build_optimizer, "timm's": as_timm(), "foreach": as_timm(foreach=True)},
    "muon": {"ours": build_optimizer, "timm's": as_timm()},
}


def measure(model: str, optimizer: str, repeats: int) -> list[Row]:
    """Milliseconds of a step by each way, and how far its weights are from ours at the end."""
    models, optimizers = {}, {}
    for way, build in WAYS[optimizer].items():
        torch.manual_seed(0)
        models[way] = build_model(model_preset(model))
        for p in models[way].parameters():
            p.grad = GRADIENT * torch.randn_like(p)
        optimizers[way] = build(models[way], CONFIGS[optimizer])
    seconds: dict[str, list[float]] = {way: [] for way in optimizers}
    for _ in range(repeats + 1):
        for way, stepped in optimizers.items():
            start = time.process_time()
            stepped.step()
            seconds[way].append(time.process_time() - start)
    ours = dict(models["ours"].named_parameters())
    return [
        {
            "way": way,
            "parameters": sum(p.numel() for p in ours.values()),
            "step_s": spread(timed),  # the first warms up
            "difference": max(
                float((p - ours[name]).detach().abs().max()) for name, p in models[way].named_parameters()
            ),
        }
        for way, (_, *timed) in seconds.items()
    ]


def plan(settings: SimpleNamespace) -> tuple[str, list[Row]]:
    """Raises UserError for an optimizer that is not compared."""
    names = settings.optimizers.split(",")
    for name in names:
        if name not in WAYS:
            raise UserError(f"optimizers={name}: known are {', '.join(WAYS)}{did_you_mean(name, WAYS)}")
    return "optim", [{"model": settings.model, "optimizer": name, "repeats": settings.repeats} for name in names]


COLUMNS: dict[str, Callable[[Row], str]] = {
    "optimizer": lambda row: row["optimizer"],
    "by": lambda row: row["way"],
    "step, ms of a core": lambda row: f"{1e3 * row['step_s']['median']:.1f}",
    "least": lambda row: f"{1e3 * row['step_s']['min']:.1f}",
    "most": lambda row: f"{1e3 * row['step_s']['max']:.1f}",
    "largest difference from ours": lambda row: f"{row['difference']:.1e}",
}

if __name__ == "__main__":
    main(DEFAULTS, plan, measure, COLUMNS)
