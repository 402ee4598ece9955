"""Warnings during a run, with their likely cause: a pure function of its last records."""

import math
from collections.abc import Sequence
from statistics import mean, median

from clipscale.run_folder.records import StepRecord

# Steps that are compared.
WINDOW_STEPS = 50
# The first steps of a start do not count, because kernels, compilers and workers start in them.
WARM_UP_STEPS = 10
# Above this uniformity features have collapsed: two of them have a cosine of 0.99.
COLLAPSED_UNIFORMITY = -0.05


def warnings_of(records: Sequence[StepRecord]) -> dict[str, str]:
    """The warnings about the newest record, compared with those before it: name -> text.

    `records` are at most WINDOW_STEPS, all after WARM_UP_STEPS.
    """
    if len(records) <= WARM_UP_STEPS:
        return {}
    warnings = {}
    newest = records[-1]
    losses = [record["loss"] for record in records if math.isfinite(record["loss"])] or [newest["loss"]]
    middle = median(losses)
    if newest["loss"] > middle + max(0.1 * abs(middle), 10 * median(abs(loss - middle) for loss in losses)):
        warnings["spike"] = (
            f"the loss jumped from {middle:.3f} to {newest['loss']:.3f}; likely causes: odd samples, too high an "
            "optim.lr, or with AdamW too high a beta2 (optim.betas)"
        )
    share = mean(record["data_wait_frac"] for record in records) if len(records) == WINDOW_STEPS else 0
    if share > 0.2:
        warnings["starved"] = f"{share:.0%} of the time went by waiting for data: more data.workers, or a faster disk"
    uniformity = max(newest.get("uniformity_image", -4), newest.get("uniformity_text", -4))
    if uniformity > COLLAPSED_UNIFORMITY and newest["step"] >= 200:
        warnings["collapse"] = (
            f"the features of images or of texts are almost alike (uniformity {uniformity:.3f}): a lower optim.lr or a "
            "longer schedule.warmup"
        )
    return warnings
