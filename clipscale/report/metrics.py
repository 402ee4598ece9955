"""The metric log of a run: one JSON object per step in `metrics.jsonl`, from which everything else derives.

The console, wandb and TensorBoard are sinks. A sink that fails does not stop the run.
"""

import json
import math
from collections.abc import Iterator, Mapping
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

    Raises UserError for a folder that cannot be written. Later, a full disk under `metrics.jsonl` prints a warning,
    and its lines wait in memory.
    """

    def __init__(
        self,
        run_dir: Path,
        config: LogConfig,
        *,
        resolved_config: str,
        resume_step: int = 0,
        world: int = 1,
        console: Console | None = None,
    ) -> None:
        """`resolved_config`: the settings as YAML. `resume_step`: later lines, of an interrupted run, are removed."""
        self.config = config
        # No highlighting and no wrapping: they put control codes and line breaks into lines that are meant for grep.
        self.console = console or Console(highlight=False, soft_wrap=True, emoji=False)
        self._unprinted: Record | None = None
        self._unwritten, self._full = bytearray(), False
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._file = _open_from(run_dir / "metrics.jsonl", resume_step)
            files.write_json(run_dir / "env.json", environment(world) | {"resume_step": resume_step})
            files.write_text(run_dir / "config.yaml", resolved_config)
        except OSError as error:
            raise UserError(f"run={run_dir}: cannot write there ({error.strerror}); choose another folder") from error
        self._sinks = Sinks(run_dir, config, yaml.safe_load(resolved_config), self.message, resume_step)

    def step(self, record: Record) -> None:
        """Log one optimizer step: `record["step"]` (counted from 1) and the measured values, which are no tensors."""
        self._append(json.dumps(_encodable(record), allow_nan=False) + "\n")
        self._unprinted = record
        if record["step"] % self.config.every == 0:
            self._print_record()
        elif self.config.progress and self.console.is_terminal:
            self.console.print(console_line(record)[: self.console.width - 1], end="\r", markup=False)
        self._sinks.write(record["step"], {k: float(v) for k, v in record.items() if isinstance(v, int | float)})

    def _append(self, line: str) -> None:
        """Append to `metrics.jsonl`. What a full disk does not take is kept, and written with the next line."""
        self._unwritten += line.encode()
        reason = "the disk is full"
        try:
            del self._unwritten[: self._file.write(self._unwritten)]
        except OSError as error:
            reason = error.strerror or str(error)
        if self._unwritten and not self._full:
            self.message(f"warning: {self._file.name} cannot be written ({reason}); its lines wait in memory")
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
        """Flush and close every sink."""
        self._print_record()
        self._sinks.close()
        self._append("")
        self._file.close()
        if self._unwritten:
            self.message(f"warning: {self._file.name} lacks the last {self._unwritten.count(10)} lines")

    def __enter__(self) -> "MetricLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def console_line(record: Record) -> str:
    """`step=120 samples=30720 loss=2.1034 ...`: fields in a fixed order, for grep and awk."""
    fields = [(name, style, record[name]) for name, style in CONSOLE_FIELDS.items() if record.get(name) is not None]
    return " ".join(f"{name}={int(value) if style == 'd' else value:{style}}" for name, style, value in fields)


NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Strict JSON lacks them. They are written as these strings, which `float()` and protobuf's JSON accept."""


def _encodable(record: Record) -> dict[str, Any]:
    def strange(value: Any) -> bool:
        return isinstance(value, float) and not math.isfinite(value)

    return {key: json.dumps(value) if strange(value) else value for key, value in record.items()}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`, in order, without an incomplete last line. NaN and infinity are floats again.

    Raises UserError for any other damage.
    """
    lines = _complete_lines(path) if path.is_file() else []
    return [{k: NON_FINITE.get(v, v) if isinstance(v, str) else v for k, v in record.items()} for _, record in lines]


def _complete_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Text and object of every complete line."""
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            if line.endswith(b"\n"):
                yield line, dict(json.loads(line))
        except (ValueError, TypeError) as error:
            raise UserError(f"{path}, line {number} is no JSON object; restore the file, or move it away") from error


def _open_from(path: Path, resume_step: int) -> FileIO:
    """Open for appending, without the lines of steps after `resume_step`. Unbuffered: a killed run loses no line."""
    with files.replacing(path) as new:
        for line, record in _complete_lines(path) if resume_step and path.is_file() else ():
            if record["step"] <= resume_step:
                new.write(line)
    return path.open("ab", buffering=0)
