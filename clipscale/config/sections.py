"""The sections of a training run's settings: a dataclass each, with the checks that need only its section."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.keep import Keep
from clipscale.common.record import Record
from clipscale.common.units import nearest, one_of, parse_count
from clipscale.config.libraries import architectures, has_optimizer, model_description, optimizers, optimizers_in_file
from clipscale.config.parse import dataclass_from
from clipscale.config.presets import PACKAGE, group_options
from clipscale.config.setting import setting
from clipscale.loss.objective import BACKENDS, EXCHANGES, OBJECTIVES

DEVICES = ("auto", "cpu", "cuda")
DEVICE_HELP = "`auto` (CUDA if there is a GPU), `cpu` or `cuda`."
PRECISIONS = ("fp32", "bf16", "fp16")
PRECISION_HELP = (
    "Precision of the encoders: `fp32` (TF32 on GPUs), or autocast to `bf16` or `fp16`; frozen towers are stored in it."
)
WEIGHTS = ("trained", "ema")
WEIGHTS_HELP = "The weights as they are (`trained`), or their moving average (`ema`), which a run with `ema` keeps."
# Optimizers that update a sharded matrix exactly as a whole one: a test compares them.
SHARDABLE_OPTIMIZERS = (
    "adamw", "lion", "adam", "nadamw", "sgd", "adafactorbv", "muon", "lars", "adopt", "laprop", "radam", "rmsprop"
)  # fmt: skip
# Seconds of the units of time.
UNITS = {"m": 60, "h": 3600}
WANDB_MODES = ("disabled", "offline", "online")
SUITES = ("none", *files.read_yaml(PACKAGE / "eval/sets/known.yaml")["suites"])


def steps_of(setting: str, text: str) -> tuple[str, str, str]:
    """A number of steps; or a count and its unit, `%` of the run or `ep`, epochs. Raises UserError for other texts."""
    match = re.fullmatch(r"(\d+)|(\d*\.?\d+)(%|ep)", text)
    if not match:
        raise UserError(f"{setting}={text!r}: give steps (2000), a share (5%) or epochs (0.5ep)")
    return match[1], match[2], match[3]


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written and how many are kept. A run always ends with one."""

    every: str = setting("30m", "Time or steps between checkpoints: `30m`, `2h` or `500`; 0: none.")
    keep: int = setting(2, "Newest checkpoints kept; 0: all.", least=0)
    keep_every: int = setting(0, "Checkpoints at multiples of this many steps are never removed; 0: none.", least=0)
    best: str = setting(
        "",
        "`SET/METRIC`, as `imagenet1k/top1`: the checkpoint that is best by it, as evaluated, stays beside the newest; "
        "`step=best` takes it.",
    )
    copy: str = setting(
        "",
        "Address of a copy of the run: s3://bucket/path, a folder, ...; a start resumes from it if it is newer.",
    )

    @property
    def interval(self) -> tuple[int, float]:
        """Steps and seconds between checkpoints; the one that is not used is 0. Raises UserError."""
        match = re.fullmatch(r"(\d+)([mh]?)", self.every)
        if not match:
            raise UserError(f"checkpoint.every={self.every}: give minutes (30m), hours (2h) or steps (500)")
        count = int(match[1])
        unit = match[2]
        return (0, float(UNITS[unit] * count)) if unit else (count, 0.0)

    def check(self) -> None:
        """Raises UserError for another form of `every`, and of `best`."""
        _ = self.interval
        if self.best and not all(self.best.rpartition("/")[::2]):
            raise UserError(f"checkpoint.best={self.best}: give SET/METRIC, as imagenet1k/top1")


@dataclass(frozen=True)
class LaunchConfig:
    """How many worker processes `train` and `eval` start on this machine when they are not run under torchrun."""

    procs: int | None = setting(None, "Worker processes; null: one per visible GPU, or one without GPUs.", least=1)
    timeout_s: float = setting(1800.0, "Seconds that a process waits for the others before the run fails.", least=1)
    parallel: str = setting(
        "ddp",
        "`ddp`: the whole model on every rank. With FSDP2, ranks share weights, gradients and optimizer state: `zero3` "
        "gathers weights block by block; `zero2` keeps them gathered for the whole step.",
        choices=("ddp", "zero2", "zero3"),
    )


@dataclass(frozen=True)
class SweepConfig:
    """What a sweeper of Hydra's, such as Optuna, learns of a run."""

    metric: str = setting(
        "", "The result that the sweeper gets of each run, SET/METRIC as in `imagenet1k/top1`; empty: the last loss."
    )

    def check(self) -> None:
        """Raises UserError for another form of `metric`."""
        if self.metric and not all(self.metric.rpartition("/")[::2]):
            raise UserError(f"sweep.metric={self.metric}: give SET/METRIC, as imagenet1k/top1")


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer, by timm's name."""

    name: str = setting("adamw", "Any of timm's optimizers: adamw, adafactorbv, lion, lamb, muon, ...")
    lr: float = setting(5e-4, "Peak learning rate of the schedule.", least=0)
    weight_decay: float = setting(0.2, "Weight decay of matrices; none for gains, biases, logit scale.", least=0)
    betas: tuple[float, float] = setting(
        (0.9, 0.98),
        "Decay rates of both moments (adafactorbv: momentum and the cap of the second moment's rate).",
        least=0,
        below=1,
    )
    eps: float | None = setting(1e-6, "Epsilon of the update's denominator; null: the optimizer's default.")
    clip_norm: float | None = setting(None, "Largest global gradient norm; null or 0: no clipping.", least=0)
    options: dict[str, object] = setting({}, "Further keyword arguments of timm's factory.")

    def check(self) -> None:
        """Raises UserError for a name that timm does not know."""
        if self.name not in SHARDABLE_OPTIMIZERS and not has_optimizer(self.name):
            meant = nearest(self.name, optimizers_in_file() or optimizers())
            raise UserError(f"optim.name={self.name!r} is not one of timm's{meant}")


@dataclass(frozen=True)
class ScheduleConfig:
    """How the learning rate changes over the run."""

    name: str = setting("cosine", "`cosine`, or `constant` with a cooldown.", choices=("cosine", "constant"))
    warmup: str = setting("5%", "Linear warm-up: steps (`2000`), a share of the run (`5%`) or epochs (`0.5ep`).")
    cooldown: str = setting("0", "Linear cooldown at the end of a constant schedule, in the same forms.")
    final: float = setting(0.0, "Learning rate at the end, as a share of the peak.", least=0)

    def check(self) -> None:
        """Raises UserError for other forms of steps, and for more than the whole run."""
        for name, text in (("warmup", self.warmup), ("cooldown", self.cooldown)):
            _, count, unit = steps_of(f"schedule.{name}", text)
            if unit == "%" and float(count) > 100:
                raise UserError(f"schedule.{name}={text}: that is more than the run; give at most 100%")


@dataclass(frozen=True)
class CacheConfig:
    """How the local batch is split into chunks."""

    chunk: list[str] = setting(
        ["auto"],
        "Samples per chunk: `256`, or `[128,512]` for images and texts; `auto`: measured on a GPU, 256 on a CPU.",
    )
    keep: str = setting(
        "auto",
        "Memory for kept graphs of the first pass; their chunks skip the second: `auto` (what is free), `none`, `20G`.",
    )

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        """Samples per chunk of images and of texts; None: by measurement. Raises UserError."""
        try:
            sizes = [None if size == "auto" else parse_count(size) for size in self.chunk]
        except ValueError:
            sizes = []
        if len(sizes) not in (1, 2) or 0 in sizes:
            text = ",".join(self.chunk)
            if len(self.chunk) > 1:
                text = f"[{text}]"
            raise UserError(f"cache.chunk={text}: give samples per chunk (256), auto, or [IMAGES,TEXTS]")
        return sizes[0], sizes[-1]

    @property
    def kept(self) -> Keep:
        """Which graphs are kept. Raises UserError."""
        return Keep.parse("cache.keep", self.keep)

    def check(self) -> None:
        """Raises UserError for other forms of sizes and bytes."""
        _ = self.sizes, self.kept


@dataclass(frozen=True)
class LossConfig:
    """Which contrastive loss, and how it is computed. The fields but `sizes` are arguments of `contrastive_loss`."""

    objective: str = setting(
        "softmax", "`softmax` (CLIP), one direction, or `sigmoid` (SigLIP).", choices=tuple(OBJECTIVES)
    )
    exchange: str = setting(
        "auto", "How ranks exchange features; `auto`: `gather` if small, else `ring` or `nodes`.", choices=EXCHANGES
    )
    backend: str = setting(
        "auto",
        "`dense`: whole blocks of logits; `tiled`: torch, in tiles; `triton`; `auto`: the device's best.",
        choices=BACKENDS,
    )
    sizes: list[int] = setting(
        [],
        "Matryoshka: also train the first N features, for each N listed; the losses are added.",
        least=1,
    )


@dataclass(frozen=True)
class CaptionConfig:
    """The loss of a captioner (`coca_ViT-B-32`, ...), beside the contrast."""

    weight: float = setting(
        2.0,
        "Of a captioner's mean cross entropy over the tokens of the batch's captions; the contrast has a weight of 1. "
        "0: contrast alone, and its decoder is frozen. Other models have no decoder.",
        least=0,
    )


@dataclass(frozen=True)
class DistillConfig:
    """Distillation from teachers' features, which `clipscale embed teacher=NAME` writes into the shards."""

    teachers: list[str] = setting([], "Names of the teachers: a sample's member NAME.npy has its features.")
    scales: list[float] | None = setting(None, "Each teacher's logit scale; null: as `embed` has written it.", above=0)
    weights: tuple[float, float] = setting((0.0, 1.0), "Of the contrastive loss, and of the distillation.", least=0)

    def check(self) -> None:
        """Raises UserError for teachers that are named twice, scales that are not theirs, and weights of 0."""
        if len({*self.teachers}) < len(self.teachers):
            raise UserError(f"distill.teachers={self.teachers}: name each teacher once")
        if self.teachers and self.scales is not None and len(self.scales) != len(self.teachers):
            raise UserError(f"distill.scales={self.scales}: give one for each of {len(self.teachers)} teachers")
        if not any(self.weights):
            raise UserError(f"distill.weights={[*self.weights]}: give one above 0")


@dataclass(frozen=True)
class SinkConfig:
    """Where results go, in addition to the run's folder."""

    wandb: str = setting(
        "disabled",
        "Weights & Biases: `online`, `offline` or `disabled`; if it is used, WANDB_MODE counts more. WANDB_PROJECT and "
        "WANDB_ENTITY name the place.",
        choices=WANDB_MODES,
    )
    tensorboard: bool = setting(False, "Write event files to RUN/tensorboard.")

    @property
    def wandb_mode(self) -> str:
        """`wandb`, or where that is not `disabled`, WANDB_MODE of the environment, which clusters set. Raises
        UserError."""
        asked = os.environ.get("WANDB_MODE")
        if self.wandb == "disabled" or not asked:
            return self.wandb
        mode = {"dryrun": "offline", "run": "online"}.get(asked, asked)  # wandb's earlier words
        if mode not in WANDB_MODES:
            raise UserError(f"WANDB_MODE={asked} of the environment: choose {one_of(WANDB_MODES)}, or unset it")
        return mode

    def check(self) -> None:
        """Raises UserError for another word of the environment."""
        _ = self.wandb_mode


@dataclass(frozen=True)
class LogConfig(SinkConfig):
    """Where metrics go, in addition to `metrics.jsonl`, which is always written."""

    every: int = setting(1, "Steps between console lines.", least=1)


@dataclass(frozen=True)
class TowerConfig:
    """One tower's own weights, and how it is trained."""

    weights: str | None = setting(
        None, "As `model.weights`, for this tower alone; also weights of a single tower (timm, Hugging Face)."
    )
    lr_factor: float = setting(1.0, "Factor of this tower's learning rate.", above=0)
    layer_decay: float = setting(
        1.0, "Learning rate of a layer group as a fraction of the next group's (0.75); 1: no decay.", above=0, most=1
    )
    train: str = setting(
        "all",
        "What trains: `all`, `none` (LiT), or the last N layer groups. 1: the projection; 2: also the last block.",
    )

    @property
    def groups(self) -> int | None:
        """The layer groups that train, counted from the last; None: all."""
        if self.train == "all":
            return None
        return 0 if self.train == "none" else parse_count(self.train)

    def check(self) -> None:
        """Raises UserError for another form of `train`."""
        if not re.fullmatch(r"all|none|\d+", self.train):
            raise UserError(
                f"model.image.train or model.text.train={self.train}: give all, none, or a number of groups"
            )


@dataclass(frozen=True)
class Preprocess:
    """How pictures become an image tower's inputs, in the words of open_clip's `preprocess_cfg`; by default as CLIP's.

    mean, std: for each channel, of pixels in [0, 1]. resize_mode, interpolation: how evaluation resizes pictures.
    """

    mean: tuple[float, float, float] = setting((0.48145466, 0.4578275, 0.40821073), "")
    std: tuple[float, float, float] = setting((0.26862954, 0.26130258, 0.27577711), "")
    resize_mode: str = setting("shortest", "", choices=("shortest", "squash", "longest"))
    interpolation: str = setting("bicubic", "", choices=("bicubic", "bilinear"))


@dataclass(frozen=True)
class ModelConfig:
    """Which encoders are trained, and which parts are frozen."""

    name: str = setting("ViT-B-32", "An open_clip architecture, or any name if `architecture` describes one.")
    architecture: Record = setting(
        {}, "open_clip's model description (embed_dim, vision_cfg, text_cfg); empty: the one registered under `name`."
    )
    weights: str | None = setting(
        None,
        "Weights to start from: one of open_clip's tags for `name`, hf-hub:ORG/NAME (only these use the network), a "
        "run, a folder of open_clip or transformers (CLIP, SigLIP), or a file. Runs and folders bring their model.",
    )
    image: TowerConfig = field(default_factory=TowerConfig)
    text: TowerConfig = field(default_factory=TowerConfig)
    lora: int = setting(
        0,
        "Rank of low-rank adapters on both towers' frozen blocks; they train, and the last N groups; 0: none.",
        least=0,
    )
    image_size: int | None = setting(None, "Side in pixels, a multiple of the patch; null: the model's own.", least=1)
    context_length: int | None = setting(
        None,
        "Most tokens of a caption; position embeddings are interpolated. null: the model's own.",
        least=2,
    )
    grad_checkpointing: bool = setting(False, "Recompute each block's activations in the backward pass.")
    batch_norm: str = setting(
        "sync",
        "Batch normalisation (RN50) by the statistics of the whole batch, in one chunk (`sync`), or by stored ones "
        "(`frozen`).",
        choices=("sync", "frozen"),
    )
    patch_dropout: float = setting(0.0, "Share of image patches dropped in training.", least=0, below=1)
    compile: str = setting(
        "auto",
        "Compile the towers' blocks with torch.compile; `auto`: on a GPU, for runs of a quarter of an hour or more.",
        choices=("auto", "true", "false"),
    )
    init_scale: float | None = setting(
        None, "Initial logit scale (the factor, not its logarithm); null: the architecture's, 1/0.07 for CLIP.", above=0
    )
    init_bias: float | None = setting(None, "Initial logit bias, -10 for the sigmoid loss; null: the architecture's.")
    correct_cls_mask: bool | None = setting(
        None,
        "Of a captioner: open_clip's `correct_cls_mask` of its text tower, without which the class token sees a pad in "
        "its own place; null: as the weights were trained, true without weights.",
    )
    preprocess: dict[str, object] = setting(
        {},
        "How pictures are prepared, as open_clip's preprocess_cfg: mean, std, resize_mode (shortest, squash, longest), "
        "interpolation (bicubic, bilinear). What is left out is as the weights need it, else as in CLIP.",
    )

    @staticmethod
    def of(values: Mapping[str, object]) -> "ModelConfig":
        """The model's settings in a checkpoint. Raises UserError."""
        return dataclass_from(ModelConfig, values)

    @property
    def description(self) -> Record:
        """`architecture`, or open_clip's for `name`; empty for a name that it does not know."""
        return self.architecture or model_description(self.name)

    @property
    def is_captioner(self) -> bool:
        """Whether the model has a decoder of captions."""
        return "multimodal_cfg" in self.description

    def check_parts(self) -> None:
        """Raise UserError for an `architecture` without one of its parts."""
        for section in ("embed_dim", "vision_cfg", "text_cfg"):
            if self.architecture and section not in self.architecture:
                raise UserError(f"model.architecture lacks {section}; write it like open_clip's model configurations")

    @property
    def pixels(self) -> Preprocess:
        """`preprocess` with its defaults. Raises UserError for other words and values."""
        return dataclass_from(Preprocess, self.preprocess, "model.preprocess.")

    def check(self) -> None:
        """Raises UserError for another `preprocess`, for half an `architecture`, and for a name that open_clip does not
        know."""
        _ = self.pixels
        self.check_parts()
        if self.name and not self.weights and not self.description:
            preset = self.name.lower().replace("_", "-").replace("/", "-")
            is_preset = preset in group_options()["model"]
            meant = f"; the preset is model={preset}" if is_preset else nearest(self.name, architectures())
            raise UserError(f"model.name={self.name!r} is not an open_clip architecture{meant}")


@dataclass(frozen=True)
class EvalConfig:
    """What is evaluated and when."""

    every: int = setting(0, "Steps between evaluations; 0: none. A run with `sets` always ends with one.", least=0)
    sets: list[str] = setting(
        [], "Folders of CLIP_benchmark's layout, of shards of held-out pairs or of class folders, or caption JSONs."
    )
    batch: int = setting(256, "Images or captions encoded at once.", least=1)
    limit: int | None = setting(None, "Most images of each set, each class in proportion; null: all.", least=1)
    suite: str = setting(
        "none", "A suite of published sets; each is looked for in the folder `eval.root`.", choices=SUITES
    )
    root: str | None = setting(None, "The folder with the sets of `eval.suite`.")
    weights: str = setting("trained", WEIGHTS_HELP, choices=WEIGHTS)

    def check(self) -> None:
        """Raises UserError for evaluations of nothing."""
        if self.every and not self.has_sets:
            raise UserError(f"eval.every={self.every}: nothing to evaluate; give eval.sets=FOLDER")

    @property
    def has_sets(self) -> bool:
        """Whether there is anything to evaluate."""
        return bool(self.sets) or self.suite != "none"
