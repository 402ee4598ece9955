"""Estimates the speed of a step: its operations over the share of the GPU's peak that such steps have reached.

b: samples of one rank, D: feature width.
"""

import math
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from clipscale.common import files
from clipscale.common.hardware import HARDWARE, Hardware
from clipscale.common.record import Record
from clipscale.config.sections import ModelConfig
from clipscale.loss.objective import OBJECTIVES
from clipscale.models.flops import PassFlops, image_flops, text_flops, trained_of
from clipscale.models.towers import ClipModel
from clipscale.tools.plan.dry_run import DryRun
from clipscale.tools.plan.settings import PlanConfig

UNKNOWN = Hardware([], 0, 0, 1e-12, 1e-12)
"""A CPU, whose peak no table has: the arithmetic gives operations instead of seconds, which a measurement divides."""
PLAIN_STEPS = files.read_yaml(Path(__file__).with_name("plain_steps.yaml"))
A100 = HARDWARE["a100-80g"]
SAME_SIZE = math.log(1.6)
"""Models of about the same size: the logarithm of their operations' ratio."""


class Share(NamedTuple):
    """The share of the GPU's peak that steps reach: where sources differ, the lowest and the highest."""

    what: str
    """The evidence."""
    low: float
    high: float


class StepTime:
    """The time of a run's step. Exchanges between ranks are left out: they overlap, or are parts in a thousand."""

    def __init__(
        self,
        config: PlanConfig,
        gpu: Hardware | None,
        run: DryRun,
        flops: tuple[PassFlops, PassFlops],
        second_pass: list[float],
    ) -> None:
        """`flops`: by `pass_flops`. `second_pass`: the share of each tower's chunks that have one."""
        self.config = config
        self.gpu = gpu or UNKNOWN
        image, text = flops
        self.forward = image.forward + text.forward * run.captions
        """FLOPs of a sample's first pass."""
        again = backward = trained = 0.0
        towers = zip(run.train_step.cache.trained, flops, (1, run.captions), second_pass)
        for second, passes, inputs, share in towers:
            if second:
                trained += 1
                again += inputs * passes.forward * share
                backward += inputs * (passes.backward + passes.forward * config.model.grad_checkpointing)
        sweeps = OBJECTIVES[config.loss.objective].sweeps if trained else 1
        loss = (sweeps + trained) * 2 * config.batch * run.captions * run.width
        self.plain = self.forward + loss + backward
        """FLOPs of a sample in a step without a second pass."""
        self.cached = self.plain + again

    def step_s(self, share: float) -> float:
        """Seconds at a share of the peak."""
        samples = self.config.batch / (self.config.gpus * self.config.nodes)
        return samples * self.cached / (share * self.gpu.peak(self.config.precision))

    def estimate(self) -> Record | None:
        """`time` of docs/plan.md; None: nothing is known."""
        known = self.measured()
        if known is None and self.gpu is not UNKNOWN:
            known = self.of_plain_steps()
        if known is None:
            return None
        share = math.sqrt(known.low * known.high)
        step = self.step_s(share)
        rate = self.config.batch / step
        return {
            "what": known.what,
            "share": share,
            "step_s": step,
            "samples_per_s": rate,
            "range": [rate * known.low / share, rate * known.high / share],
            "plain_samples_per_s": rate * self.cached / self.plain,
            "run_s": self.config.samples / rate if self.config.samples else None,
        }

    def of_plain_steps(self) -> Share:
        """By the plain steps that are nearest: in kind, in size, by the newest software, and in the chip's speed."""
        name = self.config.model.name
        chip = self.gpu.words[0]
        speeds = PLAIN_STEPS["chips"]
        least, most = speeds.get(chip, [self.gpu.half / A100.half] * 2)

        def distance(row: Record) -> tuple[bool, bool, int, float, float]:
            operations = abs(math.log(row["gflop"] * 1e9 / self.forward))
            chips = abs(math.log(speeds[row["chip"]][0] / least))
            return row["model"][:2] != name[:2], operations > SAME_SIZE, -row["year"], chips, operations

        row = min(PLAIN_STEPS["images_per_s"], key=distance)
        slow, fast = speeds[row["chip"]]
        alike = speeds.get(chip) == [slow, fast]
        least, most = (1, 1) if alike else (least / fast, most / slow)
        taken = "" if chip == row["chip"] else f", {chip} taken as {least:.3g} to {most:.3g} times as fast"
        low, high = row["rates"]
        what = f"{low} to {high} images/s of {row['model']} in plain steps on an {row['chip']} of {row['year']}"
        peak_rate = self.gpu.half * 1e12 / (3e9 * row["gflop"])
        return Share(f"known, {what} ({row['source']}){taken}", low * least / peak_rate, high * most / peak_rate)

    def measured(self) -> Share | None:
        """The newest measurement on such a machine among the runs here, of the same model before any other."""
        measured = []
        for path in Path("runs").glob("*/plan.json"):
            with suppress(OSError, ValueError, KeyError, TypeError):  # a run that goes on, or has failed
                plan = files.read_json(path)
                share = float(plan["compared"]["step"]["share"])
                if plan["hardware"] == self.config.hardware:
                    same = plan["model"] == self.config.model.name
                    measured.append((same, path.stat().st_mtime, f"measured in {path.parent}, {plan['model']}", share))
        if not measured:
            return None
        *_, what, share = max(measured)
        return Share(what, share, share)


def pass_flops(config: ModelConfig, model: ClipModel) -> tuple[PassFlops, PassFlops]:
    """FLOPs of a picture and of a caption of the whole context, as published runs have it. `model`: by `config`."""
    image, text = trained_of(model.image.encoder), trained_of(model.text.encoder)
    return image_flops(config, image), text_flops(config, text)
