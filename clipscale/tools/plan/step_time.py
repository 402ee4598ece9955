"""Estimates the time of a step: operations over a share of the GPU's peak, and bytes over the slowest link.

b: samples of one rank, P: ranks, D: feature width.
"""

import csv
import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from clipscale.common.hardware import HARDWARE, Hardware
from clipscale.config.tools import PlanConfig
from clipscale.data.loader.captions import GRAIN
from clipscale.loss.objectives import OBJECTIVES
from clipscale.models.families import family_of
from clipscale.models.flops import PassFlops, image_flops, text_flops
from clipscale.tools.plan import ASSUMED
from clipscale.tools.plan.dry_run import TOWERS, DeepDryRun, DryRun

UNKNOWN = Hardware((), 0, 0, 1e-12, 1e-12, math.inf)
"""A CPU, whose peak no table has: the arithmetic gives operations instead of seconds, which a measurement divides."""
Estimate = dict[str, Any]


class StepTime:
    """The time of a run's step on any number of GPUs. The ring's transfers overlap the loss's arithmetic."""

    def __init__(self, config: PlanConfig, gpu: Hardware | None, run: DeepDryRun, kept: list[float]) -> None:
        """`kept`: share of each tower's chunks whose graphs are kept."""
        base = run.base
        self.config, self.gpu = config, gpu or UNKNOWN
        image_trains, text_trains = base.state.trains
        image = PassFlops(0, 0) if base.state.stored else image_flops(config.model, image_trains)
        text = text_flops(config.model, text_trains, caption_width(config, base))
        self.forward = (image.forward, text.forward * base.captions)
        backward = (image.backward, text.backward * base.captions)
        # A frozen trunk has no second pass.
        towers = zip(TOWERS, base.state.cache.towers)
        self.trained = [tower.trained and name not in base.state.trunks for name, tower in towers]
        again = 2 if config.model.grad_checkpointing else 1  # checkpointing costs a forward pass more
        self.replay = 0.0
        for tower, trained in enumerate(self.trained):
            if trained:
                self.replay += self.forward[tower] * (again - kept[tower]) + backward[tower]
        self.width = base.width
        self.captions = base.captions
        self.gradients = run.trained_bytes

    def step(self, share: float = 1.0, gpus: int = 0, nodes: int = 0) -> dict[str, Any]:
        """Seconds of a step by part and in all, at a share of the peak, on `gpus` of each of `nodes` (0: as set)."""
        config, gpus, nodes = self.config, gpus or self.config.gpus, nodes or self.config.nodes
        ranks, rate = gpus * nodes, share * self.gpu.peak(self.config.precision.name)
        batch, link = config.batch // ranks, 1e9 * (ASSUMED.network if nodes > 1 else self.gpu.link)
        pairs = batch * config.batch * self.captions * (ranks if config.loss.exchange == "replicated" else 1)
        sweeps = OBJECTIVES[config.loss.objective].sweeps if any(self.trained) else 1
        columns = batch * self.captions * (ranks - 1) * self.width
        ring = (sweeps * ASSUMED.lap + ASSUMED.gradient) * columns
        sums = 2 * (ranks - 1) / ranks * self.gradients  # of the gradients over ranks
        seconds = {
            "encode_s": batch * sum(self.forward) / rate,
            "loss_s": (sweeps + sum(self.trained)) * 2 * pairs * self.width / rate,
            "ring_s": ring / link,
            "replay_s": batch * self.replay / rate,
            "gradients_s": sums / link,
        }
        hidden = min(seconds["loss_s"], seconds["ring_s"])
        step, steps = sum(seconds.values()) - hidden, (config.samples or ASSUMED.epoch) / config.batch
        network = (seconds["ring_s"] + seconds["gradients_s"] - hidden) / step
        more = {"step_s": step, "samples_per_s": config.batch / step, "hours": steps * step / 3600}
        return seconds | more | {"network_share": network, "sent_bytes": steps * (ring + sums)}

    def estimates(self) -> list[Estimate]:
        """The times that are known of, the best evidence first: `what`, `share` of the peak, and those of `step`."""
        known = self.measured()
        if self.config.utilisation:
            known.append(("utilisation=", self.config.utilisation))
        elif self.gpu is not UNKNOWN:
            known += [*self.published(), ("what the arithmetic allows", 1.0)]
        return [{"what": what, "share": share} | self.step(share) for what, share in known]

    def measured(self) -> list[tuple[str, float]]:
        """The newest measurement on such a machine among the runs here, of the same model before any other."""
        found = []
        for path in Path("runs").glob("*/plan.json"):
            with suppress(OSError, ValueError, KeyError, TypeError):  # a run that goes on, or has failed
                plan = json.loads(path.read_text(encoding="utf-8"))
                estimate = f"measured in {path.parent}, {plan['model']}", float(plan["compared"]["step"]["share"])
                if plan["hardware"] == self.config.hardware:
                    found.append((plan["model"] == self.config.model.name, path.stat().st_mtime, estimate))
        return [max(found)[2]] if found else []

    def published(self) -> list[tuple[str, float]]:
        """The published run nearest in model, GPU and number of GPUs, and the slowest with its model."""
        with Path(__file__).with_name("published_runs.csv").open(encoding="utf-8") as file:
            runs = list(csv.DictReader(file))

        def distance(run: dict[str, str]) -> float:
            peak = next(entry.half for name, entry in HARDWARE.items() if name.startswith(run["gpu"] + "-"))
            model, gpus = sum(self.forward) / 1e9 / float(run["gflops"]), self.config.gpus * self.config.nodes
            ratios = (model or 1, self.gpu.half / peak, (gpus / int(run["gpus"])) ** 0.1)
            return sum(abs(math.log(ratio)) for ratio in ratios)

        nearest = min(runs, key=distance)
        slowest = min((run for run in runs if run["model"] == nearest["model"]), key=lambda run: float(run["share"]))
        words = "{model}, {per_gpu} samples on each of {gpus} x {gpu}, {samples_per_s_per_gpu} samples/s each; {source}"
        titles = {"nearest": nearest, "slowest of this model": slowest}
        return [(f"published, {what}: {words.format(**run)}", float(run["share"])) for what, run in titles.items()]


def caption_width(config: PlanConfig, run: DryRun) -> int:
    """Tokens at which the text tower computes a caption, on average: the whole context, or fewer of sorted captions."""
    encoder = run.state.model.text.encoder
    if not family_of(encoder).cuts_captions(encoder):
        return run.context_length
    return min(run.context_length, round(ASSUMED.caption_tokens + GRAIN / 2))
