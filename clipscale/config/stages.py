"""The stages of a run: parts of it with settings of their own (CLIPA, arXiv 2305.07017)."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from clipscale.config import sections
from clipscale.config.model import ModelConfig
from clipscale.config.setting import UNSET, Section, Unset, setting


class OptimizerPolicy(Enum):
    """What a start does with the optimizer's state in the checkpoint.

    `continue` and `restart` are also the values of the stages' setting `optimizer`.
    """

    # Take all of it: the start goes on within a stage.
    TAKE_ALL = "resume"
    # Begin a stage with the state that fits. The state of position embeddings that are resized does not fit.
    TAKE_FITTING = "continue"
    # Begin a stage without any of it.
    TAKE_NONE = "restart"


# A setting of a stage -> the run's setting that it replaces.
STAGE_SETTINGS = {
    "samples": "samples", "batch": "batch", "image_size": "model.image_size", "context_length": "model.context_length",
    "patch_dropout": "model.patch_dropout", "lr": "optim.lr", "warmup": "schedule.warmup",
    "final": "schedule.final", "loss": "loss.objective",
}  # fmt: skip


def stage_setting(section: type[Section], name: str) -> Any:
    """A setting of a stage. It accepts what the setting `name` of the section accepts."""
    return field(default=UNSET, metadata=section.__dataclass_fields__[name].metadata)


@dataclass(frozen=True)
class StageConfig:
    """One stage. It has a length of its own. Any other setting that it does not give has the run's value."""

    samples: int | None = setting(None, "Length of the stage in pairs.", least=1)
    batch: int | Unset = setting(UNSET, "Pairs per optimizer step, over all processes.", least=1)
    image_size: int | Unset | None = stage_setting(ModelConfig, "image_size")
    context_length: int | Unset | None = stage_setting(ModelConfig, "context_length")
    patch_dropout: float | Unset = stage_setting(ModelConfig, "patch_dropout")
    lr: float | Unset = stage_setting(sections.OptimConfig, "lr")
    warmup: str | Unset = stage_setting(sections.ScheduleConfig, "warmup")
    final: float | Unset = stage_setting(sections.ScheduleConfig, "final")
    loss: str | Unset = stage_setting(sections.LossConfig, "objective")
    optimizer: OptimizerPolicy | Unset = setting(
        UNSET,
        "What becomes of the optimizer's state: `continue` or `restart`.",
        choices=(OptimizerPolicy.TAKE_FITTING.value, OptimizerPolicy.TAKE_NONE.value),
    )

    @property
    def policy(self) -> OptimizerPolicy:
        """The use of the earlier stage's optimizer state in this stage's first step."""
        return OptimizerPolicy.TAKE_FITTING if self.optimizer is UNSET else self.optimizer


@dataclass(frozen=True)
class Stage:
    """The place of a stage in its run. A run without stages has one."""

    # Pairs per step.
    global_batch: int
    # Steps and samples of the stages before it.
    steps_before: int
    samples_before: int
    is_last: bool
    # What the stage's first step does with the optimizer's state.
    optimizer_policy: OptimizerPolicy

    def samples_after(self, step: int) -> int:
        """Samples that the run has trained on when it has completed `step` steps."""
        return self.samples_before + (step - self.steps_before) * self.global_batch
