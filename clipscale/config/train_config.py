"""All settings of a training run in one tree, their checks that need neither machine nor data, and their YAML form."""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from enum import Enum

import yaml

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.remote import check_copy_address
from clipscale.common.units import format_count, format_decimal, parse_count
from clipscale.config import sections
from clipscale.config.data import DataConfig
from clipscale.config.expected_bands import bands_of
from clipscale.config.model import ModelConfig
from clipscale.config.secrets import without_secrets
from clipscale.config.setting import UNSET, Section, differences, setting
from clipscale.config.stages import StageConfig, stage_configs_of, total_samples
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
    plan: bool = setting(True, "Predict memory and time before the start, and refuse what cannot fit this machine.")
    ema: float = setting(0.0, "Decay of a moving average of the weights (`0.9999`); 0: none.", least=0, below=1)
    offload: str = setting(
        "host",
        "Where the batch's pixels are between the passes: on the device (`none`), or in `host` memory.",
        choices=("none", "host"),
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: sections.LossConfig = field(default_factory=sections.LossConfig)
    caption: sections.CaptionConfig = field(default_factory=sections.CaptionConfig)
    distill: sections.DistillConfig = field(default_factory=sections.DistillConfig)
    cache: sections.CacheConfig = field(default_factory=sections.CacheConfig)
    optim: sections.OptimConfig = field(default_factory=sections.OptimConfig)
    schedule: sections.ScheduleConfig = field(default_factory=sections.ScheduleConfig)
    precision: str = setting("bf16", sections.PRECISION_HELP, choices=sections.PRECISIONS)
    eval: sections.EvalConfig = field(default_factory=sections.EvalConfig)
    log: sections.LogConfig = field(default_factory=sections.LogConfig)
    checkpoint: sections.CheckpointConfig = field(default_factory=sections.CheckpointConfig)
    launch: sections.LaunchConfig = field(default_factory=sections.LaunchConfig)
    sweep: sections.SweepConfig = field(default_factory=sections.SweepConfig)
    expected: dict[str, object] = setting(
        {},
        "What a run should end with: SET.METRIC: [LOWEST, HIGHEST] in per cent, and the `source`; a line at the "
        "end says where it lies.",
    )

    @property
    def trains_captioner(self) -> bool:
        """Whether a captioner's decoder is trained. Its towers and its decoder are then one encoder of pairs."""
        return self.model.is_captioner and self.caption.weight > 0


def check_divisible(batch: int, count: int, among: str, remedy: str = "") -> None:
    """Raise UserError for a batch that `count` processes cannot share evenly; the message calls them `among`."""
    if batch % count:
        raise UserError(f"batch={batch} cannot be shared evenly by {among}; choose a multiple of {count}{remedy}")


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


def batch_exceeds_data(config: TrainConfig, epoch_samples: int | None) -> str:
    """The warning for a batch larger than the data; empty for others. `epoch_samples`: as in `samples_of`."""
    batch = config.batch
    if not epoch_samples or batch <= epoch_samples or config.data.same is not None:
        return ""
    return (
        f"batch={batch} is larger than the {epoch_samples} pairs of data.train: each is {batch / epoch_samples:.3g} "
        f"times in every batch, as its own negatives; take batch={epoch_samples} or less, or data.same=caption, which "
        "leaves the copies out"
    )


# Most samples of a run -> the best batch in LAION's sweeps of that length (scaling-laws-for-comparison, NeurIPS 2025).
BEST_BATCHES = {12_800_000: 2048, 64_000_000: 4096, 128_000_000: 8192, 1_280_000_000: 16384}
# The largest batch that shows a gain in published runs of more samples. DataComp and LAION-2B took up to 90k.
LARGEST_PUBLISHED_BATCH = 1 << 18
# This many times the best batch cost next to nothing in those sweeps: 90k instead of 16k, 0.1 % of ImageNet.
HARMLESS_BATCH_RATIO = 5.5


def beyond_published(batch: int, samples: int | None) -> str:
    """The warning for a batch far larger than the best one of published sweeps for a run of this many samples.

    Empty if it is not, or if the number of samples is unknown.
    """
    if samples is None:
        return ""
    best = next((best for most, best in BEST_BATCHES.items() if samples <= most), None)
    if best and batch > HARMLESS_BATCH_RATIO * best:
        return (
            f"batch={format_count(batch)} for {format_decimal(samples)} samples: in published sweeps of that length "
            f"{format_count(best)} was best, and a larger "
            "batch makes too few steps; take a smaller one, or more samples"
        )
    if not best and batch > LARGEST_PUBLISHED_BATCH:
        most = format_count(LARGEST_PUBLISHED_BATCH)
        return (
            f"batch={format_count(batch)}: no published run shows a gain beyond {most}; a smaller one makes more steps"
        )
    return ""


def has_logit_bias(config: TrainConfig) -> bool:
    """Whether a stage of the run has a loss with a logit bias."""
    return any(OBJECTIVES[stage_config.loss.objective].needs_bias for stage_config in stage_configs_of(config))


def check_sigmoid(config: TrainConfig) -> None:
    """Raise UserError for the sigmoid loss without an initial bias."""
    name = config.loss.objective
    if OBJECTIVES[name].needs_bias and config.model.init_bias is None and not config.model.weights:
        raise UserError(f"loss.objective={name} needs its scale and bias: take loss=siglip, or give model.init_bias")


def check_across_sections(config: TrainConfig) -> None:
    """Raise UserError for the first mistake that spans sections. Each section checks its own settings."""
    check_data(config)
    if not config.model.weights:  # weights may bring a model
        check_captioner(config)
    bands_of(config.expected)
    if re.match(r"[a-z][a-z0-9+.-]+:/", config.run, re.IGNORECASE):
        raise UserError(
            f"run={config.run}: a run's folder is a path and no address; give run=NAME, and checkpoint.copy=ADDRESS "
            "for a copy there"
        )
    check_copy_address(config.checkpoint.copy)
    if config.checkpoint.best and not config.eval.every:
        raise UserError(f"checkpoint.best={config.checkpoint.best}: nothing is evaluated in between; give eval.every=N")
    if config.samples is not None and config.epochs is not None:
        raise UserError(
            f"samples={config.samples} and epochs={config.epochs}: give the length of the run with one of them"
        )
    if config.eval.weights == "ema" and not config.ema:
        raise UserError("eval.weights=ema: this run keeps no average; give ema=0.9999, or eval.weights=trained")
    if config.sweep.metric and not config.eval.has_sets:
        raise UserError(f"sweep.metric={config.sweep.metric}: nothing is evaluated; give eval.sets=FOLDER")
    width = config.model.description.get("embed_dim", math.inf)
    if any(size >= width for size in config.loss.sizes):
        raise UserError(f"loss.sizes={config.loss.sizes}: the features of this model have {width} numbers; give fewer")
    total_samples(config)
    procs = config.launch.procs
    for stage_config in stage_configs_of(config):
        check_divisible(stage_config.batch, procs or 1, f"launch.procs={procs} processes")
        check_sigmoid(stage_config)
        stage_config.schedule.check()
        if stage_config.samples is not None:
            samples_of(stage_config, None)


def check_data(config: TrainConfig) -> None:
    """Raise UserError if `data.train` is not set, or if settings of captions, keys, teachers and kernels conflict."""
    data = config.data
    if not data.train:
        raise UserError("data.train is not set; give shards, data.train='/data/{00000..00099}.tar', or take data=demo")
    if config.distill.teachers and (data.captions_per_step > 1 or data.negatives):
        raise UserError(
            "distill.teachers: a teacher has seen one caption of a picture; leave data.captions_per_step and "
            "data.negatives out"
        )
    if config.loss.backend == "triton" and data.same is not None:
        raise UserError(f"loss.backend=triton: its kernels do not take data.same={data.same}; take loss.backend=auto")
    if config.loss.backend == "triton" and data.captions_per_step > 1:
        raise UserError(
            f"loss.backend=triton: its kernels take one caption an image, and "
            f"data.captions_per_step={data.captions_per_step}; take loss.backend=auto"
        )


def check_captioner(config: TrainConfig) -> None:
    """Raise UserError for settings of captions that do not go with the model. The settings are complete."""
    weight = config.caption.weight
    if not config.model.is_captioner and weight != sections.CaptionConfig().weight:
        raise UserError(f"caption.weight={weight:g}: {config.model.name} has no decoder; take model=coca-b32")
    if not config.trains_captioner:
        return
    if config.data.captions_per_step > 1 or config.data.negatives:
        raise UserError(
            "data.captions_per_step and data.negatives: a captioner writes the one caption of a picture; leave them "
            "out, or train its contrast alone with caption.weight=0"
        )
    if len({*config.cache.sizes}) > 1:
        raise UserError(f"cache.chunk=[{','.join(config.cache.chunk)}]: a captioner's chunks are pairs; give one size")


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
    samples = total_samples(config)
    epochs = EPOCHS if samples is None and config.epochs is None else config.epochs
    return replace(config, samples=samples, epochs=epochs)


def default_run_name(config: TrainConfig) -> str:
    """The name of a run whose settings give none: from the time, the model and the batch."""
    model = re.sub(r"[^A-Za-z0-9.-]+", "-", config.model.name).lower()
    return f"{datetime.now():%Y%m%d-%H%M%S}-{model}-{format_count(config.batch)}"


# At this learning rate or more, AdamW makes pretrained weights forget what they learnt.
PRETRAINING_LR = 5e-4


def doubtful_settings(config: TrainConfig) -> list[str]:
    """Warnings about settings that are allowed but probably not intended, a line each."""
    found = []
    if config.loss.backend == "triton" and config.distill.teachers:
        found.append("loss.backend=triton: the teachers' loss has no kernels; it is computed as with loss.backend=auto")
    if config.model.image.groups == 0 and not (config.model.weights or config.model.image.weights):
        found.append("model.image.train=none locks a tower of random weights; give model.image.weights=PATH")
    lora = config.model.lora
    if lora and not config.model.weights:
        found.append(f"model.lora={lora} adapts random weights; give what it adapts, model.weights=...")
    trains_whole_tower = not lora and None in (config.model.image.groups, config.model.text.groups)
    if config.model.weights and config.optim.name == "adamw" and config.optim.lr >= PRETRAINING_LR:
        rate = "1e-6 to 1e-5 for whole towers" if trains_whole_tower else "about 1e-4 for adapters and the last layers"
        found.append(
            f"optim.lr={config.optim.lr:g} is a rate of pretraining, and the run begins with weights; usual is {rate}"
        )
    return found


def changed_settings(before: Mapping[str, object], settings: str) -> dict[str, tuple[object, object]]:
    """The settings that differ from those of the run's `config.yaml`: dotted key -> (old, new).

    `before`: those of the file; empty if there is none, and nothing has changed. `settings`: the present ones, as
    `to_yaml` writes them. Leaves out `run` and `resume`.
    """
    if not before:
        return {}
    changes = differences(before, files.parse_yaml(settings))
    return {key: values for key, values in changes.items() if key not in ("run", "resume")}


def change_lines(before: Mapping[str, object], settings: str) -> list[str]:
    """The differences of `changed_settings`, as lines `key old -> new`."""
    return [f"{key} {old} -> {new}" for key, (old, new) in changed_settings(before, settings).items()]


def to_yaml(config: Section) -> str:
    """The configuration as YAML without its secrets. `dataclass_from` reads it back."""
    # `without_secrets` makes lists of tuples, which YAML does not have.
    return yaml.safe_dump(
        without_secrets(asdict(config, dict_factory=plain_fields)), sort_keys=False, allow_unicode=True
    )


def plain_fields(settings: list[tuple[str, object]]) -> dict[str, object]:
    """The fields of a section that are set, with the words of enums."""
    as_set = [(name, value) for name, value in settings if value is not UNSET]
    return {name: value.value if isinstance(value, Enum) else value for name, value in as_set}
