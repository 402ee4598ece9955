"""All settings of a training run in one tree, its length, and its name."""

import os
import re
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Self

from clipscale.common.errors import UserError
from clipscale.common.units import format_count, parse_count
from clipscale.config import sections
from clipscale.config.data import DataConfig
from clipscale.config.model import ModelConfig
from clipscale.config.setting import UNSET, section, setting, with_setting
from clipscale.config.stages import STAGE_SETTINGS, StageConfig
from clipscale.loss.objective import OBJECTIVES

# Epochs of a run without a length in its settings.
EPOCHS = 32.0


@dataclass(frozen=True)
class TrainConfig:
    """`clipscale train`: train a model, or resume a run."""

    batch: int = setting(256, "Pairs per optimizer step, over all processes.", least=1)
    samples: int | None = setting(None, "Length of the run in pairs.", least=1)
    epochs: float | None = setting(None, "Length of the run in epochs of the data; 32 if no length is given.", above=0)
    stages: list[StageConfig] = setting(
        [],
        "Parts of the run with their own samples, batch, image_size, context_length, patch_dropout, lr, warmup, "
        "final, loss, and optimizer (`continue`, `restart`): [{samples:1M,image_size:112},{samples:64k}].",
    )
    run: str = setting(
        "", "NAME of the folder under runs/, or a path; empty: a name from the time, the model and the batch."
    )
    resume: str = setting(
        "auto",
        "`auto`: from the folder's newest checkpoint; `none`: refuse a folder that has one; or another run, or the "
        "path of a checkpoint.",
    )
    seed: int = setting(0, "Random seed of weights, sample order, crops and dropout.", least=0)
    device: str = setting("auto", sections.DEVICE_HELP, choices=sections.DEVICES)
    plan: bool = setting(
        True,
        "Predict memory and time before the start, and refuse what cannot fit this machine.",
        changes_weights=False,
    )
    ema: float = setting(0.0, "Decay of a moving average of the weights (`0.9999`); 0: none.", least=0, below=1)
    offload: str = setting(
        "host",
        "Where the batch's pixels are between the passes: on the device (`none`), or in `host` memory.",
        choices=("none", "host"),
        changes_weights=False,
    )
    model: ModelConfig = section(ModelConfig)
    data: DataConfig = section(DataConfig)
    loss: sections.LossConfig = section(sections.LossConfig)
    caption: sections.CaptionConfig = section(sections.CaptionConfig)
    distill: sections.DistillConfig = section(sections.DistillConfig)
    cache: sections.CacheConfig = section(sections.CacheConfig, changes_weights=False)
    optim: sections.OptimConfig = section(sections.OptimConfig)
    schedule: sections.ScheduleConfig = section(sections.ScheduleConfig)
    precision: str = setting("bf16", sections.PRECISION_HELP, choices=sections.PRECISIONS)
    eval: sections.EvalConfig = section(sections.EvalConfig)
    log: sections.LogConfig = section(sections.LogConfig, changes_weights=False)
    checkpoint: sections.CheckpointConfig = section(sections.CheckpointConfig, changes_weights=False)
    launch: sections.LaunchConfig = section(sections.LaunchConfig, changes_weights=False)
    sweep: sections.SweepConfig = section(sections.SweepConfig, changes_weights=False)
    expected: dict[str, object] = setting(
        {},
        "What a run should end with: SET.METRIC: [LOWEST, HIGHEST] in per cent, and the `source`; a line at the "
        "end says where it lies.",
    )

    @property
    def trains_captioner(self) -> bool:
        """Whether a captioner's decoder is trained. Its towers and its decoder are then one encoder of pairs."""
        return self.model.is_captioner and self.caption.weight > 0

    @property
    def has_logit_bias(self) -> bool:
        """Whether a stage of the run has a loss with a logit bias."""
        return any(OBJECTIVES[each.loss.objective].needs_bias for each in self.stage_configs)

    @property
    def stage_configs(self) -> list[Self]:
        """The configuration of each stage of the run. A run without stages has one, with its own configuration."""
        stage_configs = []
        for stage in self.stages:
            stage_config = self
            for key, name in STAGE_SETTINGS.items():
                value = getattr(stage, key)
                if value is not UNSET:
                    stage_config = with_setting(stage_config, name, value)
            stage_configs.append(stage_config)
        return stage_configs or [self]

    @property
    def total_samples(self) -> int | None:
        """The samples of all stages of the run; without stages, `samples`. Raises UserError if the lengths contradict
        each other."""
        lengths = [stage.samples for stage in self.stages]
        if not lengths:
            return self.samples
        own_lengths = [length for length in lengths if length is not None]
        if own_lengths != lengths or self.epochs is not None or self.samples not in (None, sum(own_lengths)):
            raise UserError(
                f"stages: their samples are {lengths}, and the run has samples={self.samples} epochs={self.epochs}; "
                "give every stage its own, and leave out the run's"
            )
        return sum(own_lengths)


def samples_of(config: TrainConfig, epoch_samples: int | None) -> int:
    """The samples of a run, or of a stage. `epoch_samples`: of one epoch of the data; None if unknown.

    Raises UserError for less than a batch, and for a length in epochs if `epoch_samples` is unknown.
    """
    batch = config.batch
    samples = config.samples
    if samples is not None:
        if samples < batch:
            raise UserError(f"samples={samples} is less than one batch={batch}; nothing would be trained")
        return samples
    epochs = config.epochs or EPOCHS
    if epoch_samples is None:
        raise UserError(
            f"epochs={epochs:g}: the samples of an epoch are not known; run `clipscale data index`, or give samples=N"
        )
    samples = round(epochs * epoch_samples)
    if samples < batch:
        length = f"epochs={epochs:g}" if config.epochs else f"{epochs:g} epochs, the default"
        raise UserError(
            f"batch={batch}: the {epoch_samples} samples in data.train make {samples} in {length}, less than one "
            "batch; take a smaller batch, or more epochs"
        )
    return samples


# Environment variable: the most samples of a run.
MAX_SAMPLES = "CLIPSCALE_MAX_SAMPLES"


def capped_by_environment(config: TrainConfig) -> TrainConfig:
    """Limit the run's samples to those that MAX_SAMPLES allows, and at least to a batch. Stages are not changed.

    A length in epochs becomes MAX_SAMPLES itself: the samples of an epoch are not known here. Raises UserError.
    """
    if MAX_SAMPLES not in os.environ or config.stages:
        return config
    try:
        most = parse_count(os.environ[MAX_SAMPLES])
    except ValueError as error:
        raise UserError(f"{MAX_SAMPLES}: {error}") from error
    return replace(config, samples=max(config.batch, min(config.samples or most, most)), epochs=None)


def with_length(config: TrainConfig) -> TrainConfig:
    """Fill in the run's length where the settings give none, and limit it as the environment says. Raises UserError."""
    config = capped_by_environment(config)
    samples = config.total_samples
    epochs = EPOCHS if samples is None and config.epochs is None else config.epochs
    return replace(config, samples=samples, epochs=epochs)


def default_run_name(config: TrainConfig) -> str:
    """The name of a run whose settings give none: from the time, the model and the batch."""
    model = re.sub(r"[^A-Za-z0-9.-]+", "-", config.model.name).lower()
    return f"{datetime.now():%Y%m%d-%H%M%S}-{model}-{format_count(config.batch)}"
