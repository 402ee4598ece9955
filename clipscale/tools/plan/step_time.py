"""Estimates the speed of a step: its operations over the share of the GPU's peak that plain steps have reached.

Exchanges between ranks are left out: they overlap, or are parts in a thousand.
"""

import math
from pathlib import Path
from typing import TypedDict

from clipscale.common import files
from clipscale.common.hardware import HARDWARE, Hardware
from clipscale.loss.objective import OBJECTIVES
from clipscale.tools.plan.assumed import ASSUMED
from clipscale.tools.plan.dry_run import DryRun
from clipscale.tools.plan.settings import PlanConfig

PLAIN_STEPS = files.read_yaml(Path(__file__).with_name("plain_steps.yaml"))
# Models have about the same size if the logarithm of their operations' ratio is at most this.
SAME_SIZE = math.log(1.6)
# A chip reaches at most this many times the share of its peak that was measured on another chip.
MAX_SHARE_RATIO = 1.2
# The least seconds that a host needs to issue one operation of torch: the dispatcher and a launch take 5 to 8 us.
LAUNCH_S = 6e-6
# The estimate needs a model with this many operations in a sample's forward pass: a tenth of the smallest known
# model's. A smaller one waits for the launches of its kernels.
MIN_FLOPS = min(row["gflop"] for row in PLAIN_STEPS["images_per_s"]) * 1e8


class StepTime(TypedDict):
    """`time` of docs/plan.md."""

    # The evidence, in words.
    what: str
    # The share of the peak rate that the evidence shows.
    share: float
    step_s: float
    # The least time that the host needs to issue the step's operations. Chunks may be too small to hide it.
    issued_s: float
    samples_per_s: float
    # The lowest and the highest rate.
    range: list[float]
    plain_samples_per_s: float
    # Picture side in pixels -> cores of a node that decode at this rate.
    cores: dict[int, float]
    run_s: float | None


class PlainStep(TypedDict):
    """A measured or published plain step of plain_steps.yaml."""

    model: str
    chip: str
    year: int
    # Operations of a forward pass.
    gflop: float
    # The lowest and the highest, in images a second.
    rates: list[float]
    source: str


def step_time(
    config: PlanConfig,
    gpu: Hardware | None,
    dry_run: DryRun,
    replayed_share: list[float],
    *,
    in_chunks: bool,
    launches: float,
) -> tuple[float, StepTime | None]:
    """The fewest seconds that the arithmetic takes at the GPU's peak rate, and `time` of docs/plan.md.

    A CPU's peak is in no table: for it, operations instead of seconds, and None. `time` is also None for a model much
    smaller than all known ones.

    `replayed_share`: by tower, the share of inputs with a second pass. `in_chunks`: whether there is more than one
    chunk. `launches`: operations that the host of a GPU issues in the passes.
    """
    image, text = dry_run.flops
    writes = dry_run.decoder_flops
    forward = image.forward + text.forward * dry_run.texts_per_sample + writes.forward
    plain = float(forward + writes.backward)
    second = 0.0
    inputs_per_sample = 1, dry_run.texts_per_sample
    has_second = dry_run.trained
    if dry_run.trains_captioner:  # one encoder of both towers
        has_second = [True, True]
    for trained, passes, inputs, share in zip(has_second, dry_run.flops, inputs_per_sample, replayed_share):
        if not trained:
            continue
        plain += inputs * passes.backward
        if config.model.grad_checkpointing and passes.backward:
            plain += inputs * passes.forward
        second += inputs * passes.forward * share
    sweeps = OBJECTIVES[config.loss.objective].num_sweeps if any(has_second) else 1
    scores = 2 * config.batch * dry_run.texts_per_sample * (dry_run.model.embed_dim + sum(config.loss.sizes))
    plain += (sweeps + sum(has_second)) * scores
    operations = config.batch / config.ranks * (plain + second)
    min_seconds = operations / (gpu.peak(config.precision) if gpu else 1)
    if gpu is None or forward < MIN_FLOPS:
        return min_seconds, None
    evidence, low, high = plain_share(config.model.name, gpu, forward)
    share = math.sqrt(low * high)
    if in_chunks:
        low *= PLAIN_STEPS["in_chunks"]
    issued_s = LAUNCH_S * launches

    def rate(share: float) -> float:
        return config.batch / max(min_seconds / share, issued_s)

    return min_seconds, {
        "what": evidence,
        "share": share,
        "step_s": max(min_seconds / share, issued_s),
        "issued_s": issued_s,
        "samples_per_s": rate(share),
        "range": [rate(low), rate(high)],
        "plain_samples_per_s": config.batch * share / min_seconds * (plain + second) / plain,
        "cores": {side: rate(share) / config.nodes / decoded for side, decoded in ASSUMED.decoded_per_s.items()},
        "run_s": config.samples / rate(share) if config.samples else None,
    }


def plain_share(model: str, gpu: Hardware, forward: float) -> tuple[str, float, float]:
    """The share of the GPU's peak that the most similar plain step has reached: the evidence, the lowest, the highest.

    These make a step similar, in this order: the kind of its model, new software, its size, the chip's speed. The share
    of another chip is scaled by the known ratio of the two chips' rates, up to MAX_SHARE_RATIO times the highest.
    `forward`: operations of a sample.
    """
    speeds = PLAIN_STEPS["chips"]
    least, most = speeds.get(gpu.words[0], [gpu.half / HARDWARE["a100-80g"].half] * 2)

    def distance(row: PlainStep) -> tuple[bool, int, bool, float, float]:
        chip = abs(math.log(speeds[row["chip"]][0] / least))
        operations = abs(math.log(row["gflop"] * 1e9 / forward))
        return row["model"][:2] != model[:2], -row["year"], operations > SAME_SIZE, chip, operations

    row: PlainStep = min(PLAIN_STEPS["images_per_s"], key=distance)
    slow, fast = speeds[row["chip"]]
    there = next(chip.half for chip in HARDWARE.values() if chip.words[0] == row["chip"])
    factors = sorted(speed * there / gpu.half for speed in (least / slow, most / fast))
    shares = [rate * 3e-3 * row["gflop"] / there for rate in row["rates"]]
    most_share = MAX_SHARE_RATIO * shares[1]
    low = min(shares[0] * factors[0], most_share)
    high = min(shares[1] * factors[1], most_share)
    rates = "{} to {}".format(*row["rates"])
    evidence = f"known, {rates} images/s of {row['model']} in plain steps on an {row['chip']} of {row['year']}"
    return f"{evidence} ({row['source']})", low, high
