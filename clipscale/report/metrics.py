"""The metric log of a run: one JSON object per step in `metrics.jsonl`, which is the record that everything else derives from.

The console, wandb and TensorBoard are sinks. A sink that fails does not stop the run.
"""

import errno
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.terminal import printable
from clipscale.config.sections import LogConfig
from clipscale.report.environment import environment
from clipscale.report.sinks import Sinks

Record = Mapping[str, Any]

CONSOLE_FIELDS = {
    "step": "d",
    "samples": "d",
    "loss": ".4f",
    "logit_scale": ".2f",
    "lr": ".3e",
    "grad_norm": ".3f",
    "samples_per_s": ".1f",
    "data_wait_frac": ".3f",
    "step_s": ".3f",
    "mem_peak_bytes": "d",
    "broken": "d",
    "faults": "d",
}
"""Fields of the console line, in order, with their formats. Fields that a record lacks are left out."""

LONGEST_LINE, MOST_PARTS = 1 << 20, 1 << 12
"""Bytes, and lists and objects, of a record. Ours take a kilobyte."""
MOST_BYTES = 1 << 26
"""Bytes of records that are read into memory, where they take up to twenty times as much: those of 90,000 steps."""


class MetricLog:
    """The sinks of one run, on rank 0.

    Args:
        run_dir: the run folder; `metrics.jsonl`, `env.json` and `config.yaml` are written there.
        config: which sinks to open.
        resolved_config: the run's settings as YAML, written to `config.yaml` and sent to wandb.
        resume_step: the step the run resumes from; later lines, left by the interrupted run, are removed. 0: a new run.
        total_steps: length of the run, for the progress bar; None: unknown.
        world: number of processes, for `env.json`.

    Raises UserError for a folder that cannot be written. Later, a full disk under `metrics.jsonl` prints a warning,
    and its lines wait in memory. A failure of wandb or TensorBoard prints a warning and closes that sink.
    """

    def __init__(
        self,
        run_dir: Path,
        config: LogConfig,
        *,
        resolved_config: str,
        resume_step: int = 0,
        total_steps: int | None = None,
        world: int = 1,
        console: Console | None = None,
    ) -> None:
        self.config = config
        # No highlighting and no wrapping: they put control codes and line breaks into lines that are meant for grep.
        self.console = console or Console(highlight=False, soft_wrap=True, emoji=False)
        self._unprinted: Record | None = None
        self._unwritten, self._full = bytearray(), False
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._file = _open_from(run_dir / "metrics.jsonl", resume_step)
            env = json.dumps(environment(world) | {"resume_step": resume_step}, indent=1)
            files.write_text(run_dir / "env.json", env + "\n")
            files.write_text(run_dir / "config.yaml", resolved_config)
        except OSError as error:
            raise UserError(f"run={run_dir}: cannot write there ({error.strerror}); choose another folder") from error
        settings = {} if config.wandb == "disabled" else yaml.safe_load(resolved_config)
        self._sinks = Sinks(run_dir, config, settings, self.message, resume_step)
        self._progress = self._start_progress(resume_step, total_steps) if config.progress else None

    def step(self, record: Record) -> None:
        """Log one optimizer step: `record["step"]` (counted from 1) and the measured values, which are no tensors."""
        self._append(json.dumps(_encodable(record), allow_nan=False) + "\n")
        step = int(record["step"])
        self._unprinted = record
        if step % self.config.every == 0:
            self._print_record()
        if self._progress is not None:
            rate, loss = record.get("samples_per_s", math.nan), record.get("loss", math.nan)
            self._progress.update(
                self._progress.task_ids[0], completed=step, description=f"{rate:,.0f}/s loss {loss:.4f}"
            )
        self._sinks.write(step, {k: float(v) for k, v in record.items() if isinstance(v, int | float)})

    def _append(self, line: str) -> None:
        """Append to `metrics.jsonl`. What a full disk does not take is kept, and written with the next line."""
        self._unwritten += line.encode()
        reason, remedy = "the disk is full", ", free some space"
        try:
            del self._unwritten[: self._file.write(self._unwritten)]
        except OSError as error:
            reason, remedy = error.strerror or str(error), remedy if error.errno == errno.ENOSPC else ""
            if error.errno == errno.ESTALE:  # the server has forgotten the open file; a new handle finds it again
                with suppress(OSError):
                    self._file = Path(self._file.name).open("ab", buffering=0)  # noqa: SIM115 (closed by `close`)
        if self._unwritten and not self._full:
            self.message(f"warning: {self._file.name} cannot be written ({reason}); its lines wait in memory{remedy}")
        self._full = bool(self._unwritten)

    def _print_record(self) -> None:
        """Print the newest record, unless it has been printed."""
        if self._unprinted is not None:
            self.message(console_line(self._unprinted))
            self._unprinted = None

    def eval(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """Log evaluation results: one console line for each set, and `eval/SET/METRIC` for the sinks."""
        for name, metrics in results.items():
            values = " ".join(f"{k}={v:d}" if isinstance(v, int) else f"{k}={v:.4f}" for k, v in metrics.items())
            self.message(f"eval step={step} set={name} {values}")
        self._sinks.eval(step, results)

    def message(self, text: str) -> None:
        """Print a line on the console."""
        self.console.print(printable(text), markup=False)

    def close(self) -> None:
        """Flush and close every sink. Safe to call twice."""
        self._print_record()
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        self._sinks.close()
        if not self._file.closed:
            self._append("")
            self._file.close()
            if self._unwritten:
                lines = bytes(self._unwritten).count(b"\n")
                self.message(f"warning: {self._file.name} lacks the last {lines} lines")

    def __enter__(self) -> "MetricLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_progress(self, done: int, total: int | None) -> Progress | None:
        if not self.console.is_terminal:
            return None
        columns = (SpinnerColumn(), *Progress.get_default_columns(), MofNCompleteColumn())
        bar = Progress(*columns, console=self.console, transient=True)
        bar.add_task("train", total=total, completed=done)
        bar.start()
        return bar


def console_line(record: Record) -> str:
    """`step=120 samples=30720 loss=2.1034 ...`: fields in a fixed order, for grep and awk."""
    fields = [(name, style, record[name]) for name, style in CONSOLE_FIELDS.items() if record.get(name) is not None]
    return " ".join(f"{name}={int(value) if style == 'd' else value:{style}}" for name, style, value in fields)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`, in order, without an incomplete last line. NaN and infinity are floats again.

    Of more than MOST_BYTES only every second, fourth, ... and the last are kept: a report draws 4,000 points of a curve.

    Raises UserError for any other damage.
    """
    kept: list[dict[str, Any]] = []
    last: list[dict[str, Any]] = []
    held, every = 0, 1
    for number, (line, record) in enumerate(_complete_lines(path) if path.is_file() else ()):
        last = [{k: _NON_FINITE.get(v, v) if isinstance(v, str) else v for k, v in record.items()}]
        if number % every == 0:
            kept += last
            held += len(line)
        while held > MOST_BYTES:
            kept, held, every = kept[::2], held // 2, 2 * every
    return kept if kept[-1:] == last else kept + last


_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _encodable(record: Record) -> dict[str, Any]:
    """Replaces NaN and infinity, which strict JSON lacks, by the strings that `float()` and protobuf's JSON accept."""

    def strange(value: Any) -> bool:
        return isinstance(value, float) and not math.isfinite(value)

    return {key: json.dumps(value) if strange(value) else value for key, value in record.items()}


def _complete_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Text and object of every complete line. Raises UserError for damage before the last line."""
    damaged = 0
    with files.reported("metrics", path, "make it readable, or move it away"):
        for number, line in enumerate(files.lines(path, LONGEST_LINE), 1):
            if damaged:
                break
            record = _record_of(line)
            if record is None:
                damaged = number
            else:
                yield line, record
        else:
            return
    raise UserError(f"{path}, line {damaged} is not a JSON object with a step; restore the file, or move it away")


def _record_of(line: bytes) -> dict[str, Any] | None:
    """The object in a line; None for what has no number of a step, or values that a record cannot have."""
    try:
        record = files.parse_json(line.decode("utf-8", "replace"), MOST_PARTS) if line.endswith(b"\n") else None
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    step, numbers = record.get("step", 0), [value for value in record.values() if isinstance(value, int)]
    right = type(step) is int and 0 <= step < 2**53 and all(abs(value) < 2**63 for value in numbers)
    return record if right else None


def _open_from(path: Path, resume_step: int) -> FileIO:
    """Open for appending, without the lines of steps after `resume_step`. Unbuffered: a killed run loses no line."""
    with files.replacing(path) as new:
        for line, record in _complete_lines(path) if resume_step and path.is_file() else ():
            if record.get("step", 0) <= resume_step:
                new.write(line)
    return path.open("ab", buffering=0)
