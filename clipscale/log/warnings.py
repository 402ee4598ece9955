"""Warnings during a run, with their likely cause: a pure function of its last records."""

import math
from collections.abc import Sequence
from statistics import mean, median

from clipscale.log.records import StepRecord

# Steps that are compared; and first steps that do not count, since kernels, compilers and workers start in them.
WINDOW, FIRST = 50, 10

# Uniformity above which features are taken for collapsed: two of them have a cosine of 0.99.
ALIKE = -0.05


def warnings_of(records: Sequence[StepRecord]) -> dict[str, str]:
    """Kind -> warning: what the newest record suggests, compared with the others: at most WINDOW, all after FIRST."""
    if len(records) <= FIRST:
        return {}
    warnings = {}
    last = records[-1]
    losses = [r["loss"] for r in records if math.isfinite(r["loss"])] or [last["loss"]]
    middle = median(losses)
    if last["loss"] > middle + max(0.1 * abs(middle), 10 * median(abs(loss - middle) for loss in losses)):
        warnings["spike"] = (
            f"the loss jumped from {middle:.3f} to {last['loss']:.3f}; likely causes: odd samples, too high an "
            "optim.lr, or with AdamW too high a beta2 (optim.betas)"
        )
    share = mean(r["data_wait_frac"] for r in records) if len(records) == WINDOW else 0
    if share > 0.2:
        warnings["starved"] = f"{share:.0%} of the time went by waiting for data: more data.workers, or a faster disk"
    uniformity = max(last.get("uniformity_image", -4), last.get("uniformity_text", -4))
    if uniformity > ALIKE and last["step"] >= 200:
        warnings["collapse"] = (
            f"the features of images or of texts are almost alike (uniformity {uniformity:.3f}): a lower optim.lr or a "
            "longer schedule.warmup"
        )
    return warnings
