"""How many cores feed a GPU: what one core was measured to give, against the samples that a GPU is predicted to take."""

import math
from typing import Any

import yaml

from clipscale.config.presets import conf_dir
from clipscale.config.sections import ModelConfig
from clipscale.config.tools import PlanConfig
from clipscale.hardware import HARDWARE
from clipscale.models.towers import forward_flops

GPUS = ("a100-80g", "h100-80g", "b200-180g")
PASSES = 4
"""Forward passes' worth of a cached step: two forward, and a backward that costs two."""
CAPTION = 24
"""Tokens at which an average caption is computed."""


def feeding(record: dict[str, Any]) -> list[str]:
    """For each kind of GPU and each measured size of the sources, the cores that it keeps busy: decoding, tokenising, all at once.

    The GPU's rate is its bf16 peak times `PlanConfig.utilisation`, an assumption, over the FLOPs of a cached step of `settings.model`.
    """
    model, rates = record["settings"].get("model"), _of_one_core(record)
    if not model or not rates:
        return []
    path = conf_dir() / "model" / f"{model}.yaml"
    flops = PASSES * sum(forward_flops(ModelConfig(**yaml.safe_load(path.read_text(encoding="utf-8"))), CAPTION))
    share, lines = PlanConfig().utilisation, []
    for gpu in GPUS:
        takes = share * HARDWARE[gpu].peak("bf16") / flops
        cores = ", ".join(
            f"{math.ceil(takes / rate)} cores for {side}-pixel JPEGs with {method}"
            for (side, method), rate in rates.items()
        )
        lines.append(f"one {gpu} takes {takes:,.0f} samples/s of {model} (predicted, {share:.0%} of its peak): {cores}")
    return lines


def _of_one_core(record: dict[str, Any]) -> dict[tuple[int, str], float]:
    """(side, method) -> whole samples a second: pixels (or the loader's part of decode=gpu) and tokens, one after another."""
    medians = {(row["kind"], row["side"], row["method"]): row["per_s"]["median"] for row in record["rows"]}
    tokens = next(
        (rate for (kind, _, method), rate in medians.items() if (kind, method) == ("tokens", "clipscale")), None
    )
    wanted = {"decode": ("decode=exact",), "loader": ("decode=gpu",)}
    return {
        (side, method): 1 / (1 / rate + 1 / tokens)
        for (kind, side, method), rate in medians.items()
        if tokens and method in wanted.get(kind, ()) and str(side) in record["settings"]["stream"].split(",")
    }
