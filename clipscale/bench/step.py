"""`clipscale bench step`: gradients of one batch, plain, with the cache, with kept graphs and with a frozen tower; time and memory.

Time is compared with plain forward and backward of the same samples; memory is drawn against the batch at a fixed chunk.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from clipscale.bench.machine import asked, machine
from clipscale.bench.memory import HOW as MEMORY_HOW
from clipscale.bench.processes import PLAIN_MALLOC, TORCHRUN
from clipscale.bench.step_draw import draw
from clipscale.bench.step_work import StepJob
from clipscale.errors import UserError
from clipscale.keys import group_options
from clipscale.report.table import plain_console
from clipscale.spelling import format_count, nearest, parse_count

Row = dict[str, Any]

METHODS = {
    "plain": "forward and backward of the whole batch in one graph",
    "cache": "the gradient cache: every chunk without a graph, the loss, every chunk again",
    "keep-25": "the cache with room for a quarter of all graphs (keep-N: for N per cent)",
    "keep-50": "the cache with room for half of them",
    "keep-75": "the cache with room for three quarters",
    "keep-100": "the cache with room for all: no second pass",
    "frozen-plain": "plain, with a frozen image tower that runs without a graph",
    "frozen": "the cache with a frozen image tower, which has no second pass",
    "frozen-keep-100": "the same with room for the text tower's graphs",
    "open_clip": "open_clip's own training loop with accumulation over the chunks; it updates nothing here either",
}
"""Name -> what it is."""
CURVES = ("plain", "cache", "open_clip")
"""Methods whose memory is drawn against the batch."""
KEEP_MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
"""glibc's malloc keeps what is freed, so that large blocks are not fetched from the system, page by page, in every step (mallopt(3))."""
HOW = {
    "time": "wall clock with the device waited for, of forward, loss and backward; methods in turns, every second round backwards, after "
    "a round that is not counted; medians, least and most",
    "ratio": "to `plain` (`frozen-...`: to `frozen-plain`): median over rounds of the quotient within the round",
    "malloc": "keep: glibc keeps freed memory in the process while time is measured, which spares the plain step, whose blocks are large, "
    "the page faults; system: as glibc does by itself",
    "memory": "growth of the peak during one step; weights, their gradients and the inputs are there before and not counted",
}
MARGIN = 0.95
"""Part of the free memory that a process on the CPU may take."""


@dataclass
class StepBenchSettings:
    """`clipscale bench step`: the gradient cache beside plain forward and backward of the same samples."""

    model: str = "tiny"
    """A preset of conf/model."""
    batch: str = "512"
    """Pairs of one step."""
    chunk: str = "128"
    """Samples per chunk of either tower."""
    memory: str = "128,256,512,1k"
    """Batches at which memory is measured, separated by commas."""
    methods: str = "auto"
    """plain, cache, keep-N (room for N per cent of all graphs), frozen, frozen-keep-N, open_clip; `auto`: all that can run here."""
    precision: str = "fp32"
    """`fp32` or `bf16` (autocast)."""
    device: str = "auto"
    """`auto` (CUDA where there is one), `cpu` or `cuda`."""
    repeats: int = 7
    """Rounds."""
    malloc: str = "keep"
    """On a CPU: `keep` freed memory in the process while time is measured (faster plain steps), or leave it to the `system`."""
    out: str = "runs/bench"
    """Folder for step-DEVICE.json and .png; earlier ones are replaced."""


@dataclass(frozen=True)
class Plan:
    """The settings, checked."""

    job: StepJob
    methods: list[str]
    batches: list[int]


def main(settings: StepBenchSettings, console: Console | None = None) -> list[Row]:
    """Measure, print and save. Raises UserError for settings that cannot be."""
    console = console or plain_console()
    found = plan(settings)
    out = Path(settings.out).expanduser()
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"step-{found.job.device}.json"
    record: dict[str, Any] = {
        "benchmark": "step",
        "settings": asked(settings),
        "machine": machine("bench step", settings),
        "device": found.job.device,
        "how": HOW | {"memory_source": MEMORY_HOW[found.job.device]},
        "methods": {name: METHODS.get(name, METHODS["keep-25"]) for name in found.methods},
    }
    with console.status("step") as status:
        answers = []
        for job in jobs(found):
            names = ", ".join(job.timed or dict.fromkeys(name for name, _ in job.probed))
            status.update(f"{'time' if job.timed else 'memory'} of {names}")
            answers.append(run(job, environment(job, settings)))
    record["rows"] = rows_of(found, answers)
    record["threads"] = answers[-1]["threads"]
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record | {"written": time.strftime("%Y-%m-%dT%H:%M:%S%z")}, indent=1) + "\n")
    part.rename(path)
    console.print(table(record))
    for line in legend(record):
        console.print(line)
    draw(record, path.with_suffix(".png"))
    console.print(f"\n{path}\n{path.with_suffix('.png')}")
    return list(record["rows"])


def plan(settings: StepBenchSettings) -> Plan:
    """What the settings ask for. Raises UserError."""
    presets = group_options()["model"]
    if settings.model not in presets:
        raise UserError(
            f"model={settings.model}: no such preset{nearest(settings.model, presets)}; there are {', '.join(presets)}"
        )
    for name, value, choices in (
        ("precision", settings.precision, ("fp32", "bf16")),
        ("device", settings.device, ("auto", "cpu", "cuda")),
        ("malloc", settings.malloc, ("keep", "system")),
    ):
        if value not in choices:
            raise UserError(f"{name}={value}: give {', '.join(choices[:-1])} or {choices[-1]}")
    cuda = settings.device != "cpu" and torch.cuda.is_available()
    if settings.device == "cuda" and not cuda:
        raise UserError("device=cuda: torch finds no CUDA device; use device=cpu")
    if settings.repeats < 1:
        raise UserError(f"repeats={settings.repeats}: must be at least 1")
    (batch,), (chunk,) = (counts(name, getattr(settings, name), only=True) for name in ("batch", "chunk"))
    if chunk > batch:
        raise UserError(f"chunk={chunk}: a batch={batch} has no chunk that large; choose 1 to {batch}")
    methods = chosen(settings.methods, batch, chunk)
    job = StepJob(settings.model, batch, chunk, settings.precision, "cuda" if cuda else "cpu", repeats=settings.repeats)
    return Plan(job, methods, counts("memory", settings.memory))


def counts(name: str, text: str, *, only: bool = False) -> list[int]:
    """`1k,2k` as integers; `only`: exactly one."""
    try:
        found = [parse_count(word) for word in text.split(",") if word.strip()]
    except ValueError as error:
        raise UserError(f"{name}={text}: {error}") from error
    if 0 in found:
        raise UserError(f"{name}={text}: must be at least 1")
    if only and len(found) != 1:
        raise UserError(f"{name}={text}: give one count")
    return sorted(set(found))


def chosen(text: str, batch: int, chunk: int) -> list[str]:
    """The methods named, each with what it is compared with. Raises UserError."""
    whole = batch % chunk == 0
    installed = find_spec("open_clip_train") is not None
    names = [word.strip() for word in text.split(",") if word.strip()]
    if names == ["auto"]:
        return [name for name in METHODS if name != "open_clip" or (installed and whole)]
    if not names:
        raise UserError("methods is empty; give at least one")
    for name in names:
        keep = re.fullmatch(r"(?:frozen-)?keep-(\d+)", name)
        if name not in METHODS and not (keep and 1 <= int(keep[1]) <= 100):
            raise UserError(f"methods={name}: unknown{nearest(name, METHODS)}; there are {', '.join(METHODS)}")
    if "open_clip" in names and not installed:
        raise UserError("methods=open_clip: its training loop is not installed; pip install open_clip_torch")
    if "open_clip" in names and not whole:
        raise UserError(
            f"methods=open_clip: its accumulation wants equal chunks; make batch={batch} a multiple of {chunk}"
        )
    baselines = [baseline(name) for name in names]
    return list(dict.fromkeys([*(name for name in ("plain", "frozen-plain") if name in baselines), *names]))


def baseline(name: str) -> str:
    """What a method's time is compared with."""
    return "frozen-plain" if name.startswith("frozen") else "plain"


# ---- measuring ----


def jobs(found: Plan) -> list[StepJob]:
    """Memory of each method in a process of its own, so that no peak is another's; then time of all, in turns, in one."""
    result = []
    for name in found.methods:
        batches = {found.job.batch, *(found.batches if name in CURVES else ())}
        if name == "open_clip":
            batches = {batch for batch in batches if batch % found.job.chunk == 0}
        result.append(replace(found.job, probed=[(name, batch) for batch in sorted(batches)], timed=[]))
    return [*result, replace(found.job, timed=found.methods)]


def environment(job: StepJob, settings: StepBenchSettings) -> dict[str, str]:
    own = {key: value for key, value in os.environ.items() if key not in TORCHRUN}
    if job.device != "cpu":
        return own
    if job.probed:
        return own | PLAIN_MALLOC
    return own | (KEEP_MALLOC if settings.malloc == "keep" else {})


def run(job: StepJob, variables: dict[str, str]) -> Row:
    """The answer of a fresh process; for one that ended without, why every method failed there."""
    if job.device == "cpu":
        job = replace(job, memory=int(MARGIN * psutil.virtual_memory().available))
    with tempfile.TemporaryDirectory(prefix="clipscale-bench-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(asdict(job)))
        command = [sys.executable, "-m", "clipscale.bench.step_work", name]
        ended = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        if (folder / "answer.json").exists():
            answer: Row = json.loads((folder / "answer.json").read_text())
            return answer
    status = "out of memory" if ended.returncode == -9 else "failed"
    last = ended.stderr.strip().splitlines()[-1:] or [""]
    reason = f"the process ended with status {ended.returncode}: {last[0][:300]}"
    wrong = {"status": status, "reason": reason, "traceback": ended.stderr[-5000:], "seconds": [], "memory": {}}
    return {"methods": dict.fromkeys(job.timed or [name for name, _ in job.probed], wrong), "threads": None}


def rows_of(found: Plan, answers: Sequence[Row]) -> list[Row]:
    """One row for each method from what the processes answered: the memory jobs, then the time job."""
    rows = []
    times = answers[-1]["methods"]
    for name in found.methods:
        records = [answer["methods"][name] for answer in answers if name in answer["methods"]]
        row: Row = {"method": name, "batch": found.job.batch, "chunk": found.job.chunk, "status": "ok"}
        row["memory"] = {int(batch): size for record in records for batch, size in record["memory"].items()}
        row["peak_bytes"] = row["memory"].get(found.job.batch)
        seconds = times[name]["seconds"]
        if seconds:
            row["step_s"] = {"median": median(seconds), "min": min(seconds), "max": max(seconds), "all": seconds}
            row["samples_per_s"] = found.job.batch / row["step_s"]["median"]
            against = times.get(baseline(name), {}).get("seconds", [])
            ratios = [own / plain for own, plain in zip(seconds, against)]
            row["ratio"] = {"median": median(ratios), "min": min(ratios), "max": max(ratios)} if ratios else None
        wrong = next((record for record in records if record["status"] != "ok"), None)
        if wrong:
            row |= {key: wrong[key] for key in ("status", "reason", "traceback")}
        rows.append(row)
    return rows


# ---- telling ----


def table(record: dict[str, Any]) -> Table:
    """One line for each method."""
    settings, facts = record["settings"], record["machine"]
    processor = facts["gpus"][0] if record["device"] == "cuda" else f"{facts['cpu']}, {record['threads']} threads"
    title = (
        f"step of {settings['batch']} pairs in chunks of {settings['chunk']}, model={settings['model']}, on {processor}"
    )
    result = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for head in ("method", "samples/s", "step ms", "min-max", "to plain", "peak MiB"):
        result.add_column(head, justify="left" if head == "method" else "right", no_wrap=True)
    for row in record["rows"]:
        cells = [row["method"]]
        if "step_s" in row:
            times, ratio = row["step_s"], row["ratio"]
            cells += [f"{row['samples_per_s']:,.0f}", f"{1e3 * times['median']:,.0f}"]
            cells += [
                f"{1e3 * times['min']:,.0f}-{1e3 * times['max']:,.0f}",
                f"{ratio['median']:.2f}" if ratio else "-",
            ]
        else:
            cells += [row["status"], "", "", ""]
        cells.append("-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:,.0f}")
        result.add_row(*cells)
    return result


def legend(record: dict[str, Any]) -> list[str]:
    """What the table does not say for itself."""
    lines = [f"{name}: {about}" for name, about in record["methods"].items()]
    lines += [f"{row['method']}: {row['status']}: {row['reason']}" for row in record["rows"] if row["status"] != "ok"]
    sizes = ", ".join(format_count(count) for count in counts("memory", record["settings"]["memory"]))
    lines.append(
        f"To plain: frozen-... is compared with frozen-plain. Peak: growth during one step. The picture: peak at {sizes}."
    )
    return lines
