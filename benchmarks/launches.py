"""What the host issues for a chunk of captions in a step in chunks: eager, and with compiled blocks, counted.

    python benchmarks/launches.py models=vit-b16,vit-l14 width=24

Both passes of the text tower run on tensors without memory, with weights that are cast once a step. Eager: operations
of torch. Compiled: the fused kernels into which inductor schedules the blocks for an H100 (`inductor.py`), and their
calls of libraries; what is outside of the blocks stays eager. How long a launch takes is not known from this.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import torch
from chunks import passes
from inductor import Call, Fused, block_calls, counting
from measure import Row, main, model_preset
from torch import Tensor
from torch._inductor import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode
from traffic import CPU, Counter

from clipscale.models.towers import build_model
from clipscale.step.cache.cast_weights import CastWeights
from clipscale.step.precision import Precision
from clipscale.tools.plan.memory_tracker import cuda_autocast

DEFAULTS = {
    "models": "vit-b32,vit-b16,vit-l14",  # presets of conf/model
    "precision": "bf16",  # or fp16
    "chunk": 256,  # captions
    "width": 24,  # tokens of a caption
    "out": "runs/bench",
}


def both_passes(calls: list[Call], cast_weights: CastWeights, precision: Precision) -> None:
    """A pass of the blocks without a graph, and one with a graph and its backward pass."""
    for call in calls:
        with cuda_autocast(), precision.autocast():
            with torch.no_grad(), cast_weights.in_pass(builds_graph=False, is_last_backward=False):
                call(call.first)
            with cast_weights.in_pass(builds_graph=True, is_last_backward=False):
                out = call(call.first)
        out.backward(torch.empty_like(out))


def measure(model: str, precision: str, chunk: int, width: int) -> list[Row]:
    casts_to = Precision.set_up(precision, CPU)
    with torch.device("meta"):
        clip = build_model(model_preset(model))
    with FakeTensorMode(allow_non_fake_inputs=True):
        tower = clip.to_empty(device=CPU).text
        tokens = torch.empty(chunk, width, dtype=torch.long)
        eager = passes(tower, tokens, casts_to, once=True).operations
        calls = block_calls(tower, tower.encoder, tokens, precision)
        cast_weights = CastWeights()
        cast_weights.start_step(tower, casts_to.autocast, 2)
        for p in tower.parameters():
            p.grad = torch.empty_like(p)
        counter = Counter()

        def add_weight_grad(total: Tensor, a: Tensor, b: Tensor) -> None:
            counter.operations += 1

        with patch("clipscale.models.linear.add_weight_grad", add_weight_grad), counter:
            both_passes(calls, cast_weights, casts_to)
        fused = Fused()
        backend = partial(compile_fx.compile_fx, inner_compile=counting(fused))
        torch._dynamo.reset()
        for call in calls:
            call.block.compile(backend=backend, dynamic=False)
        both_passes(calls, cast_weights, casts_to)
    compiled = fused.kernels + fused.library_calls
    return [
        {
            "eager": eager,
            "eager_blocks": counter.operations,
            "kernels": fused.kernels,
            "library_calls": fused.library_calls,
            "compiled": eager - counter.operations + compiled,
        }
    ]


def plan(settings: SimpleNamespace) -> tuple[str, list[Row]]:
    common = {key: value for key, value in vars(settings).items() if key not in ("models", "out")}
    return "launches", [{"model": name, **common} for name in settings.models.split(",")]


COLUMNS: dict[str, Callable[[Row], str]] = {
    "model": lambda row: row["model"],
    "operations of a chunk of captions": lambda row: f"{row['eager']:,}",
    "in the blocks": lambda row: f"{row['eager_blocks']:,}",
    "blocks compiled: kernels": lambda row: f"{row['kernels']:,}",
    "and calls of libraries": lambda row: f"{row['library_calls']:,}",
    "a chunk with compiled blocks": lambda row: f"{row['compiled']:,}",
}

if __name__ == "__main__":
    main(DEFAULTS, plan, measure, COLUMNS)
