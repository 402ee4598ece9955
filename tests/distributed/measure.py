"""Counts what FSDP2 sends and holds in a step, by the stage of `launch.zero`.

    python -m tests.distributed.measure ranks=2 chunks=8 layers=4 width=64 precision=bf16

It prints a table: collectives and bytes of one step on one rank, and the bytes of whole weights and gradients between
two chunks.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from clipscale.config.sections import ModelConfig
from clipscale.distributed.fsdp import ShardedTower, reshard, sharded
from clipscale.distributed.world import World
from clipscale.loss.api import contrastive_loss
from clipscale.models.towers import ClipModel, build_model
from clipscale.report.table import TextTable
from clipscale.step.grad_cache import GradCache
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
PIXELS, TOKENS = 12, 20
GATHER, SUM = "all-gathers", "reduce-scatters"


class Collectives(TorchDispatchMode):
    """Counts the calls of FSDP2's collectives, and the bytes that this rank puts in."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.bytes = {GATHER: 0, SUM: 0}, {GATHER: 0, SUM: 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = {"_allgather_base_": GATHER, "_reduce_scatter_base_": SUM}.get(func._schema.name.split("::")[1])
        if name:
            self.calls[name] += 1
            self.bytes[name] += args[1].nbytes
        return func(*args, **(kwargs or {}))


def small_model(layers: int = 2, width: int = 32) -> ClipModel:
    """The same weights everywhere."""
    torch.manual_seed(0)
    architecture = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": PIXELS, "layers": layers, "width": width, "head_width": 16, "patch_size": 3},
        "text_cfg": {"context_length": TOKENS, "vocab_size": 50, "width": width, "heads": 2, "layers": layers},
    }
    return build_model(ModelConfig(name="small", architecture=architecture, init_scale=5.0))


def inputs(rank: int, samples: int) -> tuple[Tensor, Tensor]:
    """A rank's pixels and tokens."""
    g = torch.Generator().manual_seed(1 + rank)
    pixels = torch.randint(0, 256, (samples, 3, PIXELS, PIXELS), dtype=torch.uint8, generator=g)
    return pixels, torch.randint(1, 50, (samples, TOKENS), generator=g)


def held(tower: nn.Module) -> tuple[int, int]:
    """Bytes of whole weights and of their gradients. FSDP2 keeps the latter aside while a weight is in shards."""
    weights = sum(p.nbytes for p in tower.parameters() if not isinstance(p, DTensor))
    groups = [group for part in sharded(tower) for group in part._get_fsdp_state()._fsdp_param_groups]
    whole = [getattr(one, "_unsharded_param", None) for group in groups for one in group.fsdp_params]
    return weights, sum(p.grad.nbytes for p in whole if p is not None and p.grad is not None)


def step(
    rank: int,
    ranks: int,
    stage: int,
    chunks: int,
    layers: int = 2,
    width: int = 32,
    half: str = "",
    steps: int = 1,
) -> dict[str, Any]:
    """The last step of one rank, over `chunks` chunks of two samples for each tower, with ShardedTower's `stage`.

    Stage 0: FSDP2 as it is by itself, summing gradients with the last chunk alone.
    """
    model, world = small_model(layers, width), World(rank, ranks, CPU)
    dtype = getattr(torch, half) if half else None

    def autocast() -> torch.autocast:
        return torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None)

    batch = inputs(rank, 2 * chunks)
    with torch.no_grad(), autocast():  # one after the other, without FSDP2
        alone = [torch.cat([tower(part) for part in x.split(2)]) for tower, x in zip((model.image, model.text), batch)]
    wrapped = [world.wrap(tower, "fsdp", stage or 3, dtype or torch.float32) for tower in (model.image, model.text)]
    towers: Sequence[Any] = wrapped
    if not stage:
        assert all(isinstance(tower, ShardedTower) for tower in towers)
        towers = [tower.module for tower in towers]

    def loss(u: Tensor, v: Tensor) -> Tensor:
        return contrastive_loss(u, v, model.logit_scale.exp())

    cache = GradCache(towers, loss, chunks=2, autocast=autocast)
    found: dict[str, Any] = {}

    def after_chunk(tower: int, rows: int) -> None:
        weights, gradients = held(towers[tower])
        found["whole weights"] = max(found.get("whole weights", 0), weights)
        found["whole gradients"] = max(found.get("whole gradients", 0), gradients)

    for _ in range(steps):
        model.zero_grad()
        found.clear()
        counted = Collectives()
        with counted:
            features = cache.encode(*batch)
        cache.backward(cache.loss(*features))
        cache.after_chunk = after_chunk
        with counted:
            cache.replay()
        cache.after_chunk = lambda tower, rows: None
    found |= {**counted.calls, f"{GATHER} bytes": counted.bytes[GATHER], f"{SUM} bytes": counted.bytes[SUM]}
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert not any(held(tower)[0] for tower in towers), "no weights are whole between steps"
    reshard(model)
    return found | {
        "same features": all(torch.equal(*pair) for pair in zip(features, alone)),
        "gradients": {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()},
    }


def measured(rank: int, ranks: int, cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [step(rank, ranks, **case) for case in cases]


def main(words: Sequence[str]) -> None:
    """Print one row for each stage."""
    given = dict(word.split("=") for word in words)
    ranks, sizes = int(given.pop("ranks", 2)), {"chunks": 8, "layers": 4, "width": 64}
    half = {"bf16": "bfloat16", "fp16": "float16"}.get(given.pop("precision", "fp32"), "")
    sizes |= {name: int(value) for name, value in given.items()}
    stages = {"FSDP2 by itself": 0, "launch.zero=3": 3, "launch.zero=2": 2, "launch.zero=1": 1}
    cases = [{**sizes, "stage": stage, "half": half if stage else ""} for stage in stages.values()]
    keys = [GATHER, f"{GATHER} bytes", SUM, f"{SUM} bytes", "whole weights", "whole gradients"]
    rows = [
        [name, *(f"{result[key]:,}" for key in keys)]
        for name, result in zip(stages, run_ranks(measured, ranks, cases)[0])
    ]
    print(TextTable(["", *keys], [rows]).markdown())


if __name__ == "__main__":
    main(sys.argv[1:])
