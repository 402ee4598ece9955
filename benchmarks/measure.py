"""What the benchmarks share: words KEY=VALUE, a fresh process for each measurement, time and memory, the record.

A script calls `main` with its settings, the jobs that they ask for, and what measures a job. Each job runs in a process
of its own (`python SCRIPT --job JSON`) and becomes rows of OUT/NAME.json, which is written after every job, and of the
table OUT/NAME.md.
"""

import gc
import json
import platform
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from words import Row, settings_of
from words import counts as counts

from clipscale.common.errors import UserError
from clipscale.common.files import read_yaml, write_json, write_text
from clipscale.config.model import ModelConfig
from clipscale.config.presets import conf_dir
from clipscale.log.environment import environment

Columns = dict[str, Callable[[Row], str]]

# Share of the free memory that a process on the CPU may take.
MARGIN = 0.95


def main(
    defaults: Row,
    plan: Callable[[SimpleNamespace], tuple[str, list[Row]]],
    measure: Callable[..., list[Row]],
    columns: Columns,
    compare: Callable[[list[Row]], None] = lambda rows: None,
) -> None:
    """Run a benchmark, or the one job that the command line names.

    `plan(settings)` gives the record's name and the jobs; `measure(**job)` a job's rows; `compare(rows)` adds what
    compares all rows so far. `columns`: of the table, by their heads.
    """
    if sys.argv[1:2] == ["--job"]:
        print(json.dumps(one_job(measure, json.loads(sys.argv[2]))))
        return
    try:
        settings = settings_of(defaults, sys.argv[1:])
        name, jobs = plan(settings)
    except UserError as error:
        sys.exit(f"error: {error}")
    out = Path(settings.out).expanduser()
    out.mkdir(parents=True, exist_ok=True)
    record: Row = {"benchmark": Path(sys.argv[0]).stem, "settings": vars(settings), "machine": machine(), "rows": []}
    for job in jobs:
        rows = in_a_process(job)
        record["rows"] += rows
        record["written"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        compare(record["rows"])
        write_json(out / f"{name}.json", record)
        table = markdown(columns, record["rows"])
        write_text(out / f"{name}.md", f"{table}\n\n{made(record['machine'])}\n")
        print(markdown(columns, rows).splitlines()[2], flush=True)
    print(f"\n{table}")


def model_preset(name: str) -> ModelConfig:
    """The settings in conf/model/NAME.yaml."""
    return ModelConfig(**read_yaml(conf_dir() / "model" / f"{name}.yaml"))


# ---- a job ----


def one_job(measure: Callable[..., list[Row]], job: Row) -> list[Row]:
    """The rows of a job, measured in this process, or why there are none."""
    if job.get("device") == "cpu":
        bound_memory(int(MARGIN * psutil.virtual_memory().available))
    try:
        return [{**job, "status": "ok", **row} for row in measure(**job)]
    except Exception as error:
        status = "out of memory" if is_out_of_memory(error) else "failed"
        return [{**job, "status": status, "reason": " ".join(f"{type(error).__name__}: {error}".split())[:300]}]


def in_a_process(job: Row) -> list[Row]:
    """The rows of a job that a fresh process measures, or how that ended."""
    process = subprocess.run([sys.executable, sys.argv[0], "--job", json.dumps(job)], capture_output=True, text=True)
    if process.returncode == 0:
        return list(json.loads(process.stdout.splitlines()[-1]))
    if process.returncode == -signal.SIGKILL:
        return [{**job, "status": "out of memory", "reason": "the system ended the process (SIGKILL)"}]
    last = (process.stderr.strip().splitlines() or [""])[-1]
    return [{**job, "status": "failed", "reason": f"status {process.returncode}: {last[:300]}"}]


# ---- time and memory ----


class Meter:
    """Seconds of the parts of one step, and memory at their beginnings and peaks. `meter("forward")` ends a part."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self.device = device
        self.clock = clock
        self.seconds: dict[str, float] = {}
        self.before: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        gc.collect()
        self._begin()

    def _begin(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._held = torch.cuda.memory_allocated(self.device)
        else:
            self._held = resident("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): sets the peak to the present size
        self._start = self.clock()

    def __call__(self, part: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[part] = self.clock() - self._start
        on_gpu = self.device.type == "cuda"
        self.before[part] = self._held
        self.peak[part] = torch.cuda.max_memory_allocated(self.device) if on_gpu else resident("VmHWM")
        self._begin()

    def growth(self) -> int:
        """The highest peak beyond what was held when the step began."""
        return max(self.peak.values()) - next(iter(self.before.values()))


def kernels(work: Callable[[], Any], device: torch.device) -> list[tuple[str, int, float]]:
    """What `work` runs on the device, the slowest first: name, calls, milliseconds of all calls."""
    return profiled(work, device)[0]


def profiled(work: Callable[[], Any], device: torch.device) -> tuple[list[tuple[str, int, float]], float]:
    """`kernels`, and the share of the time in which the host does not wait for the device."""
    on_gpu = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        start = time.perf_counter()
        work()
        if on_gpu:
            torch.cuda.synchronize()
        took = 1e6 * (time.perf_counter() - start)
    of = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    rows = profile.key_averages()
    spent = [(row.key[:120], row.count, round(getattr(row, of) / 1e3, 3)) for row in rows]
    # Of CUDA's runtime, which the profiler lists beside the kernels.
    waited = sum(row.self_cpu_time_total for row in rows if re.match(r"cu(da)?\w*Synchronize", row.key))
    # Named ranges repeat what the kernels inside them take.
    spent = [row for row in spent if row[2] and ":" not in row[0].split("::")[0]]
    return sorted(spent, key=lambda row: -row[2]), 1 - waited / took


def resident(name: str) -> int:
    """A size of this process from proc(5), in bytes."""
    return 1024 * int(re.findall(rf"^{name}:\s*(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)[0])


def bound_memory(size: int) -> None:
    """Refuse this process more than `size` bytes more; a system that lacks memory ends it first (proc(5))."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (resident("VmData") + size, hard))
    Path("/proc/self/oom_score_adj").write_text("1000")


def is_out_of_memory(error: Exception) -> bool:
    """Did an allocation fail, on either device. The last signs are oneDNN's, cuBLAS's and cuDNN's."""
    signs = ["can't allocate memory", "Cannot allocate memory", "not enough memory", "bad_alloc", "out of memory"]
    signs += ["could not create a primitive", "STATUS_ALLOC_FAILED"]
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(sign in str(error) for sign in signs)


def spread(values: Iterable[float]) -> Row:
    """Median, least, most, and all in their order."""
    values = list(values)
    return {"median": median(values), "min": min(values), "max": max(values), "all": values}


# ---- the record ----


def machine() -> Row:
    """What the measurements run on."""
    facts: Row = {**environment()}
    del facts["hostname"]
    facts |= {"command": shlex.join(["python", *sys.argv]), "platform": f"{platform.system()} {platform.machine()}"}
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return facts | {"cpu": [*names, platform.machine()][0], "memory_bytes": psutil.virtual_memory().total}


def made(facts: Row) -> str:
    """A line about a record: commit, machine, torch, day and command."""
    commit = f"commit {facts['commit'][:8]}"
    if facts["commit"].endswith("+"):
        commit += " and changes that were not committed yet"
    where = ", ".join(facts["gpus"][:1]) or f"{facts['cpus']} cores of {facts['cpu']}"
    command = re.sub(r" out=\S+", "", facts["command"])
    return f"Made at {commit}, {facts['time'][:10]}, on {where}, torch {facts['versions']['torch']}: `{command}`."


def markdown(columns: Columns, rows: Sequence[Row]) -> str:
    """The rows as a table, and below it why rows have no figures."""
    lines = [list(columns), ["---"] * len(columns)]
    for row in rows:
        cells = []
        for form in columns.values():
            try:
                cells.append(form(row))
            except (KeyError, TypeError):  # this row has no such figure
                cells.append("-")
        lines.append(cells)
    reasons = {f"- {row.get('method', '')}: {row['status']}: {row['reason']}": None for row in rows if "reason" in row}
    return "\n".join([*(f"| {' | '.join(cells)} |" for cells in lines), *([""] if reasons else []), *reasons])


def ms(key: str) -> Callable[[Row], str]:
    """The median of a spread of seconds, as milliseconds."""
    return lambda row: f"{1e3 * row[key]['median']:,.1f}"
