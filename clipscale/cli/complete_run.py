"""Finds out whether a run is complete with the settings of a command, so that nothing is left to train."""

from pathlib import Path

from clipscale.common import files
from clipscale.common.terminal import log_line
from clipscale.config.config_file import changed_settings, to_yaml
from clipscale.config.setting import changes_weights
from clipscale.config.train_config import TrainConfig
from clipscale.run_folder.paths import RESULT, checkpoint_path
from clipscale.run_folder.records import RunResult, read_result, written_settings


def result_if_complete(config: TrainConfig) -> RunResult | None:
    """The run's result, from its folder, if it is complete with these settings; otherwise None.

    Also None if a file is damaged, which the start then moves aside.
    """
    folder = Path(config.run)
    if config.resume != "auto" or not (folder / RESULT).is_file():
        return None
    try:
        result = read_result(folder / RESULT)
        trained = written_settings(folder)
    except files.DAMAGED:
        return None
    differing = changed_settings(trained, to_yaml(config))
    changed = any(invalidates_result(key, typed) for key, (_, typed) in differing.items())
    return result if checkpoint_path(folder, result["step"]).is_dir() and not changed else None


def result_written(run_dir: Path) -> int | None:
    """When a run's result was written, in nanoseconds; None if the run is not complete."""
    file = run_dir / RESULT
    return file.stat().st_mtime_ns if file.is_file() else None


def invalidates_result(key: str, typed: object) -> bool:
    """Whether a complete run starts again for this setting, which differs from the one that it was trained with.

    A model's setting without a value is no difference: the weights have filled it in. A new `checkpoint.copy` is one:
    the copy has yet to be made.
    """
    if key.startswith("model."):
        return typed not in (None, "", {})
    if key == "checkpoint.copy":
        return bool(typed)
    return changes_weights(TrainConfig, key)


def print_complete(config: TrainConfig, result: RunResult) -> None:
    """Print the result of a run that is complete."""
    from clipscale.log.table import print_results

    step = result["step"]
    log_line(
        f"run={config.run} is complete at step {step}: nothing is left to train; give more samples= to train further"
    )
    print_results(result["eval"], f"{Path(config.run).name}, step {step}")
