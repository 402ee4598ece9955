"""Estimates the time of a step: operations over a share of the GPU's peak, and bytes over the slowest link.

b: samples of one rank, P: ranks, D: feature width.
"""

import json
import math
from contextlib import suppress
from pathlib import Path

from clipscale.common.hardware import Hardware
from clipscale.config.sections import ModelConfig
from clipscale.data.loader.captions import GRAIN
from clipscale.loss.objectives import OBJECTIVES
from clipscale.models.families import family_of
from clipscale.models.flops import PassFlops, image_flops, text_flops, trained_of
from clipscale.models.towers import ClipModel
from clipscale.tools.plan import ASSUMED
from clipscale.tools.plan.dry_run import TOWERS, DeepDryRun
from clipscale.tools.plan.settings import PlanConfig

UNKNOWN = Hardware([], 0, 0, 1e-12, 1e-12, math.inf)
"""A CPU, whose peak no table has: the arithmetic gives operations instead of seconds, which a measurement divides."""


class StepTime:
    """The time of a run's step. The ring's transfers overlap the loss's arithmetic."""

    def __init__(
        self,
        config: PlanConfig,
        gpu: Hardware | None,
        run: DeepDryRun,
        flops: tuple[PassFlops, PassFlops],
        second_pass: list[float],
    ) -> None:
        """`flops`: by `pass_flops`. `second_pass`: the share of each tower's chunks that have one."""
        base = run.base
        self.config = config
        self.gpu = gpu or UNKNOWN
        self.width = base.width
        self.captions = base.captions
        self.gradients = run.trained_bytes
        self.exchange = base.config.loss.exchange
        image, text = flops
        again = 2 if config.model.grad_checkpointing else 1
        self.encode = image.forward + text.forward * self.captions
        """FLOPs of a sample's first pass."""
        self.replay = 0.0
        self.trained = 0
        """Towers that train."""
        towers = zip(TOWERS, base.state.cache.towers, (image, text), (1, self.captions), second_pass)
        for name, tower, passes, inputs, share in towers:
            if tower.trained and name not in base.state.trunks:  # a frozen trunk has no second pass
                self.trained += 1
                self.replay += inputs * (passes.forward * (again - 1 + share) + passes.backward)

    def step(self, share: float) -> dict[str, float]:
        """Seconds of a step by part and in all, at a share of the peak."""
        config, captions = self.config, self.captions
        ranks = config.gpus * config.nodes
        batch = config.batch // ranks
        rate = share * self.gpu.peak(config.precision)
        link = 1e9 * (ASSUMED.network if config.nodes > 1 else self.gpu.link)
        pairs = batch * config.batch * captions * (ranks if config.loss.exchange == "replicated" else 1)
        sweeps = OBJECTIVES[config.loss.objective].sweeps if self.trained else 1
        seconds = {
            "encode_s": batch * self.encode / rate,
            "loss_s": (sweeps + self.trained) * 2 * pairs * self.width / rate,
            "ring_s": self.exchange_s(sweeps),
            "replay_s": batch * self.replay / rate,
            "gradients_s": 2 * (ranks - 1) / ranks * self.gradients / link,
        }
        step = sum(seconds.values()) - min(seconds["loss_s"], seconds["ring_s"])
        return seconds | {"step_s": step, "samples_per_s": config.batch / step}

    def exchange_s(self, sweeps: int) -> float:
        """Seconds in which a rank gets all other ranks' texts, and their gradients go back."""
        config = self.config
        gpus, nodes = config.gpus, config.nodes
        numbers = config.batch * self.captions * self.width
        size = (sweeps * ASSUMED.lap + ASSUMED.gradient) * numbers
        if nodes == 1:
            return size * (gpus - 1) / gpus / (1e9 * self.gpu.link)
        if self.exchange == "ring":  # all texts pass one network card
            return size * (gpus * nodes - 1) / (gpus * nodes) / (1e9 * ASSUMED.network)
        between = size * (nodes - 1) / nodes / gpus / (1e9 * ASSUMED.network)  # all cards share them
        return between + size * (gpus - 1) / gpus / (1e9 * self.gpu.link)

    def known(self) -> tuple[str, float] | None:
        """The best evidence of the share of the peak that such a step reaches, and the share."""
        if measured := self.measured():
            return measured
        if self.config.utilisation:
            return "utilisation=", self.config.utilisation
        return None if self.gpu is UNKNOWN else ("the median of published runs", ASSUMED.published_share)

    def measured(self) -> tuple[str, float] | None:
        """The newest measurement on such a machine among the runs here, of the same model before any other."""
        measured = []
        for path in Path("runs").glob("*/plan.json"):
            with suppress(OSError, ValueError, KeyError, TypeError):  # a run that goes on, or has failed
                plan = json.loads(path.read_text(encoding="utf-8"))
                share = float(plan["compared"]["step"]["share"])
                if plan["hardware"] == self.config.hardware:
                    same = plan["model"] == self.config.model.name
                    measured.append((same, path.stat().st_mtime, f"measured in {path.parent}, {plan['model']}", share))
        if not measured:
            return None
        *_, what, share = max(measured)
        return what, share


def pass_flops(config: ModelConfig, model: ClipModel) -> tuple[PassFlops, PassFlops]:
    """FLOPs of a picture and of an average caption. `model`: built by `config`."""
    image, text = trained_of(model.image.encoder), trained_of(model.text.encoder)
    return image_flops(config, image), text_flops(config, text, caption_width(model))


def caption_width(model: ClipModel) -> int:
    """Tokens at which the text tower computes a caption, on average: the whole context, or fewer of sorted captions."""
    encoder = model.text.encoder
    if not family_of(encoder).cuts_captions(encoder):
        return model.context_length
    return min(model.context_length, round(ASSUMED.caption_tokens + GRAIN / 2))
