"""The settings of `clipscale eval`, and those shared by all verbs that take a run or any weights."""

import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from clipscale.common.errors import UserError
from clipscale.common.files import file_name
from clipscale.common.text import did_you_mean
from clipscale.config import sections
from clipscale.config.model import ModelConfig
from clipscale.config.setting import differences, setting
from clipscale.run_folder.chosen_checkpoint import locate
from clipscale.run_folder.names import CONFIG, run_folder, settings_of_run

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

    ONLY: ClassVar = {
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


def runs_of_sweep(folder: Path) -> list[Path]:
    """The folders of a sweep's runs; empty if this is a run's folder, or no folder."""
    if (folder / CONFIG).exists():
        return []
    return sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))


def existing_run(run: str) -> Path:
    """The folder of a run. Raises UserError if none is given, or there is none, or if it is a sweep."""
    if not run:
        raise UserError("run is not set; give run=NAME or run=PATH")
    folder = run_folder(run)
    if not folder.is_dir():
        near = did_you_mean(folder.name, sorted(path.name for path in folder.parent.glob("*/")))
        raise UserError(f"run={run}: there is no folder {folder}{near}")
    runs = runs_of_sweep(folder)
    if runs:
        raise UserError(
            f"run={run}: a sweep of {len(runs)} runs; give one of them, as in {shlex.quote(f'run={runs[0]}')}"
        )
    return folder


def model_run(config: AnyModel, weights: str) -> Path | None:
    """The folder of the run; None for weights of another source. Raises UserError if neither is given, or both.

    `weights`: `trained`, or `ema`, which only a run has.
    """
    model = config.model
    if config.run:
        if others := differences(asdict(ModelConfig(name="")), asdict(model)):
            raise UserError(f"run={config.run} and model.{next(iter(others))} are two models; give one of them")
        return existing_run(config.run)
    if not (model.weights or model.image.weights or model.text.weights):
        raise UserError("run is not set; give run=NAME or run=PATH, or model=vit-b32 model.weights=laion2b_s34b_b79k")
    if config.which != "latest" or weights == "ema":
        raise UserError(f"checkpoint={config.which}, {weights} weights: only a run has them; give run=NAME")
    return None


def check_places(config: sections.EvalConfig, rendered: Iterable[str] = ()) -> None:
    """Raises UserError for sets that do not exist, except those in `rendered`, which the start makes."""
    for path in sorted(set(config.sets).difference(rendered)):
        if not Path(path).expanduser().exists():
            raise UserError(f"eval.sets: {path} does not exist; give the folder of a set, or a caption file")
    if config.suite != "none" and config.root is None:
        raise UserError(f"eval.suite={config.suite} needs eval.root=DIR, the folder with its sets")
    if config.root is not None and not Path(config.root).expanduser().is_dir():
        raise UserError(f"eval.root={config.root}: there is no such folder; give the one with the sets")


def completed_by_run(config: EvalRunConfig) -> EvalRunConfig:
    """Complete the settings with the run's `sets`, `suite`, `root` and `precision` where they give none.

    The run's `root` counts for a suite alone.

    Raises UserError if there is no set.
    """
    run_settings = settings_of_run(run_folder(config.run)) if config.run else {}
    eval_of_run = run_settings.get("eval", {})
    chosen = config.eval
    if not chosen.has_sets:
        chosen = replace(chosen, sets=eval_of_run.get("sets", []), suite=eval_of_run.get("suite", "none"))
    if not chosen.has_sets:
        raise UserError("eval.sets is empty, here and in the settings of a run; give eval.sets=FOLDER")
    candidates = (config.precision, run_settings.get("precision"))
    precision = next((name for name in candidates if name in sections.PRECISIONS), "fp32")
    if chosen.suite != "none" and not chosen.root:
        chosen = replace(chosen, root=eval_of_run.get("root"))
    return replace(config, eval=chosen, precision=precision)


def check_eval(config: EvalRunConfig) -> Path:
    """The folder of the results. Raises UserError if no model is given, or two, and for what is missing."""
    folder = model_run(config, config.eval.weights)
    if folder and config.out:
        raise UserError(f"out={config.out}: the results of a run are in its folder; leave it out")
    check_places(completed_by_run(config).eval)
    if folder:
        locate(folder, config.which)
        return folder
    return Path(config.out).expanduser() if config.out else run_folder(file_name(results_name(config.model)))


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
