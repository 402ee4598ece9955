"""The records of a run: a table of the files beside its checkpoints, their types and readers. Imports nothing heavy."""

import json
import re
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TypedDict, cast

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.record import Record, Results
from clipscale.run_folder.paths import CONFIG, ENVIRONMENT, EVAL, METRICS, RESULT


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


# ---- settings ----


def written_settings(run_dir: Path) -> Record:
    """The settings in a run's config.yaml; empty if there is no such file. Raises DAMAGED of `files`."""
    file = run_dir / CONFIG
    return files.read_record(file) if file.is_file() else {}


def settings_of_run(run_dir: Path) -> Record:
    """The settings of a run; empty if it has none. Raises UserError where its file is damaged."""
    path = run_dir / CONFIG
    with files.damage_to_user_error("the run's", path, "start the run again, which sets it aside, or move it away"):
        return files.read_record(path)


# ---- evaluations and the result ----


class EvalRecord(TypedDict):
    """The file of an evaluation, eval/step_N.json."""

    # None if the weights belong to no step.
    step: int | None
    results: Results
    # What each set's results belong to: its images, versions, the precision.
    measured: dict[str, dict[str, object]]


def read_evaluation(path: Path) -> EvalRecord:
    """The file of an evaluation; empty if there is none. Raises DAMAGED of `files`."""
    record = files.read_record(path)
    for key in ("results", "measured"):
        for values in files.named_values(record.get(key, {})).values():
            files.named_values(values)
    return cast(EvalRecord, record)


def read_evaluations(run_dir: Path) -> list[EvalRecord]:
    """The contents of `eval/step_N.json`, by step. Files of other names, such as copies, are not read."""
    records: list[tuple[int, EvalRecord]] = []
    for file in (run_dir / EVAL).glob("step_*.json"):
        if not re.fullmatch(r"step_\d+", file.stem):
            continue
        with files.damage_to_user_error("results", file, "evaluate again"):
            files.check_inside(file, run_dir)
            step = int(file.stem.removeprefix("step_"))
            records.append((step, {**read_evaluation(file), "step": step}))
    return [record for _, record in sorted(records, key=itemgetter(0))]


class RunResult(TypedDict):
    """The result of a complete run, which `train` returns and result.json holds."""

    # The run's folder.
    run: str
    # Completed steps.
    step: int
    # The last step's loss.
    loss: float
    # The results of the last evaluation.
    eval: Results


def read_result(path: Path) -> RunResult:
    """The file of a complete run's result. Raises DAMAGED of `files`, also if there is none."""
    record = files.read_record(path)
    results = files.named_values(record.get("eval")).values()
    values = [value for metrics in results for value in files.named_values(metrics).values()]
    if type(record.get("step")) is not int or not all(isinstance(value, int | float) for value in values):
        raise ValueError("it holds no result")
    return cast(RunResult, record)


# ---- metrics ----


class StepRecord(TypedDict, total=False):
    """A line of metrics.jsonl, the record of one step. It also has the times and the memory of `StepTimer.record`.

    Earlier versions wrote fewer fields.
    """

    step: int
    samples: int
    batch: int
    lr: float
    loss: float
    # A captioner's two losses, unweighted.
    contrastive_loss: float
    caption_loss: float
    grad_norm: float | None
    skipped: bool
    logit_scale: float
    # Statistics of the features, in some steps; see `start_statistics`.
    modality_gap: float
    uniformity_image: float
    uniformity_text: float
    rank_image: float
    rank_text: float
    nearest: float
    # Seconds since 1970.
    time: float
    samples_per_s: float
    samples_per_s_per_gpu: float
    samples_per_s_wall: float
    caption_tokens: float
    mfu: float | None
    data_wait_frac: float
    host_rss_bytes: int
    # The fields from here on are the loader's.
    broken: int
    faults: int
    broken_by: dict[str, int]
    faults_by: dict[str, int]
    host_pinned: bool


def read_metrics(path: Path) -> list[StepRecord]:
    """The records of a `metrics.jsonl`, in order, without an incomplete last line."""
    records, damaged = parsed_lines(path)
    if damaged:
        raise UserError(f"metrics: {path} has {damaged} damaged lines; restore the file, or start the run again")
    return records


def parsed_lines(path: Path) -> tuple[list[StepRecord], int]:
    """The records of a `metrics.jsonl`, and the number of its lines that are not records."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    records: list[StepRecord] = []
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(cast(StepRecord, record))
    return records, len(lines) - len(records)


def lr_of_step(run_dir: Path, step: int) -> float | None:
    """The learning rate of a step, by the run's records; None if they do not say."""
    records, _ = parsed_lines(run_dir / METRICS)
    rates = [record["lr"] for record in records if record["step"] == step and isinstance(record.get("lr"), float)]
    return rates[0] if rates else None
