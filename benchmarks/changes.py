"""What each change to the towers' forward pass gains: a plain step with all of them, and with one of them taken back.

    python benchmarks/changes.py device=cuda precision=bf16 model=vit-b16 batch=768

All are timed in one process, one after another in every round, so that the device's clock is the same for all.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from measure import Meter, Row, main, ms, spread
from open_clip.transformer import LayerNorm
from step import Step
from torch import Tensor, nn

from clipscale.models import lean

DEFAULTS = {
    "model": "tiny",  # a preset of conf/model
    "batch": 64,
    "precision": "fp32",  # or bf16 (autocast)
    "device": "auto",
    "repeats": 8,
    "out": "runs/bench",
}


def transposed_first(block: lean.LeanBlock, projected: Tensor, count: int) -> tuple[Tensor, ...]:
    """`LeanBlock.heads` as it was: the backward pass stacks transposed gradients and copies them."""
    samples, length, _ = projected.shape
    shape = samples, length, count, block.attn.num_heads, -1
    return projected.view(shape).permute(2, 0, 3, 1, 4).unbind()


TAKEN_BACK: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "q, k and v taken apart before they are transposed": lambda: patch.object(
        lean.LeanBlock, "heads", transposed_first
    ),
    "patches by a product": lambda: patch.object(lean.LeanPatches, "forward", nn.Conv2d.forward),
    "flash attention for captions": lambda: patch.object(
        lean, "sdpa_kernel", lambda *backends, **options: nullcontext()
    ),
    "half-precision norms": lambda: patch.object(lean.LeanNorm, "forward", LayerNorm.forward),
}


def plan(settings: SimpleNamespace) -> tuple[str, list[Row]]:
    return f"changes-{settings.device}", [{key: value for key, value in vars(settings).items() if key != "out"}]


def measure(**job: Any) -> list[Row]:
    """A row for each change that is taken back."""
    step = Step("plain", job["model"], job["batch"], job["precision"], job["device"])
    inputs = step.inputs(job["batch"])
    meters: dict[str, list[Meter]] = {change: [] for change in TAKEN_BACK}
    for _ in range(job["repeats"] + 1):
        for change, without in TAKEN_BACK.items():
            step.clear()
            with without():
                meter = Meter(step.device)
                step.run(inputs, meter)
            meters[change].append(meter)
    rows = []
    for change, (_, *timed) in meters.items():  # the first warms up
        seconds = spread([meter.seconds["step"] for meter in timed])
        rows.append({"taken_back": change, "step_s": seconds, "peak_bytes": timed[0].growth()})
    return rows


def compare(rows: list[Row]) -> None:
    """Milliseconds that a step takes more without the change."""
    whole = next((row for row in rows if row.get("taken_back") == "none"), None)
    for row in rows:
        if whole and "step_s" in row:
            row["gain_ms"] = 1e3 * (row["step_s"]["median"] - whole["step_s"]["median"])


COLUMNS = {
    "taken back": lambda row: row["taken_back"],
    "step ms": ms("step_s"),
    "least ms": lambda row: f"{1e3 * row['step_s']['min']:,.1f}",
    "gain ms": lambda row: f"{row['gain_ms']:,.1f}",
    "peak MiB": lambda row: f"{row['peak_bytes'] / 2**20:,.0f}",
}

if __name__ == "__main__":
    main(DEFAULTS, plan, measure, COLUMNS, compare)
