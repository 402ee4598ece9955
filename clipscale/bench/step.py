"""`clipscale bench step`: gradients of one batch, plain, with the cache, with kept graphs and with a frozen tower; time and memory.

Time is compared with plain forward and backward, sample for sample; memory is drawn against the batch at a fixed chunk.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from clipscale.bench import processes
from clipscale.bench.figures import counts, device_of, spread
from clipscale.bench.machine import asked, machine
from clipscale.bench.memory import HOW as MEMORY_HOW
from clipscale.bench.processes import KEEPING_MALLOC, RETURNING_MALLOC, Ended
from clipscale.bench.records import earlier, settled, write
from clipscale.bench.sheet import publish
from clipscale.bench.step_draw import draw
from clipscale.bench.step_table import legend, table
from clipscale.bench.step_ways import Name
from clipscale.bench.step_work import StepJob
from clipscale.bench.verdicts import of_step
from clipscale.config.presets import group_options
from clipscale.config.tools import StepBenchSettings
from clipscale.errors import UserError
from clipscale.report.table import plain_console
from clipscale.units import nearest

Row = dict[str, Any]

METHODS = {
    "plain": "forward and backward of the whole batch in one graph",
    "cache": "the gradient cache: every chunk without a graph, the loss, every chunk again",
    "keep-25": "the cache with room for a quarter of all graphs (keep-N: for N per cent; keep-NG: N GiB)",
    "keep-50": "the cache with room for half of them",
    "keep-75": "the cache with room for three quarters",
    "keep-100": "the cache with room for all: no second pass",
    "frozen-plain": "plain, with a frozen image tower that runs without a graph",
    "frozen": "the cache with a frozen image tower, which has no second pass",
    "frozen-keep-100": "the same with room for the text tower's graphs",
    "compiled-plain": "plain, both towers under torch.compile",
    "compiled": "the cache, both towers under torch.compile (also compiled-keep-N)",
    "open_clip": "open_clip's own training loop with accumulation over the chunks; it updates nothing here either",
    "open_clip-plain": "the same loop without accumulation",
}
"""Name -> what it is."""
BY_DEFAULT = (*(name for name in METHODS if name.split("-")[0] not in ("compiled", "open_clip")), "open_clip")
CURVES = ("plain", "cache", "open_clip")
"""Methods whose memory is drawn against the batch."""
HOW = {
    "time": "wall clock with the device waited for, of forward, loss and backward; methods in turns, every second round backwards, after "
    "a warm-up of two chunks; medians, least and most",
    "ratio": "of seconds a sample to those of `plain` (`frozen-...`: `frozen-plain`, `compiled...`: `compiled-plain`) at the same batch, "
    "else at plain's largest: median over rounds of the quotient within the round",
    "samples": "a few chunks of random pixels and captions, which a larger batch comes back to; cached methods copy them from a training "
    "batch's arena in host memory, pinned for CUDA, plain ones and open_clip's have them on the device",
    "largest": "the largest batch is doubled until a step runs out of memory, beside the weights of all methods; then the gap is halved "
    "to an eighth",
    "mfu": "samples a second times 3 forward passes of every trained tower (1 of a frozen one) over the vendor's dense bf16 rate",
    "malloc": "keep: glibc keeps freed memory in the process while time is measured, which spares the plain step, whose blocks are large, "
    "the page faults; system: as glibc does by itself",
    "memory": "growth of the peak during one step; weights and inputs are there before and not counted, nor, but for timed steps on "
    "CUDA, are the weights' gradients",
}
MARGIN = 0.95
"""Part of the free memory that a process on the CPU may take."""


@dataclass(frozen=True)
class Plan:
    """The settings, checked."""

    job: StepJob
    cases: list[str]
    """METHOD@BATCH or METHOD@max."""
    batches: list[int]


def main(settings: StepBenchSettings, console: Console | None = None) -> list[Row]:
    """Measure, print and save. Raises UserError for settings that cannot be."""
    start = time.monotonic()
    console = console or plain_console()
    found = plan(settings)
    out = Path(settings.out).expanduser()
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"step-{found.job.device}.json"
    names = dict.fromkeys(method_of(case) for case in found.cases)
    record: dict[str, Any] = {
        "benchmark": "step",
        "settings": asked(settings),
        "machine": machine("bench step", settings),
        "device": found.job.device,
        "how": HOW | {"memory_source": MEMORY_HOW[found.job.device]},
        "methods": {name: about(name) for name in names},
        "threads": None,
        "pinned": None,
        "rows": [],
    }
    before = earlier(path, record) if settings.resume else {}
    kept: list[Row] = before.get("rows", [])
    record["methods"] = before.get("methods", {}) | record["methods"]
    todo = replace(found, cases=unmeasured(found.cases, kept))
    answers: list[Row] = []

    def tell(answer: Row) -> None:
        """Everything known so far, into the record."""
        record.update({key: answer[key] for key in ("threads", "pinned")})
        fresh = rows_of(todo, [*answers, answer])
        rows = [*(row for row in kept if row["case"] not in todo.cases), *fresh]
        record["rows"] = sorted(rows, key=lambda row: (*found.cases, row["case"]).index(row["case"]))
        write(path, record)

    record["rows"] = kept
    with console.status("step") as status:
        for job in jobs(todo) if todo.cases else []:
            what = ", ".join(job.timed or dict.fromkeys(name for name, _ in job.probed))
            status.update(f"{'time' if job.timed else 'memory'} of {what}")
            if settings.seconds:
                job = replace(job, seconds=max(1.0, settings.seconds - (time.monotonic() - start)))
            answers.append(run(job, malloc(job, settings.malloc), tell))
    record["verdicts"] = of_step(record["rows"], settings.model, found.job.device)
    write(path, record)
    present(record, path, console)
    return list(record["rows"])


def present(record: Row, path: Path, console: Console) -> None:
    """Table and picture of the record at `path`, printed and beside it."""
    publish(table(record), [*legend(record), *record["verdicts"]], path, partial(draw, record), console)


def plan(settings: StepBenchSettings) -> Plan:
    """What the settings ask for. Raises UserError."""
    presets = group_options()["model"]
    if settings.model not in presets:
        raise UserError(
            f"model={settings.model}: no such preset{nearest(settings.model, presets)}; there are {', '.join(presets)}"
        )
    for name, value, choices in (
        ("precision", settings.precision, ("fp32", "bf16")),
        ("malloc", settings.malloc, ("keep", "system")),
    ):
        if value not in choices:
            raise UserError(f"{name}={value}: give {', '.join(choices[:-1])} or {choices[-1]}")
    device = device_of(settings.device)
    if settings.repeats < 1:
        raise UserError(f"repeats={settings.repeats}: must be at least 1")
    if settings.seconds < 0:
        raise UserError(f"seconds={settings.seconds:g}: must not be negative; 0 means no bound")
    batch, chunk = (count(name, getattr(settings, name)) for name in ("batch", "chunk"))
    if chunk > batch:
        raise UserError(f"chunk={chunk}: a batch={batch} has no chunk that large; choose 1 to {batch}")
    cases = chosen(settings.methods, batch, chunk)
    job = StepJob(settings.model, chunk, settings.precision, device, repeats=settings.repeats)
    return Plan(job, cases, sorted(set(counts("memory", settings.memory))))


def count(name: str, text: str) -> int:
    """Exactly one."""
    found = counts(name, text)
    if len(found) != 1:
        raise UserError(f"{name}={text}: give one count")
    return found[0]


def chosen(text: str, batch: int, chunk: int) -> list[str]:
    """The cases named, each with what it is compared with. Raises UserError."""
    installed = find_spec("open_clip_train") is not None
    words = [word.strip() for word in text.split(",") if word.strip()]
    if words == ["auto"]:
        words = [name for name in BY_DEFAULT if name != "open_clip" or (installed and batch % chunk == 0)]
    if not words:
        raise UserError("methods is empty; give at least one")
    cases = []
    for word in words:
        method, _, size = word.partition("@")
        try:
            name = Name.of(method)
        except ValueError:
            raise UserError(
                f"methods={word}: unknown{nearest(method, METHODS)}; there are {', '.join(METHODS)}"
            ) from None
        if size == "max" and not name.whole:
            raise UserError(f"methods={word}: only what holds a whole batch's graph has a largest batch; name a batch")
        pairs = size if size == "max" else count("methods", size) if size else batch
        if name.base.startswith("open_clip") and not installed:
            raise UserError(f"methods={method}: its training loop is not installed; pip install open_clip_torch")
        if name.base == "open_clip" and isinstance(pairs, int) and pairs % chunk:
            raise UserError(
                f"methods={word}: its accumulation wants equal chunks; make batch={pairs} a multiple of {chunk}"
            )
        cases.append(f"{method}@{pairs}")
    plains = {method_of(case): case for case in cases}
    added = [name.baseline for name in map(Name.of, plains) if name.baseline not in plains]
    return list(dict.fromkeys([*(f"{name}@{batch}" for name in dict.fromkeys(added)), *cases]))


def method_of(case: str) -> str:
    return case.partition("@")[0]


def baseline(name: str) -> str:
    """What a method's time is compared with."""
    return Name.of(name).baseline


def about(name: str) -> str:
    """What a method is."""
    return METHODS.get(name) or METHODS["keep-25"]


# ---- measuring ----


def unmeasured(cases: list[str], kept: Sequence[Row]) -> list[str]:
    """The cases that an earlier run did not measure, with what they are compared with."""
    done = {row["case"] for row in kept if settled(row)}
    rest = [case for case in cases if case not in done]
    wanted = {baseline(method_of(case)) for case in rest}
    return [case for case in cases if case in rest or method_of(case) in wanted]


def jobs(found: Plan) -> list[StepJob]:
    """Memory of each method in a process of its own, so that no peak is another's; then time of all, in turns, in one."""
    result = []
    for name in dict.fromkeys(method_of(case) for case in found.cases) if found.batches else []:
        sizes = {case.partition("@")[2] for case in found.cases if method_of(case) == name} - {"max"}
        batches = {*map(int, sizes), *(found.batches if name in CURVES else ())}
        if name == "open_clip":
            batches = {batch for batch in batches if batch % found.job.chunk == 0}
        if batches:
            result.append(replace(found.job, probed=[(name, batch) for batch in sorted(batches)], timed=[]))
    return [*result, replace(found.job, timed=found.cases)]


def malloc(job: StepJob, setting: str) -> dict[str, str]:
    """Variables that say what the C library does with freed memory while a job is done."""
    if job.device != "cpu":
        return {}
    if job.probed:
        return RETURNING_MALLOC
    return KEEPING_MALLOC if setting == "keep" else {}


def run(job: StepJob, variables: Mapping[str, str], tell: Callable[[Row], object] = lambda _: None) -> Row:
    """The answer of a fresh process, told as it grows; for one that ended before its end, why what it lacks failed there."""
    if job.device == "cpu" and job.memory is None:
        job = replace(job, memory=int(MARGIN * psutil.virtual_memory().available))
    (ended,) = processes.run("clipscale.bench.step_work", asdict(job), variables=variables, tell=tell)
    answer = ended.answer or {"methods": {}, "threads": None, "pinned": None, "complete": False}
    if not answer["complete"]:
        answer["methods"] |= silent(job, answer["methods"], ended)
    tell(answer)
    return answer


def silent(job: StepJob, methods: Row, ended: Ended) -> Row:
    """Records of what a process that ended before its end had not measured."""
    status, reason = ended.cause
    wrong = {"status": status, "reason": reason, "traceback": ended.said[-5000:]}
    names = job.timed or [name for name, _ in job.probed]
    lacking = [n for n in names if n not in methods or not (methods[n]["seconds"] or methods[n]["memory"])]
    return {name: {"seconds": [], "memory": {}} | methods.get(name, {}) | wrong for name in lacking}


def rows_of(found: Plan, answers: Sequence[Row]) -> list[Row]:
    """One row for each case from what the processes answered: the memory jobs, then the time job."""
    rows = []
    times = {case: record for answer in answers for case, record in answer["methods"].items() if "@" in case}
    for case in found.cases:
        name, _, size = case.partition("@")
        probes = [answer["methods"][name] for answer in answers if name in answer["methods"]]
        timed = times.get(
            case, {"status": "not run", "reason": "its turn did not come", "traceback": "", "seconds": []}
        )
        batch = timed.get("batch", None if size == "max" else int(size))
        row: Row = {"case": case, "method": name, "batch": batch, "chunk": found.job.chunk, "status": "ok"}
        row |= {key: timed[key] for key in ("tried", "bound", "expected_s", "flops", "mfu", "parts") if key in timed}
        memory = {key: value for record in [*probes, timed] for key, value in record.get("memory", {}).items()}
        row["memory"] = {int(key): value for key, value in memory.items()}
        row["peak_bytes"] = row["memory"].get(batch)
        seconds = timed["seconds"]
        if seconds:
            row["step_s"] = spread(seconds)
            row["samples_per_s"] = batch / row["step_s"]["median"]
            if row.get("mfu") is not None:
                row["mfu"] *= seconds[-1] / row["step_s"]["median"]
            row["ratio"] = ratio(seconds, batch, against(name, batch, times))
        wrong = next((record for record in [timed, *probes] if record["status"] != "ok"), None)
        if wrong:
            row |= {key: wrong[key] for key in ("status", "reason", "traceback")}
        rows.append(row)
    return rows


def against(name: str, batch: int, times: Row) -> tuple[list[float], int] | None:
    """Seconds of the steps that a method is compared with, and their batch: the same batch where there is one, else the largest."""
    plains = [record for case, record in times.items() if method_of(case) == baseline(name) and record["seconds"]]
    found = max(plains, key=lambda record: (record["batch"] == batch, record["batch"]), default=None)
    return None if found is None else (found["seconds"], found["batch"])


def ratio(seconds: list[float], batch: int, plain: tuple[list[float], int] | None) -> dict[str, Any] | None:
    """Of seconds a sample to those of `plain`, within each round."""
    if plain is None:
        return None
    return spread([own / batch / (other / plain[1]) for own, other in zip(seconds, plain[0])])
