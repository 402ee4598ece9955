"""The metric log of a run: one JSON object per step in `metrics.jsonl`, from which everything else derives.

The console, wandb and TensorBoard are sinks. A sink that fails does not stop the run.
"""

import json
import math
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import yaml
from rich.console import Console

from clipscale.common import files
from clipscale.common.record import Results
from clipscale.common.terminal import printable
from clipscale.config.sections import LogConfig
from clipscale.log.environment import environment
from clipscale.log.records import Record, read_metrics
from clipscale.log.sinks import Sinks
from clipscale.log.table import FIGURES
from clipscale.log.warnings import FIRST, WINDOW, warnings_of

PAUSE_S = 10.0
"""Seconds between console lines, at least."""
PROGRESS_S = 60.0
"""Seconds between lines about the progress of one step or evaluation."""


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
        total: int | None = None,
        trains: bool = True,
        console: Console | None = None,
    ) -> None:
        """`resolved_config`: the settings as YAML. `resume_step`: later lines, of an interrupted run, are removed.

        `total`: steps of the run. Unless this start `trains`, `env.json` and `config.yaml` stay as they are.
        """
        self.config = config
        self.total = total
        self.settings = yaml.safe_load(resolved_config)
        # No highlighting and no wrapping: they put control codes and line breaks into lines that are meant for grep.
        self.console = console or Console(highlight=False, soft_wrap=True, emoji=False)
        self.progress = Progress(self.message if config.progress else lambda line: None)
        self._unprinted = ""
        self._printed_at = -math.inf
        self._recent: deque[Record] = deque(maxlen=WINDOW)
        self._times: deque[float] = deque(maxlen=WINDOW)
        self._warned: set[str] = set()
        self._unwritten = bytearray()
        path = run_dir / "metrics.jsonl"
        run_dir.mkdir(parents=True, exist_ok=True)
        records = [record for record in read_metrics(path) if record["step"] <= resume_step] if resume_step else []
        files.write_text(path, "".join(json.dumps(record) + "\n" for record in records))
        self._file = path.open("ab", buffering=0)  # a killed run loses no line
        machine = environment(world)
        self._gpu_bytes = min(machine["gpu_bytes"], default=0)
        if trains:
            files.write_json(run_dir / "env.json", machine | {"resume_step": resume_step})
            files.write_text(run_dir / "config.yaml", resolved_config)
        self._sinks = Sinks(run_dir, config, self.settings, self.message, resume_step)

    def step(self, record: Record) -> None:
        """Log one optimizer step: `record["step"]` (counted from 1) and the measured values, which are no tensors.

        JSON knows no NaN and no infinity: the file has null for them.
        """
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._append(json.dumps(finite) + "\n")
        now = time.monotonic()
        peak = record.get("mem_peak_bytes")
        shown = record | {"total": self.total}  # lines have fields that the record lacks
        if peak and self._gpu_bytes:
            shown["mem_peak_frac"] = peak / self._gpu_bytes
        if self.total and self._times:
            pace = (now - self._times[0]) / len(self._times)
            shown["left"] = timedelta(seconds=round(pace * (self.total - record["step"])))
        self._times.append(now)
        self._unprinted = console_line(shown)
        if now - self._printed_at >= PAUSE_S and record["step"] % self.config.every == 0:
            self.message(self._unprinted)
            self._unprinted = ""
            self._printed_at = now
        if record["step"] > FIRST:
            self._recent.append(record)
            warnings = warnings_of([*self._recent], self.settings)
            for kind in warnings.keys() - self._warned:
                self.message(f"warning: step {record['step']}: {warnings[kind]}")
            self._warned |= warnings.keys()
        self._sinks.write(record["step"], record)

    def _append(self, line: str) -> None:
        """Append to `metrics.jsonl`. What a full disk does not take is kept, and written with the next line."""
        self._unwritten += line.encode()
        try:
            del self._unwritten[: self._file.write(self._unwritten)]
        except OSError as error:
            if "disk" not in self._warned:
                self._warned.add("disk")
                self.message(f"warning: {self._file.name} cannot be written ({error.strerror}): lines wait in memory")

    def eval(self, step: int, results: Results) -> None:
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
        if self._unprinted:
            self.message(self._unprinted)
        self._sinks.close()
        self._append("")
        self._file.close()


class Progress:
    """How far a long step or evaluation is: a line every PROGRESS_S seconds."""

    def __init__(self, message: Callable[[str], None]) -> None:
        """`message` prints a line."""
        self.message = message
        self._began = 0.0
        self._shown = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        """`done` of `total` parts of the work called `what`, which begins with 0 parts. `total` may be an estimate."""
        now = time.monotonic()
        if done == 0:
            self._began = now
            self._shown = now
        elif done < total and now - self._shown >= PROGRESS_S:
            left = timedelta(seconds=round((now - self._began) * (total / done - 1)))
            self.message(f"{what}: {done} of {total}, {done / total:.0%}, {left} left")
            self._shown = now


def console_line(record: Record) -> str:
    """`step=120 samples=30720 loss=2.1034 ...`, for grep and awk: the fields that figures.yaml has for the console."""
    return " ".join(
        form.format(record[name]) for name, form in FIGURES["console"].items() if record.get(name) is not None
    )
