"""The metric log of a run: one JSON object per step in `metrics.jsonl`, from which everything else derives.

The console, wandb and TensorBoard are sinks. A sink that fails does not stop the run.
"""

import json
import math
import time
from collections.abc import Mapping
from datetime import timedelta
from io import FileIO
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

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


class MetricLog:
    """The log of one run, on rank 0: `metrics.jsonl`, `env.json` and `config.yaml` in its folder, console and sinks.

    A full disk under `metrics.jsonl` prints a warning, and its lines wait in memory.
    """

    def __init__(
        self,
        run_dir: Path,
        config: LogConfig,
        *,
        resolved_config: str,
        resume_step: int = 0,
        world: int = 1,
        trains: bool = True,
        console: Console | None = None,
    ) -> None:
        """`resolved_config`: the settings as YAML. `resume_step`: later lines, of an interrupted run, are removed.

        `trains`: whether this start trains; otherwise `env.json` and `config.yaml` stay those of the last that did.
        """
        self.config = config
        # No highlighting and no wrapping: they put control codes and line breaks into lines that are meant for grep.
        self.console = console or Console(highlight=False, soft_wrap=True, emoji=False)
        self.progress = Progress(self.console, config.progress)
        self._unprinted: Record | None = None
        self._unwritten = bytearray()
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = _open_from(run_dir / "metrics.jsonl", resume_step)
        if trains:
            files.write_json(run_dir / "env.json", environment(world) | {"resume_step": resume_step})
            files.write_text(run_dir / "config.yaml", resolved_config)
        self._sinks = Sinks(run_dir, config, yaml.safe_load(resolved_config), self.message, resume_step)

    def step(self, record: Record) -> None:
        """Log one optimizer step: `record["step"]` (counted from 1) and the measured values, which are no tensors.

        JSON knows no NaN and no infinity: the file has null for them.
        """
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._append(json.dumps(finite) + "\n")
        self._unprinted = record
        if record["step"] % self.config.every == 0:
            self._print_record()
        elif self.config.progress and self.console.is_terminal:
            self.console.print(console_line(record)[: self.console.width - 1], end="\r", markup=False)
        self._sinks.write(record["step"], {k: float(v) for k, v in record.items() if isinstance(v, int | float)})

    def _append(self, line: str) -> None:
        """Append to `metrics.jsonl`. What a full disk does not take is kept, and written with the next line."""
        full, reason = bool(self._unwritten), "the disk is full"
        self._unwritten += line.encode()
        try:
            del self._unwritten[: self._file.write(self._unwritten)]
        except OSError as error:
            reason = error.strerror or reason
        if self._unwritten and not full:
            self.message(f"warning: {self._file.name} cannot be written ({reason}); its lines wait in memory")

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
        """Flush and close every sink."""
        self._print_record()
        self._sinks.close()
        self._append("")
        self._file.close()

    def __enter__(self) -> "MetricLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Progress:
    """How far a step or an evaluation is: on a terminal one line, which is overwritten; elsewhere a line a minute.

    Short work shows nothing.
    """

    def __init__(self, console: Console, wanted: bool = True) -> None:
        self.console, self.wanted = console, wanted
        self._what, self._began, self._shown = "", 0.0, 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        """`done` of `total` parts of the work called `what`, which begins with 0 parts. `total` may be an estimate."""
        now, terminal = time.monotonic(), self.console.is_terminal
        if done == 0 or what != self._what:
            self._what, self._began, self._shown = what, now, now
        elif done == total and terminal and self._shown > self._began:
            self._print("")
        elif done < total and self.wanted and now - self._shown >= (0.5 if terminal else 60):
            left = timedelta(seconds=round((now - self._began) * (total / done - 1)))
            self._print(f"{what}: {done} of {total}, {done / total:.0%}, {left} left")
            self._shown = now

    def _print(self, line: str) -> None:
        width, terminal = self.console.width - 1, self.console.is_terminal
        self.console.print(
            line[:width].ljust(width) if terminal else line, end="\r" if terminal else "\n", markup=False
        )


def console_line(record: Record) -> str:
    """`step=120 samples=30720 loss=2.1034 ...`: fields in a fixed order, for grep and awk."""
    fields = [(name, style, record[name]) for name, style in CONSOLE_FIELDS.items() if record.get(name) is not None]
    return " ".join(f"{name}={int(value) if style == 'd' else value:{style}}" for name, style, value in fields)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`, in order, without an incomplete last line. UserError for other damage."""
    records: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True) if path.is_file() else [], 1):
        try:
            records += [dict(json.loads(line))] if line.endswith(b"\n") else []
        except (ValueError, TypeError) as error:
            raise UserError(f"{path}, line {number} is no JSON object; restore the file, or move it away") from error
    return records


def _open_from(path: Path, resume_step: int) -> FileIO:
    """Open for appending, without the lines of steps after `resume_step`. Unbuffered: a killed run loses no line."""
    records = read_metrics(path) if resume_step else []
    files.write_text(path, "".join(json.dumps(record) + "\n" for record in records if record["step"] <= resume_step))
    return path.open("ab", buffering=0)
