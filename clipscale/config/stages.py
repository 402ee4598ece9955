"""The stages of a run: settings that change within it, laid over those of the whole run (CLIPA, arXiv 2305.07017)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from clipscale.common.errors import UserError
from clipscale.config.setting import Setting

T = TypeVar("T")
SETTINGS = {
    "samples": "samples",
    "batch": "batch",
    "image_size": "model.image_size",
    "context_length": "model.context_length",
    "text": "data.text",
    "patch_dropout": "model.patch_dropout",
    "lr": "optim.lr",
    "warmup": "schedule.warmup",
    "loss": "loss.objective",
}
"""A key of a stage -> the setting that it changes."""
OPTIMIZER = Setting("optimizer", str, "continue", "", choices=("continue", "restart"))


def keys_of_a_stage(settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """What a stage may change, as settings; `settings`: those of the whole run."""
    return {"optimizer": OPTIMIZER, **{key: settings[name] for key, name in SETTINGS.items()}}


def stages_of(config: T) -> list[T]:
    """The settings of each stage of a run; without stages, those of the run."""
    given: list[dict[str, Any]] = getattr(config, "stages")  # noqa: B009 (of TrainConfig and those derived from it)
    return [_laid_over(config, stage) for stage in given] or [config]


def check_stages(stages: list[dict[str, Any]], samples: int | None, epochs: float | None) -> None:
    """Raise UserError for stages of unknown length, or that are not as long together as the run."""
    if not stages:
        return
    for number, stage in enumerate(stages, 1):
        if stage.get("samples") is None:
            raise UserError(f"stages: the {number}. has no samples; give every stage its samples=N")
    total = sum(stage["samples"] for stage in stages)
    if epochs is not None or samples not in (None, total):
        parts = " + ".join(str(stage["samples"]) for stage in stages)
        given = f"samples={samples}" if epochs is None else f"epochs={epochs:g}"
        raise UserError(f"stages: their samples are {parts} = {total}, not {given}; leave that out, or change them")


def _laid_over(config: Any, stage: Mapping[str, Any]) -> Any:
    for key, value in stage.items():
        if key in SETTINGS:
            config = _changed(config, SETTINGS[key], value)
    return config


def _changed(config: Any, name: str, value: Any) -> Any:
    head, _, rest = name.partition(".")
    return replace(config, **{head: _changed(getattr(config, head), rest, value) if rest else value})
