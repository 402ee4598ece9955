"""The settings of `clipscale eval`, and their checks: the model, the sets and the folder of the results."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar

from clipscale.common.errors import UserError
from clipscale.common.files import file_name
from clipscale.config import sections
from clipscale.config.model import ModelConfig
from clipscale.config.run_model import EVAL_MODEL_SETTINGS, AnyModel, check_one_model
from clipscale.config.setting import differences, section, setting
from clipscale.eval.set_paths import check_set_paths
from clipscale.run_folder.chosen_checkpoint import find_checkpoint
from clipscale.run_folder.paths import existing_run, run_folder
from clipscale.run_folder.records import settings_of_run


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
    eval: sections.EvalConfig = section(sections.EvalConfig)
    log: sections.SinkConfig = section(sections.SinkConfig)
    launch: sections.LaunchConfig = section(sections.LaunchConfig)


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
    check_one_model(config, config.eval.weights)
    folder = existing_run(config.run) if config.run else None
    if folder and config.out:
        raise UserError(f"out={config.out}: the results of a run are in its folder; leave it out")
    check_set_paths(completed_by_run(config).eval)
    if folder:
        find_checkpoint(folder, config.which)
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
