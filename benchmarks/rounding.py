"""How far the gradients of a step in half precision are from those in float64, by who casts the weights and sums.

    python benchmarks/rounding.py model=tiny batch=64 chunks=32,8,4

A step in chunks under autocast on a CPU, with random weights, pictures and captions, beside the same in one chunk in
float64. `autograd`: it casts every weight in every pass, and rounds each chunk's gradient before it is added. `once`:
weights are cast once a step, as `clipscale train` does it on a CPU. `float32`: and products of weights' gradients are
added without being rounded, as on a GPU.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from measure import Row, main, model_preset
from torch import Tensor
from words import counts

from clipscale import GradCache, contrastive_loss
from clipscale.models.linear import CastLinear
from clipscale.models.towers import ClipModel, build_model
from clipscale.step.cache.cast_weights import CastWeights
from clipscale.step.chunk_sizes import random_captions, random_pixels
from clipscale.step.precision import Precision

DEFAULTS = {
    "model": "tiny",  # a preset of conf/model
    "batch": 64,
    "chunks": "32,8,4",
    "precision": "bf16",  # or fp16
    "out": "runs/bench",
}
CPU = torch.device("cpu")


def add_in_float32(total: Tensor, a: Tensor, b: Tensor) -> None:
    total += a.float() @ b.float()


SUMMED_BY: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autograd": lambda: patch.object(CastWeights, "start_step", lambda *_: None),
    "once": nullcontext,
    "float32": lambda: patch("clipscale.models.linear.add_weight_grad", add_in_float32),
}


def gradients(model: ClipModel, inputs: tuple[Tensor, Tensor], chunk: int, precision: Precision) -> dict[str, Tensor]:
    """The gradients of a step, in float64."""

    def loss(u: Tensor, v: Tensor) -> Tensor:
        return contrastive_loss(u, v, model.logit_scale.exp())

    model.zero_grad()
    GradCache([model.image, model.text], loss, chunks=chunk, autocast=precision.autocast).step(*inputs)
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def error(actual: Tensor, exact: Tensor) -> float:
    return float((actual - exact).norm() / exact.norm())


def measure(model: str, batch: int, chunk: int, precision: str) -> list[Row]:
    """Relative distances: the median over the matrices of linear layers, and that of all gradients together."""
    torch.manual_seed(0)
    clip = build_model(model_preset(model))
    inputs = random_pixels(clip, CPU, batch), random_captions(clip, CPU, batch)
    casts_to = Precision.set_up(precision, CPU)
    matrices = [f"{name}.weight" for name, module in clip.named_modules() if isinstance(module, CastLinear)]
    found = {}
    for way, summed in SUMMED_BY.items():
        with summed():
            found[way] = gradients(clip, inputs, chunk, casts_to)
    exact = gradients(clip.double(), inputs, batch, Precision.set_up("fp32", CPU))
    row: Row = {}
    for way, actual in found.items():
        together = [torch.cat([each[name].flatten() for name in exact]) for each in (actual, exact)]
        row[way] = {
            "matrices": median(error(actual[name], exact[name]) for name in matrices),
            "all": error(*together),
        }
    return [row]


def plan(settings: SimpleNamespace) -> tuple[str, list[Row]]:
    common = {"model": settings.model, "batch": settings.batch, "precision": settings.precision}
    return "rounding", [{**common, "chunk": chunk} for chunk in counts(settings.chunks)]


def cell(of: str, way: str) -> Callable[[Row], str]:
    return lambda row: f"{row[way][of]:.2e}"


COLUMNS: dict[str, Callable[[Row], str]] = {"chunk": lambda row: str(row["chunk"])}
for name in ("matrices", "all"):
    COLUMNS |= {f"{name}: {way}": cell(name, way) for way in SUMMED_BY}

if __name__ == "__main__":
    main(DEFAULTS, plan, measure, COLUMNS)
