"""What the weights of a step in chunks move on a GPU, and its launches, counted without a device.

    python benchmarks/chunks.py models=vit-b16,vit-l14 chunks=256,64

Both passes of one chunk of each tower run on tensors without memory (`traffic.py`). First by autograd alone: it casts
every weight in every pass, and adds a gradient that it has cast. Then as `clipscale train` does it: weights are cast
once a step, and products add to the float32 gradient. Launches of casts and additions of weights and of their gradients
are counted apart. Matrix products and attention are left out, but for the gradient
that a product adds to: 8 bytes of a weight. Bytes are affine in a chunk's samples; what remains at none is what weights
move. Captions are as long as the context, on which the number of operations does not depend.
"""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from measure import Row, main, model_preset
from torch import Tensor, nn
from traffic import CHUNKS, CPU, Counter, random_inputs
from words import counts

from clipscale.models.towers import build_model
from clipscale.step.cache.cast_weights import CastWeights, layers_to_cast
from clipscale.step.precision import Precision
from clipscale.tools.plan.memory_tracker import cuda_autocast, without_memory

DEFAULTS = {
    "models": "vit-b32,vit-b16,vit-l14",  # presets of conf/model
    "precision": "bf16",  # or fp16
    "chunks": "256,64",
    "batch": "4k",  # pairs of a step
    "out": "runs/bench",
}
# Who casts the weights for the passes of a chunk: autograd alone in each pass, or the cache once.
CAST_BY = "autograd", "once"
# Bytes of a weight that is read in float32 and written in half precision.
CAST = 6


class WeightCounter(Counter):
    """Counts also casts and additions whose result has the shape of a parameter: of weights and their gradients."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.shapes = {p.shape for p in tower.parameters()}
        self.casts = 0
        self.additions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        name = func.overloadpacket.__name__
        if isinstance(out, Tensor) and out.shape in self.shapes:
            self.casts += name == "_to_copy"
            self.additions += name in ("add", "add_")
        return out


def passes(tower: nn.Module, inputs: Tensor, precision: Precision, *, once: bool) -> WeightCounter:
    """Both passes of one chunk of several, not the first: gradients are there. `once`: weights are cast already."""
    cast_weights = CastWeights()
    if once:
        cast_weights.start_step(tower, precision.autocast, 2)
    for p in tower.parameters():
        p.grad = torch.empty_like(p)
    counter = WeightCounter(tower)

    def add_weight_grad(total: Tensor, a: Tensor, b: Tensor) -> None:
        counter.operations += 1
        counter.moved["add"] += 2 * total.nbytes

    with patch("clipscale.models.linear.add_weight_grad", add_weight_grad), counter, cuda_autocast():
        with torch.no_grad(), precision.autocast(), cast_weights.in_pass(builds_graph=False, is_last_backward=False):
            tower(inputs)
        with precision.autocast(), cast_weights.in_pass(builds_graph=True, is_last_backward=False):
            features = tower(inputs)
        features.backward(torch.empty_like(features))
    tower.zero_grad()
    return counter


def measure(model: str, precision: str, chunks: list[int], batch: int) -> list[Row]:
    """Counts for both towers together: MB of a chunk's weights, its operations, those that cast and add weights, and GB
    of steps by their chunks."""
    casts_to = Precision.set_up(precision, CPU)
    row: Row = {}
    with without_memory(), cuda_autocast():
        clip = build_model(model_preset(model))
        towers = {"image": clip.image, "text": clip.text}
        cast = [layer.weights() for tower in towers.values() for layer, _ in layers_to_cast(tower, casts_to.autocast)]
        of_cast = CAST * sum(x.numel() for weights in cast for x in weights if x is not None)
        for cast_by in CAST_BY:
            less, more = (
                [
                    passes(tower, random_inputs(clip, n)[name], casts_to, once=cast_by == "once")
                    for name, tower in towers.items()
                ]
                for n in CHUNKS
            )
            small, large = (sum(sum(each.moved.values()) for each in counters) for counters in (less, more))
            of_sample = (large - small) / (CHUNKS[1] - CHUNKS[0])
            weights = small - CHUNKS[0] * of_sample
            row[cast_by] = {"weights_mb": round(weights / 1e6, 1), "sample_mb": round(of_sample / 1e6, 1)}
            for launches in ("operations", "casts", "additions"):
                row[cast_by][launches] = sum(getattr(each, launches) for each in more)
            row[cast_by]["step_gb"] = {
                size: round((-(-batch // size) * weights + (cast_by == "once") * of_cast) / 1e9, 2) for size in chunks
            }
    return [row]


def plan(settings: SimpleNamespace) -> tuple[str, list[Row]]:
    common: dict[str, Any] = {"precision": settings.precision, "chunks": counts(settings.chunks)}
    common["batch"] = counts(settings.batch)[0]
    return "chunks", [{"model": name, **common} for name in settings.models.split(",")]


def both(form: str, *keys: Any) -> Any:
    """A cell with the figures of both, `CAST_BY`."""

    def cell(row: Row) -> str:
        values = []
        for cast_by in CAST_BY:
            value = row[cast_by]
            for key in keys:
                value = value[key]
            values.append(form.format(value))
        return " -> ".join(values)

    return cell


COLUMNS = {
    "model": lambda row: row["model"],
    "MB of a chunk's weights": both("{:,.0f}", "weights_mb"),
    "operations of a chunk": both("{:,}", "operations"),
    "casts of weights": both("{:,}", "casts"),
    "additions of gradients": both("{:,}", "additions"),
    "GB of weights in a step of 4k, by samples of a chunk": lambda row: "; ".join(
        f"{size}: " + " -> ".join(f"{row[cast_by]['step_gb'][size]:.1f}" for cast_by in CAST_BY)
        for size in row["once"]["step_gb"]
    ),
}

if __name__ == "__main__":
    main(DEFAULTS, plan, measure, COLUMNS)
