"""`clipscale bench step`: gradients of one batch, plain, with the cache, with kept graphs and with a frozen tower; time and memory.

Time is compared with plain forward and backward, sample for sample; memory is drawn against the batch at a fixed chunk.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from rich.console import Console

from clipscale.bench.harness import KEEPING_MALLOC, RETURNING_MALLOC, Answer, Job, measure
from clipscale.bench.memory import HOW as MEMORY_HOW
from clipscale.bench.present import MIB, Bars, Benchmark, Column, Curves, extent, finish
from clipscale.bench.record import begin, counts, device_of, final, processor, words, write
from clipscale.bench.step_variants import Name
from clipscale.bench.targets import WRONG, Found, Target, figures
from clipscale.bench.worker import spread
from clipscale.config.presets import group_options
from clipscale.config.tools import StepBenchSettings
from clipscale.errors import UserError
from clipscale.report.table import plain_console
from clipscale.units import format_count, nearest, parse_count

Row = dict[str, Any]

METHODS = {
    "plain": "forward and backward of the whole batch in one graph",
    "cache": "the gradient cache: every chunk without a graph, the loss, every chunk again",
    "keep-25": "the cache, with memory for a quarter of all graphs (keep-N: for N per cent; keep-NG: N GiB)",
    "keep-50": "the cache, with memory for half of them",
    "keep-75": "the cache, with memory for three quarters",
    "keep-100": "the cache, with memory for all: no second pass",
    "frozen-plain": "plain, with a frozen image tower that runs without a graph",
    "frozen": "the cache with a frozen image tower, which has no second pass",
    "frozen-keep-100": "the same, with memory for the text tower's graphs",
    "compiled-plain": "plain, both towers under torch.compile",
    "compiled": "the cache, both towers under torch.compile (also compiled-keep-N)",
    "open_clip": "open_clip's own training loop with accumulation over the chunks; it updates nothing here either",
    "open_clip-plain": "the same loop without accumulation",
}
"""Name -> what it is."""
BY_DEFAULT = (*(name for name in METHODS if name.split("-")[0] not in ("compiled", "open_clip")), "open_clip")
CURVES = ("plain", "cache", "open_clip")
"""Methods whose memory is drawn against the batch."""
MFU = {"vit-l14": 0.45, "vit-b16": 0.35}
"""Least share of the device's peak that the plain step uses, by preset of the model."""
FLAT = 2**15, 2**20
"""Batches between which memory is to be flat."""
HOW = {
    "time": "wall clock with the device waited for, of forward, loss and backward; methods interleaved, every second round backwards, "
    "after a warm-up of two chunks; medians, least and most",
    "ratio": "of seconds a sample to those of `plain` (`frozen-...`: `frozen-plain`, `compiled...`: `compiled-plain`) at the same batch, "
    "else at plain's largest: median over rounds of the quotient within the round",
    "samples": "a few chunks of random pixels and captions, which a larger batch repeats; cached methods copy them from a training "
    "batch's arena in host memory, pinned for CUDA, plain ones and open_clip's have them on the device",
    "largest": "the largest batch is doubled until a step runs out of memory, beside the weights of all methods; then the gap is halved "
    "to an eighth",
    "mfu": "samples a second times 3 forward passes of every trained tower (1 of a frozen one) over the vendor's dense bf16 rate",
    "malloc": "keep: glibc keeps freed memory in the process while time is measured, which spares the plain step, whose blocks are large, "
    "the page faults; system: as glibc does by itself",
    "memory": "growth of the peak during one step; weights and inputs are there before and not counted, nor, but for timed steps on "
    "CUDA, are the weights' gradients",
}


@dataclass(frozen=True)
class Plan:
    """The settings, checked."""

    job: Job
    cases: list[str]
    """METHOD@BATCH or METHOD@max."""
    batches: list[int]
    """At which memory is measured."""


def main(settings: StepBenchSettings, console: Console | None = None) -> list[Row]:
    """Measure, print and save. Raises UserError for settings that cannot be."""
    start = time.monotonic()
    console = console or plain_console()
    found = plan(settings)
    device = found.job.device
    record, path = begin(
        settings.out,
        f"step-{device}",
        "step",
        settings,
        device=device,
        how=HOW | {"memory_source": MEMORY_HOW[device]},
        methods={name: METHODS.get(name, METHODS["keep-25"]) for name in map(method_of, found.cases)},
        threads=None,
        pinned=None,
    )
    kept: list[Row] = record["rows"]
    todo = replace(found, cases=unmeasured(found.cases, kept))
    finished: list[Answer] = []

    def hear(answers: list[Answer]) -> None:
        """Everything known so far, into the record."""
        record.update({key: answer.get(key) for answer in answers for key in ("threads", "pinned")})
        rows = [*(row for row in kept if row["case"] not in todo.cases), *rows_of(todo, [*finished, *answers])]
        record["rows"] = sorted(rows, key=lambda row: (*found.cases, row["case"]).index(row["case"]))
        write(path, record)

    with console.status("step") as status:
        for job in jobs(todo) if todo.cases else []:
            status.update(f"{'time' if job.timed else 'memory'} of {', '.join(job.names)}")
            if settings.seconds:
                job = replace(job, seconds=max(1.0, settings.seconds - (time.monotonic() - start)))
            finished += measure("clipscale.bench.step_work:work", job, malloc(job, settings.malloc), hear)
    return finish(record, path, console)


def plan(settings: StepBenchSettings) -> Plan:
    """What the settings ask for. Raises UserError."""
    presets = group_options()["model"]
    if settings.model not in presets:
        raise UserError(
            f"model={settings.model}: no such preset{nearest(settings.model, presets)}; there are {', '.join(presets)}"
        )
    device = device_of(settings.device)
    batch, chunk = (one_count(name, getattr(settings, name)) for name in ("batch", "chunk"))
    if chunk > batch:
        raise UserError(f"chunk={chunk}: a batch={batch} has no chunk that large; choose 1 to {batch}")
    about = {"model": settings.model, "chunk": chunk, "precision": settings.precision}
    job = Job(about, device, repeats=settings.repeats)
    return Plan(job, chosen(settings.methods, batch, chunk), sorted(set(counts("memory", settings.memory))))


def one_count(name: str, text: str) -> int:
    found = counts(name, text)
    if len(found) != 1:
        raise UserError(f"{name}={text}: give one count")
    return found[0]


def chosen(text: str, batch: int, chunk: int) -> list[str]:
    """The cases named, each with what it is compared with. Raises UserError."""
    installed = find_spec("open_clip_train") is not None
    named = words(text)
    if named == ["auto"]:
        named = [name for name in BY_DEFAULT if name != "open_clip" or (installed and batch % chunk == 0)]
    if not named:
        raise UserError("methods is empty; give at least one")
    cases = []
    for word in named:
        method, _, size = word.partition("@")
        try:
            name = Name.of(method)
        except ValueError:
            raise UserError(
                f"methods={word}: unknown{nearest(method, METHODS)}; there are {', '.join(METHODS)}"
            ) from None
        if size == "max" and not name.whole:
            raise UserError(f"methods={word}: only what holds a whole batch's graph has a largest batch; name a batch")
        pairs = size if size == "max" else one_count("methods", size) if size else batch
        if name.base.startswith("open_clip") and not installed:
            raise UserError(f"methods={method}: its training loop is not installed; pip install open_clip_torch")
        if name.base == "open_clip" and isinstance(pairs, int) and pairs % chunk:
            raise UserError(
                f"methods={word}: its accumulation wants equal chunks; make batch={pairs} a multiple of {chunk}"
            )
        cases.append(f"{method}@{pairs}")
    methods = dict.fromkeys(map(method_of, cases))
    added = dict.fromkeys(base for base in map(baseline, methods) if base not in methods)
    return list(dict.fromkeys([*(f"{name}@{batch}" for name in added), *cases]))


def method_of(case: str) -> str:
    return case.partition("@")[0]


def baseline(case: str) -> str:
    """The method that a case's time is compared with."""
    return Name.of(case).baseline


def unmeasured(cases: list[str], kept: Sequence[Row]) -> list[str]:
    """The cases that an earlier run did not measure, with what they are compared with."""
    done = {row["case"] for row in kept if final(row)}
    rest = [case for case in cases if case not in done]
    wanted = set(map(baseline, rest))
    return [case for case in cases if case in rest or method_of(case) in wanted]


def jobs(found: Plan) -> list[Job]:
    """Memory of each method in a process of its own, so that no peak is another's; then time of all, interleaved, in one."""
    result = []
    for name in dict.fromkeys(map(method_of, found.cases)) if found.batches else []:
        sizes = {case.partition("@")[2] for case in found.cases if method_of(case) == name} - {"max"}
        batches = {*map(int, sizes), *(found.batches if name in CURVES else ())}
        if name == "open_clip":
            batches = {batch for batch in batches if batch % found.job.about["chunk"] == 0}
        if batches:
            result.append(replace(found.job, probed=[(name, batch) for batch in sorted(batches)]))
    return [*result, replace(found.job, timed=found.cases)]


def malloc(job: Job, setting: str) -> dict[str, str]:
    """Variables by which the C library keeps or returns freed memory during a job."""
    if job.device != "cpu":
        return {}
    if job.probed:
        return RETURNING_MALLOC
    return KEEPING_MALLOC if setting == "keep" else {}


# ---- rows ----


def rows_of(found: Plan, answers: Sequence[Answer]) -> list[Row]:
    """One row for each case from the answers of the memory jobs and the time job."""
    rows = []
    times = {case: record for answer in answers for case, record in answer["cases"].items() if "@" in case}
    lacking = {"status": "not run", "reason": "the run was stopped before it", "traceback": "", "steps": []}
    for case in found.cases:
        name, _, size = case.partition("@")
        probes = [answer["cases"][name] for answer in answers if name in answer["cases"]]
        timed = times.get(case, lacking)
        batch = timed.get("size", None if size == "max" else int(size))
        row: Row = {"case": case, "method": name, "batch": batch, "chunk": found.job.about["chunk"], "status": "ok"}
        row |= {key: timed[key] for key in ("tried", "bound", "expected_s", "flops", "mfu", "parts") if key in timed}
        memory = {key: value for record in [*probes, timed] for key, value in record.get("memory", {}).items()}
        row["memory"] = {int(key): value for key, value in memory.items()}
        row["peak_bytes"] = row["memory"].get(batch)
        if timed["steps"]:
            seconds = step_seconds(timed)
            row["step_s"] = spread(seconds)
            row["samples_per_s"] = batch / row["step_s"]["median"]
            if row.get("mfu") is not None:
                row["mfu"] *= seconds[-1] / row["step_s"]["median"]
            row["ratio"] = ratio(seconds, batch, against(case, batch, times))
        wrong = next((record for record in [timed, *probes] if record["status"] != "ok"), None)
        if wrong:
            row |= {key: wrong[key] for key in ("status", "reason", "traceback")}
        rows.append(row)
    return rows


def step_seconds(record: Row) -> list[float]:
    return [sum(step.values()) for step in record["steps"]]


def against(case: str, batch: int, times: Row) -> Row | None:
    """The record that a case is compared with: its baseline at the same batch where there is one, else at the largest."""
    plains = [record for other, record in times.items() if method_of(other) == baseline(case) and record["steps"]]
    return max(plains, key=lambda record: (record["size"] == batch, record["size"]), default=None)


def ratio(seconds: list[float], batch: int, plain: Row | None) -> dict[str, Any] | None:
    """Of seconds a sample to those of `plain`, within each round."""
    if plain is None:
        return None
    return spread([own / batch / (other / plain["size"]) for own, other in zip(seconds, step_seconds(plain))])


# ---- how the record is shown ----


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}"


COLUMNS = (
    Column("method", "method", words=True, case=True),
    Column("batch", "batch", format_count, case=True),
    Column("samples/s", "samples_per_s", "{:,.0f}".format),
    Column("step ms", "step_s.median", _ms),
    Column("min-max", "step_s", extent(_ms)),
    Column("to plain", "ratio.median", "{:.2f}".format),
    Column("MFU", "mfu", "{:.1%}".format),
    Column("peak MiB", "peak_bytes", lambda size: f"{size / MIB:,.0f}"),
)


def title(record: Row) -> str:
    settings, where = record["settings"], processor(record, record["device"], record["threads"])
    return f"step in chunks of {settings['chunk']}, model={settings['model']}, {settings['precision']}, on {where}"


def notes(record: Row) -> list[str]:
    rows = record["rows"]
    lines = [f"{name}: {about}" for name, about in record["methods"].items()]
    lines += [f"{row['case']}: {row['status']}: {row['reason']}" for row in rows if row["status"] != "ok"]
    for row in rows:
        if row.get("tried"):
            tries = ", ".join(f"{size}: {found}" for size, found in row["tried"].items())
            lines.append(f"{row['case']}: {tries}" + (" (more would take too long)" if "bound" in row else ""))
    for method, least, most, passes in growths(rows):
        sizes = [
            f"{n} {min(s) / MIB:,.0f} to {max(s) / MIB:,.0f} MiB ({max(s) / min(s) - 1:.1%})" for n, s in passes.items()
        ]
        a_pair = most["parts"]["mem_loss_bytes"] / most["batch"]
        lines.append(
            f"{method} from {_span(least, most)} pairs: {', '.join(sizes)}; the loss {a_pair:,.0f} bytes a pair"
        )
    if record["pinned"] is False:
        lines.append(
            "The samples' host memory could not be page-locked: copies to the device were slower than they are in training."
        )
    last = "To plain: seconds a sample, against what the method's kind has without the cache. Peak: growth during one step."
    return [*lines, last]


def _span(least: Row, most: Row) -> str:
    return " to ".join(format_count(row["batch"]) for row in (least, most))


def growths(rows: Sequence[Row]) -> list[tuple[str, Row, Row, dict[str, list[int]]]]:
    """Of every method measured on a device at several batches: its rows at the least and the largest, and the bytes of each pass.

    The features that encoding leaves are the loss's, and taken off.
    """
    found = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method and "mem_encode_bytes" in row.get("parts", {})]
        own.sort(key=lambda row: int(row["batch"]))
        if len({row["batch"] for row in own}) > 1:
            parts = [row["parts"] for row in own]
            encode = [part["mem_encode_bytes"] - part["features_bytes"] for part in parts]
            passes = {"encode, less features,": encode, "replay": [part["mem_replay_bytes"] for part in parts]}
            found.append((method, own[0], own[-1], passes))
    return found


def targets(record: Row) -> list[str]:
    """Utilisation where the model has a target, the cache's time beside plain's, ours beside open_clip's, and flat memory."""
    rows, model, lines = record["rows"], record["settings"]["model"], []
    if model in MFU and record["device"] == "cuda":
        plain = [row for row in rows if row["method"] == "plain"]
        mfu = Target(f"plain at {MFU[model]:.0%} MFU at least", lambda x: x >= MFU[model], "{:.1%}")
        lines.append(mfu.judge(figures(plain, _case, "mfu")))
    cached = [row for row in rows if Name.of(row["method"]).base == "cache"]
    for frozen, bound, text in (
        (False, 1.25, "the cache in at most 1.25 times plain's time"),
        (True, 1.05, "with a frozen image tower, in at most 1.05 times plain's"),
    ):
        own = [row for row in cached if (Name.of(row["method"]).kind == "frozen") == frozen]
        lines.append(Target(text, lambda x, bound=bound: x <= bound).judge(figures(own, _case, "ratio.median")))  # type: ignore[misc]
    span = " to ".join(map(format_count, FLAT))
    flat = Target(
        f"memory flat within 2 % from {span} pairs, the loss's linear part aside", lambda x: x <= 0.02, "{:.1%}"
    )
    faster = Target("faster than open_clip in every row", lambda x: x > 1)
    return [*lines, faster.judge(beside_open_clip(rows)), flat.judge(flatness(cached))]


def _case(row: Row) -> str:
    return str(row["case"])


def beside_open_clip(rows: Sequence[Row]) -> list[Found]:
    """Our samples a second over open_clip's, at the same batch or at its largest. A frozen tower is not compared: it does less.

    A method that holds the whole batch is compared with open_clip's plain loop, the others with its accumulation.
    """
    found: list[Found] = []
    for row in rows:
        name = Name.of(row["method"])
        peer = "open_clip-plain" if name.whole else "open_clip"
        if name.kind == "frozen" or name.base.startswith("open_clip"):
            continue
        theirs = [other for other in rows if other["method"] == peer and other["status"] == "ok"]
        if row["status"] != "ok":
            found.append((row["case"], row["status"]))
        elif not theirs:
            found.append((row["case"], f"({peer}: no figure)"))
        else:
            other = max(theirs, key=lambda other: (other["batch"] == row["batch"], other["batch"]))
            found.append((f"{row['case']} to {other['case']}", row["samples_per_s"] / other["samples_per_s"]))
    return found


def flatness(rows: Sequence[Row]) -> list[Found]:
    found: list[Found] = [(row["case"], row["status"]) for row in rows if row["status"] in WRONG]
    for method, least, most, passes in growths(rows):
        if least["batch"] <= FLAT[0] and most["batch"] >= FLAT[1]:
            found += [(f"{method}: {name}", max(sizes) / min(sizes) - 1) for name, sizes in passes.items()]
        else:
            found.append((method, f"was measured from {_span(least, most)} only"))
    return found


def panels(record: Row) -> list[Curves | Bars]:
    """Time beside plain, and memory against the batch."""
    settings, rows = record["settings"], record["rows"]
    timed = [row for row in rows if row.get("ratio")]
    batch = parse_count(settings["batch"])
    names = [r["method"] + ("" if r["batch"] == batch else f" at {format_count(r['batch'])}") for r in timed]
    ratios = [tuple(row["ratio"][part] for part in ("median", "min", "max")) for row in timed]
    heading = f"seconds a sample relative to plain (batch {settings['batch']}, chunk {settings['chunk']})"
    memory = {
        method: {
            int(batch): max(size, 2**16) / MIB
            for row in rows
            if row["method"] == method
            for batch, size in row["memory"].items()
        }
        for method in dict.fromkeys(row["method"] for row in rows)
    }
    curves = {name: list(sizes.items()) for name, sizes in memory.items() if len(sizes) > 1}
    return [
        Bars(heading, names, {"": ratios}, [f"{row['ratio']['median']:.2f}" for row in timed], mark=1),
        Curves(f"peak memory of a step, MiB (chunk {settings['chunk']})", curves, base=2),
    ]


BENCHMARKS = {"step": Benchmark(title, lambda _: COLUMNS, notes, targets, panels)}
