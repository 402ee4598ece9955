"""The stages of a run: settings that replace those of the whole run for a part of it (CLIPA, arXiv 2305.07017)."""

from dataclasses import replace
from typing import Any, TypeVar

from clipscale.common.errors import UserError

T = TypeVar("T")
# A key of a stage -> the setting that it changes. Another key is `optimizer`: `continue` or `restart`.
SETTINGS = {
    "samples": "samples", "batch": "batch", "image_size": "model.image_size", "context_length": "model.context_length",
    "patch_dropout": "model.patch_dropout", "lr": "optim.lr", "warmup": "schedule.warmup",
    "final": "schedule.final", "loss": "loss.objective",
}  # fmt: skip


def stages_of(config: T) -> list[T]:
    """The settings of each stage of a run (TrainConfig); without stages, those of the run."""
    by_stage = []
    for stage in config.stages:  # type: ignore[attr-defined]
        settings = config
        for key, value in stage.items():
            if key in SETTINGS:
                settings = changed(settings, SETTINGS[key], value)
        by_stage.append(settings)
    return by_stage or [config]


def changed(config: Any, name: str, value: Any) -> Any:
    """The settings with this value for the setting `name`."""
    head, _, rest = name.partition(".")
    return replace(config, **{head: changed(getattr(config, head), rest, value) if rest else value})


def total_samples(config: Any) -> int | None:
    """The samples of all stages of a run (TrainConfig); without stages, `samples`. Raises UserError if the lengths
    contradict each other."""
    lengths = [stage.get("samples") for stage in config.stages]
    if not lengths:
        return config.samples
    if None in lengths or config.epochs is not None or config.samples not in (None, sum(lengths)):
        raise UserError(
            f"stages: their samples are {lengths}, and the run has samples={config.samples} epochs={config.epochs}; "
            "give every stage its own, and leave out the run's"
        )
    return sum(lengths)
