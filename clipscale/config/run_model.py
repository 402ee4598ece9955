"""The settings by which a verb takes the model of a run, or of any weights."""

from dataclasses import asdict, dataclass, field

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
        """Raise UserError where two checkpoints are given."""
        if self.step and self.checkpoint not in ("latest", self.step):
            raise UserError(f"step={self.step} and checkpoint={self.checkpoint} are two; give one of them")


@dataclass(frozen=True)
class AnyModel(RunModel):
    """The model of a run, or of any `model.weights`."""

    device: str = setting("auto", sections.DEVICE_HELP, choices=sections.DEVICES)
    model: ModelConfig = field(default_factory=lambda: ModelConfig(name=""))
    precision: str = setting("fp32", sections.PRECISION_HELP, choices=sections.PRECISIONS)


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
