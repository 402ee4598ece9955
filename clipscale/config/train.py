"""The whole configuration of a run: every part's dataclass in one tree, and the checks that need no machine and no data.

Knows nothing of Hydra: plain values become these plain dataclasses in clipscale.config.parse.
"""

import re
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from clipscale.config.checks import at_least, choice, shared
from clipscale.config.data import DECODE, ORDERS, DataConfig
from clipscale.config.data import LEAST as DATA_LEAST
from clipscale.config.keys import flat
from clipscale.config.renamed import RENAMED
from clipscale.config.sections import (
    BACKENDS,
    DEVICES,
    EXCHANGES,
    LR_SCALING,
    OBJECTIVES,
    PARALLEL,
    PRECISIONS,
    RULES,
    SCHEDULES,
    SIMILARITIES,
    WANDB,
    CacheConfig,
    CheckpointConfig,
    EvalConfig,
    LaunchConfig,
    LogConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    RampConfig,
    ScheduleConfig,
)
from clipscale.errors import UserError
from clipscale.units import format_count, run_folder, unused


@dataclass
class TrainConfig:
    """Everything a training run is made from."""

    batch: int = 256
    """Pairs per optimizer step, over all processes."""
    samples: int | None = None
    """Length of the run in pairs."""
    epochs: float | None = None
    """Length of the run in passes over the data; give either `samples` or `epochs`."""
    run: str = ""
    """NAME of the run's folder under runs/, or a path; empty: named after the time, the model and the batch."""
    resume: str = "auto"
    """`auto`: go on from the run folder's newest checkpoint, if any; `none`: refuse a folder that holds one; or a checkpoint's path."""
    seed: int = 0
    """Of weights, sample order, crops and dropout."""
    device: str = "auto"
    """`auto` (CUDA where there is one), `cpu` or `cuda`."""
    offload: str = "host"
    """Where pixels wait between the passes: the device (`none`), `host` memory, `disk`, or `encoded`: the pictures' own bytes in host
    memory, decoded for each pass."""
    offload_dir: str = ""
    """Folder on a fast disk for offload=disk; empty: the run's folder."""
    model: ModelConfig = field(default_factory=ModelConfig)
    ramp: RampConfig = field(default_factory=RampConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)


# What a text setting may say, and the least a number may be. Names that a library knows (model.name, optim.name) are checked there.
CHOICES = {
    "device": DEVICES,
    "offload": ("none", "host", "disk", "encoded"),
    "ramp.rule": RULES,
    "cache.negatives": ("batch", "chunk"),
    "precision.name": ("fp32", "bf16", "fp16"),
    "precision.weights": ("fp32", "bf16"),
    "model.batch_norm": ("sync", "frozen"),
    "loss.objective": OBJECTIVES,
    "loss.similarity": SIMILARITIES,
    "loss.exchange": EXCHANGES,
    "loss.backend": BACKENDS,
    "loss.fp32_precision": PRECISIONS,
    "optim.on_divergence": ("stop", "skip"),
    "optim.lr_scaling": tuple(LR_SCALING),
    "schedule.name": SCHEDULES,
    "data.decode": DECODE,
    "data.order": ORDERS,
    "launch.parallel": PARALLEL,
    "log.wandb": WANDB,
}
LEAST = {
    "batch": 1,
    "samples": 1,
    "ramp.start": 1,
    "ramp.samples": 0,
    "seed": 0,
    "cache.image_chunk": 1,
    "cache.text_chunk": 1,
    **{f"data.{name}": least for name, least in DATA_LEAST.items()},
    "loss.tile": 1,
    "loss.ranks_per_node": 1,
    "loss.label_smoothing": 0,
    "model.patch_dropout": 0,
    "optim.lr": 0,
    "optim.clip_norm": 0,
    "optim.reference_batch": 1,
    "optim.weight_decay": 0,
    "optim.max_logit_scale": 1,
    "eval.every": 0,
    "eval.batch": 1,
    "eval.workers": 0,
    "eval.limit": 1,
    "checkpoint.every": 0,
    "checkpoint.minutes": 0,
    "checkpoint.keep": 0,
    "log.every": 1,
    "log.noise_scale": 0,
    "launch.procs": 1,
    "launch.threads": 1,
}


def check(config: TrainConfig, *, now: datetime | None = None) -> TrainConfig:
    """The configuration with its run folder named, ready for the workers. Raises UserError for the first mistake found."""
    check_values(config)
    if config.samples is not None and config.epochs is not None:
        raise UserError(f"samples={config.samples} and epochs={config.epochs:g} both set the length; give one of them")
    if config.samples is None and config.epochs is None:
        raise UserError("neither samples nor epochs is set; give the length of the run with one of them")
    if config.epochs is not None and config.epochs <= 0:
        raise UserError(f"epochs={config.epochs:g} trains nothing; give a positive number")
    if not config.model.patch_dropout < 1:
        raise UserError(f"model.patch_dropout={config.model.patch_dropout:g}: a share of the patches; give less than 1")
    if not config.loss.label_smoothing < 1:
        raise UserError(
            f"loss.label_smoothing={config.loss.label_smoothing:g}: a share of the target; give less than 1"
        )
    if config.model.init_scale is not None and not config.model.init_scale > 0:
        raise UserError(f"model.init_scale={config.model.init_scale:g}: the factor of the scores; give more than 0")
    if not config.data.train:
        raise UserError("data.train is not set; give shards, data.train='/data/{00000..00099}.tar', or take data=demo")
    if config.data.on_device and config.offload == "disk":
        raise UserError(
            "offload=disk is for pixels that the loaders decode; with data.decode=gpu take offload=encoded, or offload=host"
        )
    procs = config.launch.procs
    shared(config.batch, procs or 1, f"launch.procs={procs} processes")
    config.run = str(run_folder(config.run) if config.run else unused(Path("runs") / default_name(config, now)))
    return config


def doubts(config: TrainConfig) -> list[str]:
    """What is allowed but probably not meant, a line each."""
    found = []
    if config.model.freeze_image and not (config.model.pretrained or config.model.pretrained_image):
        found.append("model.freeze_image=true locks a tower of random weights; give model.pretrained_image=PATH")
    if config.model.batch_norm == "frozen" and not (config.model.pretrained or config.model.pretrained_image):
        found.append(
            "model.batch_norm=frozen keeps the running statistics of random weights; give model.pretrained=PATH"
        )
    if config.ramp.start is None and config.ramp != RampConfig():
        found.append("ramp.samples and ramp.rule have no effect without ramp.start, the batch to begin with")
    if config.optim.lr_scaling == "none" and config.optim.reference_batch is not None:
        found.append("optim.reference_batch has no effect with optim.lr_scaling=none; choose sqrt or linear")
    if config.precision.weights == "fp32" and not config.precision.master:
        found.append("precision.master=false has no effect on fp32 weights; it goes with precision.weights=bf16")
    return found


def check_values(config: Any) -> None:
    """Refuse a value that none of CHOICES or LEAST allows. Raises UserError naming the setting and what it may be."""
    for key, value in flat(asdict(config)):
        if key in CHOICES:
            choice(key, value, CHOICES[key])
        if key in LEAST:
            at_least(key, value, LEAST[key])


def default_name(config: TrainConfig, now: datetime | None = None) -> str:
    """A readable name for a run: time, model, batch."""
    model = re.sub(r"[^A-Za-z0-9.-]+", "-", config.model.name).lower()
    return f"{now or datetime.now():%Y%m%d-%H%M%S}-{model}-{format_count(config.batch)}"


def changes(before: str, config: "TrainConfig") -> list[str]:
    """Settings that `to_yaml` wrote differently before, as `key old -> new`; where the run lies and how it is resumed aside.

    None of a file that is damaged: it is a record, and no reason not to go on.
    """
    try:
        tree = yaml.safe_load(before)
    except yaml.YAMLError:
        tree = None
    if not isinstance(tree, dict):
        return []
    old = {RENAMED.get(key, key): value for key, value in flat(tree)}
    new = dict(flat(yaml.safe_load(to_yaml(config))))
    differing = [key for key in {**old, **new} if key not in ("run", "resume") and old.get(key) != new.get(key)]
    return [f"{key} {old.get(key)} -> {new.get(key)}" for key in differing]


def to_yaml(config: Any) -> str:
    """The resolved configuration as YAML that the command line reads back."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    return yaml.safe_dump(plain(asdict(config)), sort_keys=False, allow_unicode=True)
