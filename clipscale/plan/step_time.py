"""Estimates the time of a step: operations over a share of the GPU's peak, and bytes over the slowest link.

b: samples of one rank, P: ranks, D: feature width.
"""

import csv
import json
import math
from pathlib import Path
from statistics import median
from typing import Any

from clipscale.common.hardware import HARDWARE, Hardware
from clipscale.config.tools import PlanConfig
from clipscale.data.loader.captions import GRAIN
from clipscale.models.flops import forward_flops
from clipscale.plan.dry_run import DryRun
from clipscale.plan.memory import IMAGE_BYTES
from clipscale.step.captions import expected_to_cut

LAP_BYTES, GRADIENT_BYTES = 2, 4
"""Bytes that a GPU sends for each number of each column of the batch: in bf16 with each sweep over the scores, and a
float32 gradient once (docs/loss.md)."""
CAPTION_TOKENS, NETWORK = 20, 25.0
"""Assumed: mean tokens of a caption, and GB/s from a GPU to another node."""
EPOCH = 407_332_084
"""Pairs of LAION-400M, for a run whose length is not given in samples."""
MOST_GPUS = 4096
UNKNOWN = Hardware((), 0, 0, 1e-12, 1e-12, math.inf)
"""A CPU, whose peak no table has: the arithmetic gives operations instead of seconds, which a measurement divides."""
Estimate = dict[str, Any]


class StepTime:
    """The time of a run's step on any number of GPUs. The ring's transfers overlap the loss's arithmetic."""

    def __init__(self, config: PlanConfig, gpu: Hardware | None, run: DryRun, kept: list[float]) -> None:
        """`kept`: share of each tower's chunks whose graphs are kept."""
        self.config, self.gpu = config, gpu or UNKNOWN
        image, text = forward_flops(config.model, caption_width(config, run))
        self.forward = (0 if run.state.stored else image, text)
        self.trained = [tower.trained for tower in run.state.cache.towers]
        # Forward and backward passes cost 1 and 2 forward passes, and checkpointing one more.
        passes = 4 if config.model.grad_checkpointing else 3
        self.replay = sum(flops * (passes - share) * on for flops, share, on in zip(self.forward, kept, self.trained))
        self.width, self.gradients = run.width, sum(p.nbytes for p in run.state.trained)

    def step(self, share: float = 1.0, gpus: int = 0, nodes: int = 0) -> dict[str, float]:
        """Seconds of a step by part and in all, at a share of the peak, on `gpus` of each of `nodes` (0: as set)."""
        config, gpus, nodes = self.config, gpus or self.config.gpus, nodes or self.config.nodes
        ranks, rate = gpus * nodes, share * self.gpu.peak(self.config.precision.name)
        batch = config.batch // ranks
        link = 1e9 * (NETWORK if nodes > 1 else self.gpu.link)
        pairs = batch * config.batch * (ranks if config.loss.exchange == "replicated" else 1)
        sweeps = 1 if config.loss.objective == "sigmoid" or not any(self.trained) else 2
        seconds = {
            "encode_s": batch * sum(self.forward) / rate,
            "loss_s": (sweeps + sum(self.trained)) * 2 * pairs * self.width / rate,
            "ring_s": (sweeps * LAP_BYTES + GRADIENT_BYTES) * batch * (ranks - 1) * self.width / link,
            "replay_s": batch * self.replay / rate,
            "gradients_s": 2 * (ranks - 1) / ranks * self.gradients / link,  # the sum over ranks
        }
        step = sum(seconds.values()) - min(seconds["loss_s"], seconds["ring_s"])
        hours = config.samples / config.batch * step / 3600 if config.samples else None
        return seconds | {"step_s": step, "samples_per_s": config.batch / step, "hours": hours}

    def estimates(self, measured: Estimate | None) -> list[Estimate]:
        """The times that are known of, the best evidence first: `what`, `share` of the peak, and those of `step`."""
        arithmetic = {"what": "what the arithmetic allows", "share": 1.0}
        if self.config.utilisation:
            known = [{"what": "utilisation=", "share": self.config.utilisation}]
        elif self.gpu is UNKNOWN:
            known = []
        else:
            known = [*self.published(), arithmetic]
        if measured:  # the share that it reached of what the arithmetic allowed it
            known.insert(0, {"what": f"measured, {measured['run']}", "share": measured["share"]})
        return [each | self.step(each["share"]) for each in known]

    def published(self) -> list[Estimate]:
        """The nearest of the published runs, by model, GPU and their number, and the slowest of those with its model."""
        runs = list(csv.DictReader(Path(__file__).with_name("published_runs.csv").open(encoding="utf-8")))
        flops, gpus = sum(self.forward) or 1, self.config.gpus * self.config.nodes

        def distance(run: dict[str, str]) -> float:
            peak = next(entry for name, entry in HARDWARE.items() if name.startswith(run["gpu"] + "-")).half
            ratios = (flops / 1e9 / float(run["gflops"]), self.gpu.half / peak, (gpus / int(run["gpus"])) ** 0.1)
            return sum(abs(math.log(ratio)) for ratio in ratios)

        runs.sort(key=lambda run: float(run["share"]))
        nearest = min(runs, key=distance)
        same = [run for run in runs if run["model"] == nearest["model"]]
        middle = median(float(run["share"]) for run in runs)
        titles = (
            (nearest, "published, nearest"),
            (same[0], f"published, slowest of {len(same)} with this model; all {len(runs)}: median {middle:.1%}"),
        )
        return [
            {
                "what": f"{title}: {run['model']}, {run['per_gpu']} samples on each of {run['gpus']} x {run['gpu']}, "
                f"{run['samples_per_s_per_gpu']} samples/s each ({run['source']})",
                "share": float(run["share"]),
            }
            for run, title in titles
        ]

    def scaling(self, share: float) -> list[dict[str, Any]]:
        """The same batch on 1 to 4,096 GPUs of nodes of 8: a step's time, the network's share of it, and an epoch's
        hours and bytes: sent by each GPU, and read by all.
        """
        rows, samples = [], self.config.samples or EPOCH
        for gpus in (2**i for i in range(MOST_GPUS.bit_length())):
            if self.config.batch % gpus == 0:
                each = self.step(share, min(gpus, 8), max(1, gpus // 8))
                network = each["gradients_s"] + max(0, each["ring_s"] - each["loss_s"])
                link = 1e9 * (NETWORK if gpus > 8 else self.gpu.link)
                steps = samples / self.config.batch
                rows.append(
                    {
                        "gpus": gpus,
                        "local_batch": self.config.batch // gpus,
                        "step_s": each["step_s"],
                        "samples_per_s": each["samples_per_s"],
                        "network_share": network / each["step_s"],
                        "epoch_hours": steps * each["step_s"] / 3600,
                        "epoch_sent_bytes": steps * (each["ring_s"] + each["gradients_s"]) * link,
                        "epoch_read_bytes": samples * IMAGE_BYTES,
                    }
                )
        return rows


def earlier(config: PlanConfig) -> Estimate | None:
    """The newest measurement on such a machine among the runs here, of the same model before any other."""
    found = []
    for path in Path("runs").glob("*/plan.json"):
        try:
            plan = json.loads(path.read_text(encoding="utf-8"))
            share = plan["compared"]["step"]["share"]
        except (OSError, ValueError, KeyError, TypeError):  # a run that goes on, or has failed
            continue
        if plan["hardware"] == config.hardware and share:
            key = (plan["model"] == config.model.name, path.stat().st_mtime)
            found.append((key, {"run": str(path.parent), "share": share}))
    return max(found, key=lambda each: each[0])[1] if found else None


def caption_width(config: PlanConfig, run: DryRun) -> int:
    """Tokens at which the text tower computes a caption, on average: the whole context, or fewer of sorted captions."""
    if not (config.data.sort_captions and expected_to_cut(run.state.model.text.encoder)):
        return run.context_length
    return min(run.context_length, round(CAPTION_TOKENS + GRAIN / 2))
