"""The metric log of a run: one JSON object per step in `metrics.jsonl`, from which everything else derives.

The console, wandb and TensorBoard are sinks. A sink that fails does not stop the run.
"""

import json
import math
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from clipscale.common import files
from clipscale.common.output import RetryingLines
from clipscale.common.record import Results
from clipscale.common.terminal import Progress, log_line, log_warning
from clipscale.log.environment import environment
from clipscale.log.sinks import Sinks, open_sinks
from clipscale.log.table import FIGURES
from clipscale.log.warnings import WARM_UP_STEPS, WINDOW_STEPS, warnings_of
from clipscale.run_folder.paths import CONFIG, ENVIRONMENT, METRICS
from clipscale.run_folder.records import StepRecord, parsed_lines
from clipscale.run_folder.set_aside import rename_damaged

# Least number of seconds between two console lines.
PAUSE_S = 10.0


def open_log(
    run_dir: Path,
    *,
    wandb: str = "disabled",
    tensorboard: bool = False,
    every: int = 1,
    settings: str,
    resume_step: int = 0,
    world_size: int = 1,
    total: int,
) -> "MetricLog":
    """Write `env.json` and `config.yaml` into the run's folder, and open its `metrics.jsonl` and the sinks.

    `settings`: as YAML. `resume_step`: the interrupted run's lines of later steps are removed. `total`: steps of the
    run; if none are left, `env.json` and `config.yaml` stay as they are.
    """
    is_training = resume_step < total
    path = run_dir / METRICS
    run_dir.mkdir(parents=True, exist_ok=True)
    for record_path in (path, run_dir / ENVIRONMENT, run_dir / CONFIG):
        if record_path.is_dir():
            rename_damaged(record_path, "a folder")
    records, damaged = parsed_lines(path) if resume_step else ([], 0)
    records = [record for record in records if record["step"] <= resume_step]
    if damaged:
        rename_damaged(path, f"{damaged} of its lines")
    files.write_text(path, "".join(json.dumps(record) + "\n" for record in records))
    if is_training:
        files.write_json(run_dir / ENVIRONMENT, {**environment(world_size), "resume_step": resume_step})
    if is_training or not (run_dir / CONFIG).exists():
        files.write_text(run_dir / CONFIG, settings)
    sinks = open_sinks(run_dir, wandb, tensorboard, files.parse_yaml(settings), resume_step)
    return MetricLog(RetryingLines(path.open("ab", buffering=0)), sinks, every=every, total=total)


class MetricLog:
    """The log of one run, on rank 0: `metrics.jsonl`, console and sinks. `open_log` opens it."""

    def __init__(self, lines: RetryingLines, sinks: Sinks, *, every: int, total: int) -> None:
        """`lines`: `metrics.jsonl`. `every`: steps between console lines. `total`: steps of the run."""
        self.every = every
        self.total = total
        self.progress = Progress()
        self._lines = lines
        self._sinks = sinks
        self._unprinted = ""
        self._printed_at = 0.0
        self._recent: deque[StepRecord] = deque(maxlen=WINDOW_STEPS)
        self._times: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._warned: set[str] = set()
        # Steps of this start.
        self._num_steps = 0

    def log_step(self, record: StepRecord) -> None:
        """Log one optimizer step: `record["step"]` (counted from 1) and the measured values, which are not tensors.

        JSON knows no NaN and no infinity: the file has null for them.
        """
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        self._lines.append(json.dumps(finite) + "\n")
        now = time.monotonic()
        time_left = None
        if self._times:
            pace = (now - self._times[0]) / len(self._times)
            time_left = duration(pace * (self.total - record["step"]))
        self._times.append(now)
        self._unprinted = console_line({**record, "left": time_left})
        first = len(self._times) == 1
        if first or (now - self._printed_at >= PAUSE_S and record["step"] % self.every == 0):
            self._print_last()
            self._printed_at = now
        self._num_steps += 1
        if self._num_steps > WARM_UP_STEPS:
            self._recent.append(record)
            warnings = warnings_of(self._recent)
            for name in warnings.keys() - self._warned:
                log_warning(f"step {record['step']}: {warnings[name]}")
            self._warned |= warnings.keys()
        self._sinks.write(record["step"], record)

    def log_evaluation(self, step: int, results: Results) -> None:
        """Log evaluation results: one console line for each set, and `eval/SET/METRIC` for the sinks."""
        self._print_last()
        for name, metrics in results.items():
            values = " ".join(f"{key}={metrics[key]:.4f}" for key in FIGURES["scores"] if key in metrics)
            log_line(f"eval step={step} set={name} {values}")
        self._sinks.write_evaluation(step, results)

    def close(self) -> None:
        """Flush and close every sink."""
        self._print_last()
        self._lines.close()
        self._sinks.close()  # closed last, because a sink may wait for a server

    def _print_last(self) -> None:
        """Print the line of the last step, if it is not printed yet."""
        if self._unprinted:
            log_line(self._unprinted)
        self._unprinted = ""


def console_line(record: Mapping[str, object]) -> str:
    """`step=120 loss=2.1034 ...`, for grep and awk: the console fields of figures.yaml, without counters of faults that
    are 0.
    """
    return " ".join(
        f"{field['name']}={field['form'].format(record[key])}"
        for key, field in FIGURES["console"].items()
        if record.get(key) is not None and ("from" not in field or field["from"] <= record[key])
    )


def duration(seconds: float) -> str:
    """Seconds in their two largest units: `5d12h`, `12h05m`, `5m07s`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d{hours % 24:02}h"
    return f"{hours}h{minute:02}m" if hours else f"{minute}m{second:02}s"
