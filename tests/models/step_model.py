"""A model of the encoders' time on a GPU: every operation that eager torch launches takes max(FLOP / RATE, bytes / BANDWIDTH).

Bytes are those of an operation's operands, which it reads, and results, which it writes; views are free. Launches, the optimizer, the
loss and communication are left out. An assumption, which no GPU has confirmed. `python -m tests.models.step_model` prints the table of
docs/step.md.
"""

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from open_clip.transformer import LayerNorm
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from clipscale.config.sections import ModelConfig
from clipscale.models.lean import LeanNorm
from clipscale.models.towers import ClipModel, build_model
from clipscale.plan.memory_tracker import cuda_autocast, without_memory

RATE, BANDWIDTH = 650e12, 4.3e12
"""FLOP/s of bf16 products and bytes/s that an H200 is assumed to reach."""
MODELS = ("ViT-B-32", "ViT-B-16", "ViT-L-14", "ViT-H-14")
CHUNK = 256
ROWS = {
    "cache": ("lean", True),
    "cast norms": ("cast norms", True),
    "unsorted": ("lean", False),
    "unlean": ("open_clip", True),
    "neither": ("open_clip", False),
}
"""Steps with the gradient cache: forward passes, and whether captions are sorted and cut. Cast norms: lean, with layer norms as
autocast runs them."""


class Clock(TorchDispatchMode):
    """`seconds` and `launches` of what runs inside."""

    seconds, launches = 0.0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {id(x): x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        made = {id(x): x for x in tree_leaves(out) if isinstance(x, Tensor)}
        written = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
        storages = {id(x.untyped_storage()) for x in given.values()}
        if made and (written or any(id(x.untyped_storage()) not in storages for x in made.values())):
            moved = sum(x.numel() * x.element_size() for x in (*given.values(), *made.values()))
            count = flop_registry.get(func._overloadpacket)
            flops = count(*args, **(kwargs or {}), out_val=out) if count else 0
            self.seconds += max(flops / RATE, moved / BANDWIDTH)
            self.launches += 1
        return out


def lengths(count: int = 4096) -> np.ndarray:
    """Tokens of captions: lognormal with mean 20 and 99th percentile 64, at most 77."""
    # mean = exp(m + s^2 / 2), 99th percentile = exp(m + 2.326 s)
    s = 2.326 - math.sqrt(2.326**2 - 2 * math.log(64 / 20))
    m = math.log(20) - s * s / 2
    return np.clip(np.random.default_rng(0).lognormal(m, s, count).round(), 3, 77)


def autocast() -> torch.autocast:
    """As `precision=bf16` has it: a new one for each pass over a chunk."""
    return torch.autocast("cpu", torch.bfloat16)


def tower_seconds(tower: torch.nn.Module, inputs: Tensor, *, cached: bool) -> float:
    """Of one chunk: forward and backward, and with the cache the first pass."""
    with Clock() as clock:
        if cached:
            with torch.no_grad(), autocast():
                tower(inputs)
        with autocast():
            y = tower(inputs)
        y.backward(torch.empty_like(y))
    return clock.seconds


def built(name: str, towers: str) -> ClipModel:
    model = build_model(ModelConfig(name=name, lean=towers != "open_clip"))
    for module in model.modules() if towers == "cast norms" else ():
        if type(module) is LeanNorm:
            module.__class__ = LayerNorm
    return model


@cache
def sample_seconds(name: str, towers: str, cached: bool) -> tuple[float, dict[int, float]]:
    """Seconds of an image, and of a caption by the width at which it is computed."""
    widths = (8, 16, 24, 32, 48, 77)
    with without_memory(), cuda_autocast():
        model = built(name, towers)
        side = model.image_size
        image = tower_seconds(model.image, torch.empty(CHUNK, 3, side, side, dtype=torch.uint8), cached=cached)
        texts = {}
        for width in widths if cached else widths[-1:]:
            model.zero_grad()
            texts[width] = tower_seconds(model.text, torch.ones(CHUNK, width, dtype=torch.int32), cached=cached) / CHUNK
    return image / CHUNK, texts


def predicted(name: str) -> dict[str, float]:
    """Time of each row as a share of open_clip's plain step on whole contexts; and the plain step in microseconds a pair."""
    image, texts = sample_seconds(name, "open_clip", False)
    plain = image + texts[77]
    rows = {"plain_us": 1e6 * plain}
    widths = np.minimum(8 * np.ceil(lengths() / 8), 77)
    for row, (towers, cut) in ROWS.items():
        image, texts = sample_seconds(name, towers, True)
        known = sorted(texts)
        text = float(np.interp(widths, known, [texts[w] for w in known]).mean()) if cut else texts[77]
        rows[row] = (image + text) / plain
    return rows


def table() -> str:
    head = f"| model | open_clip, plain | {' | '.join(reversed(ROWS))} |\n|---|--:|" + len(ROWS) * "--:|" + "\n"
    return head + "".join(
        f"| {name} | {row['plain_us']:.0f} us a pair | "
        + " | ".join(f"{row[key]:.2f}" for key in reversed(ROWS))
        + " |\n"
        for name, row in ((name, predicted(name)) for name in MODELS)
    )


if __name__ == "__main__":
    print(table(), end="")
