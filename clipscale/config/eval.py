"""The settings of `clipscale eval`, and those shared by all verbs that take a run or any weights."""

from dataclasses import asdict, dataclass, field
from typing import ClassVar

from clipscale.common.errors import UserError
from clipscale.config import sections
from clipscale.config.model import ModelConfig
from clipscale.config.setting import differences, setting

# The settings that a model has outside of training.
EVAL_MODEL_SETTINGS = (
    "name architecture weights image.weights text.weights image_size context_length correct_cls_mask preprocess"
)


@dataclass(frozen=True)
class RunModel:
    """The model of a run."""

    run: str = setting("", "NAME of the run's folder under runs/, or its path.")
    checkpoint: str = setting(
        "latest", "`latest`, `best` (by the run's `checkpoint.best`), a step's number, or the checkpoint's path."
    )
    step: str = setting("", "`best`, or a step's number: another word for `checkpoint`.")

    @property
    def which(self) -> str:
        """The checkpoint that is meant."""
        return self.step or self.checkpoint

    def check(self) -> None:
        """Raises UserError where two checkpoints are given."""
        if self.step and self.checkpoint not in ("latest", self.step):
            raise UserError(f"step={self.step} and checkpoint={self.checkpoint} are two; give one of them")


@dataclass(frozen=True)
class AnyModel(RunModel):
    """The model of a run, or of any `model.weights`."""

    device: str = setting("auto", sections.DEVICE_HELP, choices=sections.DEVICES)
    model: ModelConfig = field(default_factory=lambda: ModelConfig(name=""))
    precision: str = setting("fp32", sections.PRECISION_HELP, choices=sections.PRECISIONS)


@dataclass(frozen=True)
class EvalRunConfig(AnyModel):
    """`clipscale eval`: zero-shot and retrieval results of a run (also in RUN/eval/), or of any `model.weights`."""

    USED_SETTINGS: ClassVar = {
        "model": EVAL_MODEL_SETTINGS,
        "eval": "sets batch limit suite root weights",
        "launch": "procs timeout_s",
    }

    precision: str = setting(
        "auto",
        f"{sections.PRECISION_HELP[:-1]}; `auto`: a run's own, for other weights fp32.",
        choices=("auto", *sections.PRECISIONS),
    )
    out: str | None = setting(
        None, "Folder for the results of `model.weights`; null: runs/eval-NAME, named after the weights."
    )
    eval: sections.EvalConfig = field(default_factory=sections.EvalConfig)
    log: sections.SinkConfig = field(default_factory=sections.SinkConfig)
    launch: sections.LaunchConfig = field(default_factory=sections.LaunchConfig)


def check_one_model(config: AnyModel, weights: str) -> None:
    """Raise UserError if neither a run nor weights are given, or both.

    `weights`: `trained`, or `ema`, which only a run has.
    """
    model = config.model
    if config.run:
        if others := differences(asdict(ModelConfig(name="")), asdict(model)):
            raise UserError(f"run={config.run} and model.{next(iter(others))} are two models; give one of them")
        return
    if not (model.weights or model.image.weights or model.text.weights):
        raise UserError("run is not set; give run=NAME or run=PATH, or model=vit-b32 model.weights=laion2b_s34b_b79k")
    if config.which != "latest" or weights == "ema":
        raise UserError(f"checkpoint={config.which}, {weights} weights: only a run has them; give run=NAME")


def results_name(model: ModelConfig) -> str:
    """The name of the folder of results of any weights. Another model has another one, by any of its settings."""
    named_model = "" if model.architecture and model.weights else model.name
    own = [f"{key}={value}" for key, value in model_facts(model).items()]
    return "-".join(filter(None, ("eval", named_model, model.weights, *own)))


def model_facts(model: ModelConfig) -> dict[str, object]:
    """The settings that choose the model, beside its architecture and whole weights, where they are set."""
    others = differences(asdict(ModelConfig()), asdict(model))
    named = ("name", "architecture", "weights")
    return {
        key: value for key, (_, value) in others.items() if value is not None and key.partition(".")[0] not in named
    }
