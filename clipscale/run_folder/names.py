"""The folder of a run: its name, its checkpoints (RUN/checkpoints/step_N), and its records. Imports nothing heavy."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.record import EvalRecord, Record, RunResult
from clipscale.common.text import did_you_mean

# The file of a checkpoint that holds everything but its tensors.
META = "meta.json"
LOCK = "run.lock"
# Suffixes of files that a shell or a scheduler may write into a run's folder before the run.
LOG_SUFFIXES = (".log", ".out", ".err", ".txt")
# One JSON object a step.
METRICS = "metrics.jsonl"
# The beginning of the names of folders with records that a run has set aside.
EARLIER = "earlier"
# The folder of evaluations.
EVAL = "eval"
# The run's result. It exists only when the run is complete.
RESULT = "result.json"
# The settings.
CONFIG = "config.yaml"
# Machine, versions and commit.
ENVIRONMENT = "env.json"


def run_folder(name: str) -> Path:
    """`runs/NAME` for a plain name; anything with a slash is a path."""
    return Path(name).expanduser() if "/" in name or name in (".", "..") else Path("runs") / name


def path_or_run(name: str) -> Path:
    """The path, if there is one, or else the folder of the run of that name."""
    path = Path(name).expanduser()
    return path if path.exists() else run_folder(name)


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


# ---- checkpoints ----


def checkpoint_to_resume(run: str, resume: str, *, own_first: bool) -> Path | None:
    """The checkpoint that a start resumes if it is undamaged: the run's own newest one, or that of `resume=PATH`.

    None if there is none. `run`: its name, or empty. `own_first`: its own if both have some.
    """
    if resume == "none":
        return None
    own = checkpoints_of(run_folder(run)) if run else []
    named = [] if resume == "auto" else named_checkpoints(resume)
    checkpoints = (own or named) if own_first else (named or own)
    return checkpoints[-1] if checkpoints else None


def run_to_resume(run: str, resume: str, *, own_first: bool = True) -> Path | None:
    """The folder of the run of `checkpoint_to_resume`."""
    checkpoint = checkpoint_to_resume(run, resume, own_first=own_first)
    return checkpoint.parent.parent if checkpoint else None


def named_checkpoints(resume: str) -> list[Path]:
    """The checkpoints of `resume=PATH`, by step: the one at the path, or all of that run's."""
    path = path_or_run(resume)
    return [path] if path in checkpoints_of(path.parent.parent) else checkpoints_of(path)


def is_run(folder: Path) -> bool:
    """Whether this is the folder of a run, or one of its checkpoints."""
    return (folder / "checkpoints").is_dir() or (folder / META).is_file()


def path_of(run: Path, step: int) -> Path:
    """The path of a run's checkpoint of a step, whether it is there or not."""
    return run / "checkpoints" / f"step_{step:08d}"


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.removeprefix("step_"))


def checkpoints_of(run: Path) -> list[Path]:
    """The paths of a run's checkpoints, by step."""
    paths = (run / "checkpoints").glob("step_*")
    return sorted((path for path in paths if re.fullmatch(r"step_\d+", path.name)), key=step_of)


def described_values(checkpoint: Path) -> Record:
    """A checkpoint's values other than tensors, without torch and without a look at their checksum.

    A start reads them by `checkpoint.read_description`. Raises files.DAMAGED_OR_FOREIGN.
    """
    files.check_inside(checkpoint / META, checkpoint)
    return cast(Record, files.read_json(checkpoint / META)["meta"]["values"])


def check_own(run: Path) -> None:
    """Raise UserError for a folder that is not a run's: it has files, but neither a run's lock nor a checkpoint.

    Files below checkpoints/ count. Files with LOG_SUFFIXES do not.
    """
    lock = run / LOCK
    # RunLock writes "process ..." into it, and empties it at its end.
    ours = lock.is_file() and b"process ".startswith(lock.read_bytes()[:8])
    if not run.is_dir() or ours or any((path / META).is_file() for path in checkpoints_of(run)):
        return
    inside = run / "checkpoints"
    for path in (*files.visible_entries(run), *(files.visible_entries(inside) if inside.is_dir() else ())):
        if path.suffix not in LOG_SUFFIXES and path != inside:
            raise UserError(
                f"run={run} is not the folder of a run: it holds {path.relative_to(run)}; choose another run=NAME"
            )


# ---- records: what a run's folder holds beside its checkpoints ----


@dataclass(frozen=True)
class RunRecord:
    """A file or a folder of records."""

    name: str
    # Whether it holds measurements. A run that begins anew moves records aside if one of these is not empty.
    is_measurement: bool = False
    # Pattern of paths in the run's folder: these files are copied with the run. Empty if none are.
    copied: str = ""
    # Pattern of the names of those files that `files.replacing` writes.
    replaced: str = ""


def record_file(name: str, *, is_measurement: bool = False) -> RunRecord:
    """A record that is one file. It is copied, and written by `files.replacing`."""
    return RunRecord(name, is_measurement, copied=re.escape(name), replaced=re.escape(name))


RUN_RECORDS = (
    record_file(METRICS, is_measurement=True),
    RunRecord(EVAL, is_measurement=True, copied=rf"{EVAL}/step_[^/]*\.json", replaced=r"step_\d+\.json|final\.json"),
    record_file(RESULT, is_measurement=True),
    record_file(CONFIG),
    record_file(ENVIRONMENT),
    RunRecord("report.html"),
    RunRecord("tensorboard"),
    RunRecord("wandb"),
)


def written_settings(folder: Path) -> Record:
    """The settings in a run's config.yaml; empty if there is no such file. Raises DAMAGED of `files`."""
    file = folder / CONFIG
    return files.read_record(file) if file.is_file() else {}


def settings_of_run(folder: Path) -> Record:
    """The settings of a run; empty if it has none. Raises UserError where its file is damaged."""
    path = folder / CONFIG
    with files.damage_to_user_error("the run's", path, "start the run again, which sets it aside, or move it away"):
        return files.read_record(path)


def read_evaluation(path: Path) -> EvalRecord:
    """The file of an evaluation; empty if there is none. Raises DAMAGED of `files`."""
    record = files.read_record(path)
    for key in ("results", "measured"):
        for values in files.named_values(record.get(key, {})).values():
            files.named_values(values)
    return cast(EvalRecord, record)


def read_result(path: Path) -> RunResult:
    """The file of a complete run's result. Raises DAMAGED of `files`, also if there is none."""
    record = files.read_record(path)
    results = files.named_values(record.get("eval")).values()
    values = [value for metrics in results for value in files.named_values(metrics).values()]
    if type(record.get("step")) is not int or not all(isinstance(value, int | float) for value in values):
        raise ValueError("it holds no result")
    return cast(RunResult, record)
