"""Warnings during a run, with their likely cause: a pure function of its last records."""

import math
from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

WINDOW, FIRST = 50, 10
"""Steps that are looked at, and the first ones, which start kernels, compilers and workers."""
SPIKES_FROM = 2.3
"""The RMS of g / sqrt(v) from which AdamW's loss spikes some steps later (Wortsman et al. 2023, arXiv 2304.13013)."""
PHASES = {
    "waited": "waiting for data",
    "encode_s": "encode",
    "loss_s": "loss",
    "replay_s": "replay",
    "optim_s": "optim",
}

NEEDED = {"batch", "loss", "lr", "logit_scale", "data_wait_frac", "step_s", *PHASES} - {"waited"}


def warnings_of(records: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> dict[str, str]:
    """Kind -> a line, for what the newest of at most WINDOW records, which come after the FIRST, lets one suspect.

    `settings`: the run's, nested.
    """
    found, last, full = {}, records[-1], len(records) == WINDOW
    if len(records) <= FIRST or NEEDED - last.keys():
        return {}
    waited = [{"waited": r["data_wait_frac"] * r["step_s"]} for r in records]
    parts = [{**r, **w, "encode_s": r["encode_s"] - w["waited"]} for r, w in zip(records, waited)]
    usual = {name: last["batch"] * median(p[name] / p["batch"] for p in parts) for name in ("step_s", *PHASES)}
    if last["step_s"] > max(3 * usual["step_s"], usual["step_s"] + 1):
        most = max(PHASES, key=lambda name: parts[-1][name] - usual[name])
        cause = (
            "a slow disk or network, or few data.workers" if most == "waited" else "other work, a slow rank, throttling"
        )
        taken = f"{last['step_s']:.1f} s instead of {usual['step_s']:.1f} s"
        found["slow"] = f"the step took {taken}, most of it {PHASES[most]}; likely cause: {cause}"
    losses = [r["loss"] for r in records if math.isfinite(r["loss"])] or [last["loss"]]
    middle = median(losses)
    if last["loss"] > middle + max(0.1 * abs(middle), 10 * median(abs(loss - middle) for loss in losses)):
        worst = max(records[-10:], key=lambda r: r.get("update_rms") or 0)
        cause = "odd samples, or too high an optim.lr"
        if (worst.get("update_rms") or 0) > SPIKES_FROM:
            outran = f"squared gradients outran their average at step {worst['step']} (RMS {worst['update_rms']:.1f})"
            cause = f"{worst['update_rms_tensor']}, whose {outran}; optim.name=stableadamw or a smaller beta2 helps"
        found["spike"] = f"the loss jumped from {middle:.3f} to {last['loss']:.3f}; likely cause: {cause}"
    clamp = settings.get("optim", {}).get("max_logit_scale", 100)
    if full and min(r["logit_scale"] for r in records) > 0.9999 * clamp:
        why = "usual late in a long run; early, optim.lr is too high"
        found["clamp"] = f"the logit scale stays at optim.max_logit_scale={clamp:g}: {why}"
    if full and (share := mean(r["data_wait_frac"] for r in records)) > 0.2:
        found["starved"] = (
            f"{share:.0%} of {WINDOW} steps went by waiting for data: more data.workers, or a faster disk"
        )
    softmax = settings.get("loss", {}).get("objective", "softmax") == "softmax"
    warm = full and last["lr"] <= records[0]["lr"] and last["step"] >= 200
    if softmax and warm and all(abs(r["loss"] - math.log(r["batch"])) < 0.01 * math.log(r["batch"]) for r in records):
        why = "as if all features were alike: a lower optim.lr or a longer schedule.warmup"
        found["collapse"] = f"the loss stays at ln(batch) = {math.log(last['batch']):.2f}, {why}"
    return found
