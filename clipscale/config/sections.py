"""The sections of a training run's settings: a dataclass each, with the checks that need only its section.

The model's are in model.py, the data's in data.py.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.goal import Goal
from clipscale.common.text import did_you_mean, one_of
from clipscale.common.units import parse_bytes, parse_count
from clipscale.config.libraries import has_optimizer, optimizers, optimizers_in_file
from clipscale.config.setting import setting
from clipscale.loss.choices import BACKENDS, EXCHANGES
from clipscale.loss.objective import OBJECTIVES


class Suite(TypedDict):
    """A suite of published sets."""

    # Names of the sets.
    sets: list[str]
    # The title of a column -> the results of which it is the mean: SET (its main metric) or SET:METRIC; or all sets.
    columns: dict[str, list[str] | Literal["all"]]


DEVICES = ("auto", "cpu", "cuda")
DEVICE_HELP = "`auto` (CUDA if there is a GPU), `cpu` or `cuda`."
PRECISIONS = ("fp32", "bf16", "fp16")
PRECISION_HELP = (
    "Precision of the encoders: `fp32` (TF32 on GPUs), or autocast to `bf16` or `fp16`, in which the "
    "matrices of frozen towers are stored."
)
WEIGHTS = ("trained", "ema")
WEIGHTS_HELP = "The weights as they are (`trained`), or their moving average (`ema`), which a run with `ema` keeps."
# Optimizers that update a sharded matrix exactly as a whole one: a test compares them.
SHARDABLE_OPTIMIZERS = (
    "adamw", "lion", "adam", "nadamw", "sgd", "adafactorbv", "muon", "lars", "adopt", "laprop", "radam", "rmsprop"
)  # fmt: skip
# Unit of time -> seconds.
SECONDS_OF_UNIT = {"m": 60, "h": 3600}
WANDB_MODES = ("disabled", "offline", "online")
SUITES: dict[str, Suite] = files.read_yaml(Path(__file__).parent / "suites.yaml")


def parse_length(setting: str, text: str) -> tuple[str, str, str]:
    """The parts of a length: (steps, count, unit), as texts.

    `2000` has steps. `5%` of the run and `0.5ep` (epochs) have count and unit. The other parts are empty.

    Raises UserError for other texts.
    """
    match = re.fullmatch(r"(\d+)|(\d*\.?\d+)(%|ep)", text)
    if not match:
        raise UserError(f"{setting}={text!r}: give steps (2000), a share (5%) or epochs (0.5ep)")
    return match[1] or "", match[2] or "", match[3] or ""


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
        if unit:
            return 0, float(SECONDS_OF_UNIT[unit] * count)
        return count, 0.0

    def check(self) -> None:
        """Raise UserError for another form of `every`, and of `best`."""
        _ = self.interval
        if self.best:
            Goal.parse("checkpoint.best", self.best)


@dataclass(frozen=True)
class LaunchConfig:
    """The processes that `train`, `eval` and `embed` start on this machine when torchrun has not started them."""

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
    """The result of each run that a sweeper of Hydra's, such as Optuna, gets."""

    metric: str = setting(
        "", "The result of each run that the sweeper gets, SET/METRIC as in `imagenet1k/top1`; empty: the last loss."
    )

    def check(self) -> None:
        """Raise UserError for another form of `metric`."""
        if self.metric:
            Goal.parse("sweep.metric", self.metric)


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
        """Raise UserError for a name that timm does not know."""
        if self.name not in SHARDABLE_OPTIMIZERS and not has_optimizer(self.name):
            meant = did_you_mean(self.name, optimizers_in_file() or optimizers())
            raise UserError(f"optim.name={self.name!r} is not one of timm's{meant}")


@dataclass(frozen=True)
class ScheduleConfig:
    """How the learning rate changes over the run."""

    name: str = setting("cosine", "`cosine`, or `constant` with a cooldown.", choices=("cosine", "constant"))
    warmup: str = setting("5%", "Linear warm-up: steps (`2000`), a share of the run (`5%`) or epochs (`0.5ep`).")
    cooldown: str = setting("0", "Linear cooldown at the end of a constant schedule, in the same forms.")
    final: float = setting(0.0, "Learning rate at the end, as a share of the peak.", least=0)

    def check(self) -> None:
        """Raise UserError for other forms of steps, and for more than the whole run."""
        for name, text in (("warmup", self.warmup), ("cooldown", self.cooldown)):
            _, count, unit = parse_length(f"schedule.{name}", text)
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
        "Memory for graphs that the first pass keeps; a chunk with a kept graph needs no second pass: `auto` (what is "
        "free), `none`, `20G`.",
    )

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        """Samples per chunk of images and of texts; None to measure one. Raises UserError."""
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
    def keep_bytes(self) -> float | None:
        """The memory for kept graphs; None: what a first step leaves free. Raises UserError."""
        if self.keep in ("none", "auto"):
            return 0 if self.keep == "none" else None
        try:
            return parse_bytes(self.keep)
        except ValueError:
            raise UserError(f"cache.keep={self.keep}: give none, auto, or bytes such as 8G") from None

    def check(self) -> None:
        """Raise UserError for other forms of sizes and bytes."""
        _ = self.sizes, self.keep_bytes


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
        "Matryoshka: also train the first N dimensions of each feature vector, for each N listed; the losses are "
        "added.",
        least=1,
    )


@dataclass(frozen=True)
class CaptionConfig:
    """The loss of a captioner (`coca_ViT-B-32`, ...), beside the contrast."""

    weight: float = setting(
        2.0,
        "Weight of a captioner's mean cross entropy over the tokens of the batch's captions; the contrast has a weight "
        "of 1. 0: contrast alone, and its decoder is frozen. Other models have no decoder.",
        least=0,
    )


@dataclass(frozen=True)
class DistillConfig:
    """Distillation from teachers' features, which `clipscale embed teacher=NAME` writes into the shards."""

    teachers: list[str] = setting([], "Names of the teachers: a sample's member NAME.npy has its features.")
    scales: list[float] | None = setting(
        None, "Each teacher's logit scale; null: from the file that `embed` wrote.", above=0
    )
    weights: tuple[float, float] = setting(
        (0.0, 1.0), "Weights of the contrastive loss, and of the distillation.", least=0
    )

    def check(self) -> None:
        """Raise UserError for a teacher that is named twice, a wrong number of scales, and weights that are all 0."""
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
        "Weights & Biases: `online`, `offline` or `disabled`; if it is used, WANDB_MODE overrides this. WANDB_PROJECT "
        "and WANDB_ENTITY name the place.",
        choices=WANDB_MODES,
    )
    tensorboard: bool = setting(False, "Write event files to RUN/tensorboard.")

    @property
    def wandb_mode(self) -> str:
        """The mode of wandb: WANDB_MODE of the environment, which clusters set, if there is one; otherwise `wandb`.

        A `wandb` that is `disabled` stays so. Raises UserError.
        """
        asked = os.environ.get("WANDB_MODE")
        if self.wandb == "disabled" or not asked:
            return self.wandb
        mode = {"dryrun": "offline", "run": "online"}.get(asked, asked)  # wandb's older names of these modes
        if mode not in WANDB_MODES:
            raise UserError(f"WANDB_MODE={asked} of the environment: choose {one_of(WANDB_MODES)}, or unset it")
        return mode

    def check(self) -> None:
        """Raise UserError for an unknown mode in the environment."""
        _ = self.wandb_mode


@dataclass(frozen=True)
class LogConfig(SinkConfig):
    """Where metrics go, in addition to `metrics.jsonl`, which is always written."""

    every: int = setting(1, "Steps between console lines, which are at least 10 s apart.", least=1)


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
        "none", "A suite of published sets; each is looked for in the folder `eval.root`.", choices=("none", *SUITES)
    )
    root: str | None = setting(None, "The folder with the sets of `eval.suite`.")
    weights: str = setting("trained", WEIGHTS_HELP, choices=WEIGHTS)

    def check(self) -> None:
        """Raise UserError for evaluations without sets."""
        if self.every and not self.has_sets:
            raise UserError(f"eval.every={self.every}: nothing to evaluate; give eval.sets=FOLDER")

    @property
    def has_sets(self) -> bool:
        """Whether there is anything to evaluate."""
        return bool(self.sets) or self.suite != "none"
