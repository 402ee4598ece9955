"""`clipscale bench step`: gradients of one batch, plain, with the cache, with kept graphs and with a frozen tower; time and memory.

Time is compared with plain forward and backward, sample for sample; memory is drawn against the batch at a fixed chunk.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Self

from rich.console import Console

from clipscale.bench.driver import drive
from clipscale.bench.harness import KEEPING_MALLOC, RETURNING_MALLOC, Answer, Job
from clipscale.bench.memory import HOW as MEMORY_HOW
from clipscale.bench.present import (
    MIB,
    WRONG,
    Bars,
    Benchmark,
    Column,
    Found,
    Key,
    Lines,
    Target,
    Value,
    extent,
    figures,
)
from clipscale.bench.record import begin, counts, device_of, processor
from clipscale.bench.step_variants import Name
from clipscale.bench.worker import CLOCK, spread
from clipscale.config.presets import group_options
from clipscale.config.tools import StepBenchSettings
from clipscale.errors import UserError
from clipscale.units import format_count, nearest, split

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
    "unsorted": "the cache, captions in the batch's order and as wide as the context (also unsorted-keep-N)",
    "unlean": "the cache with open_clip's own forward passes",
    "neither": "both: the cache as it was before",
    "compiled-plain": "plain, both towers under torch.compile",
    "compiled": "the cache, both towers under torch.compile (also compiled-keep-N)",
    "open_clip": "open_clip's own training loop with accumulation over the chunks; it updates nothing here either",
    "open_clip-plain": "the same loop without accumulation",
    "compiled-open_clip": "its loop with accumulation, its model under torch.compile",
    "compiled-open_clip-plain": "its loop without accumulation, its model under torch.compile",
}
"""Name -> what it is."""
BY_DEFAULT = (
    *(name for name in METHODS if name.split("-")[0] not in ("compiled", "open_clip")),
    "open_clip",
    "open_clip-plain",
)
CURVES = ("plain", "cache", "open_clip")
"""Methods whose memory is drawn against the batch."""
MFU = {"vit-l14": 0.45, "vit-b16": 0.35}
"""Least share of the device's peak that the plain step uses, by preset of the model."""
FLAT = 2**15, 2**20
"""Batches between which memory is to be flat."""
HOW = {
    "time": "wall clock (clock=cpu: processor time of one thread) of forward, loss and backward, device waited for, methods "
    "interleaved after a warm-up of two chunks",
    "ratio": "of seconds a sample to those of `plain` of the same kind at the same batch, else at its largest, round by round",
    "samples": "four chunks of random pixels and captions, repeated; cached methods copy them from host memory, plain ones do not; tokens "
    "of a caption, with start and end: lognormal, mean 20, 99th percentile 64, at most the context",
    "to_open_clip": "of seconds a step to those of `open_clip-plain` at the same batch, round by round",
    "largest": "the batch is doubled until memory ends, beside the weights of all methods; then the gap is halved to an eighth",
    "mfu": "samples a second times 3 forward passes of every trained tower (1 of a frozen one) over the vendor's dense bf16 rate",
    "malloc": "keep: glibc keeps freed memory while time is measured; system: as glibc does by itself",
    "memory": "growth of the peak during one step; weights, their gradients and inputs are there before",
}


def main(settings: StepBenchSettings, console: Console | None = None) -> list[Row]:
    """Measure, print and save. Raises UserError for settings that cannot be."""
    part = plan(settings)
    device = part.job.device
    record, path = begin(
        settings.out,
        f"step-{device}",
        "step",
        settings,
        device=device,
        how=HOW | {"memory_source": MEMORY_HOW[device]},
        methods={name: METHODS.get(name, METHODS["keep-25"]) for name in map(method_of, part.cases)},
        threads=None,
        pinned=None,
    )
    return drive("clipscale.bench.step_work:work", [part], record, path, settings.seconds, console)


@dataclass(frozen=True)
class StepPart:
    """All methods of one model and chunk."""

    job: Job
    cases: list[str]
    """METHOD@BATCH or METHOD@max."""
    batches: list[int]
    """At which memory is measured."""
    keep: bool
    """Does glibc keep freed memory while time is measured."""
    label = "step"

    def names(self) -> list[Key]:
        return [(case,) for case in self.cases]

    def without(self, done: set[Key]) -> Self:
        """The cases that are not done, with what they are compared with."""
        rest = [case for case in self.cases if (case,) not in done]
        wanted = set(map(baseline, rest))
        return replace(self, cases=[case for case in self.cases if case in rest or method_of(case) in wanted])

    def jobs(self, answers: Sequence[Sequence[Answer]]) -> Iterator[Job]:
        """Memory of each method in a process of its own, so that peaks do not mix; then time of all, interleaved, in one."""
        cpu = self.job.device == "cpu"
        for name in dict.fromkeys(map(method_of, self.cases)) if self.batches else []:
            sizes = {case.partition("@")[2] for case in self.cases if method_of(case) == name} - {"max"}
            batches = {*map(int, sizes), *(self.batches if name in CURVES else ())}
            if Name.of(name).base == "open_clip":
                batches = {batch for batch in batches if batch % self.job.about["chunk"] == 0}
            if batches:
                probed = [(name, batch) for batch in sorted(batches)]
                yield replace(self.job, probed=probed, variables=RETURNING_MALLOC if cpu else {})
        variables = KEEPING_MALLOC if cpu and self.keep else {}
        if self.job.threads == 1:
            variables = variables | {CLOCK: "cpu"}
        yield replace(self.job, timed=self.cases, variables=variables)

    def found(self, answers: Sequence[Sequence[Answer]]) -> Row:
        """One row for each case from the answers of the memory jobs and the time job."""
        rows, every = [], [answer for (answer,) in filter(None, answers)]
        times = {case: record for answer in every for case, record in answer["cases"].items() if "@" in case}
        lacking = {"status": "not run", "reason": "the run was stopped before it", "traceback": "", "steps": []}
        for case in self.cases:
            name, _, size = case.partition("@")
            probes = [answer["cases"][name] for answer in every if name in answer["cases"]]
            timed = times.get(case, lacking)
            batch = timed.get("size", None if size == "max" else int(size))
            row: Row = {"case": case, "method": name, "batch": batch, "chunk": self.job.about["chunk"], "status": "ok"}
            row |= {
                key: timed[key] for key in ("tried", "bound", "expected_s", "flops", "mfu", "parts") if key in timed
            }
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
                row["to_open_clip"] = ratio(seconds, batch, theirs(batch, times))
            wrong = next((record for record in [timed, *probes] if record["status"] != "ok"), None)
            if wrong:
                row |= {key: wrong[key] for key in ("status", "reason", "traceback")}
            rows.append(row)
        last = every[-1] if every else {}
        return {"rows": rows, "threads": last.get("threads"), "pinned": last.get("pinned")}


def plan(settings: StepBenchSettings) -> StepPart:
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
    busy = settings.clock == "cpu"
    if busy and device != "cpu":
        raise UserError("clock=cpu counts the processor's time: give device=cpu, or clock=wall")
    job = Job(about, device, repeats=settings.repeats, threads=1 if busy else None)
    batches = sorted(set(counts("memory", settings.memory)))
    return StepPart(job, chosen(settings.methods, batch, chunk), batches, settings.malloc == "keep")


def one_count(name: str, text: str) -> int:
    found = counts(name, text)
    if len(found) != 1:
        raise UserError(f"{name}={text}: give one count")
    return found[0]


def chosen(text: str, batch: int, chunk: int) -> list[str]:
    """The cases named, each with what it is compared with. Raises UserError."""
    installed = find_spec("open_clip_train") is not None
    named = split(text)
    if named == ["auto"]:
        named = [name for name in BY_DEFAULT if installed or not name.startswith("open_clip")]
        named = [name for name in named if name != "open_clip" or batch % chunk == 0]
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


def step_seconds(record: Row) -> list[float]:
    return [sum(step.values()) for step in record["steps"]]


def against(case: str, batch: int, times: Row) -> Row | None:
    """The record that a case is compared with: its baseline at the same batch if there is one, else at the largest."""
    plains = [record for other, record in times.items() if method_of(other) == baseline(case) and record["steps"]]
    return max(plains, key=lambda record: (record["size"] == batch, record["size"]), default=None)


def theirs(batch: int, times: Row) -> Row | None:
    """The record of open_clip's plain loop at this batch."""
    record = times.get(f"open_clip-plain@{batch}")
    return record if record and record["steps"] else None


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
    Column("to open_clip", "to_open_clip.median", "{:.2f}".format),
    Column("MFU", "mfu", "{:.1%}".format),
    Column("peak MiB", "peak_bytes", lambda size: f"{size / MIB:,.0f}"),
)


def title(record: Row) -> str:
    settings, where = record["settings"], processor(record, record["device"], record["threads"])
    return f"step in chunks of {settings['chunk']}, model={settings['model']}, {settings['precision']}, on {where}"


def notes(record: Row) -> list[str]:
    """What was tried to find the largest batches."""
    lines = []
    for row in record["rows"]:
        if row.get("tried"):
            tries = ", ".join(f"{size}: {found}" for size, found in row["tried"].items())
            lines.append(f"{row['case']}: {tries}" + (" (more would take too long)" if "bound" in row else ""))
    if record["pinned"] is False:
        lines.append("The samples' host memory could not be page-locked: copies were slower than in training.")
    return lines


def targets(record: Row) -> list[str]:
    """Utilisation, if the model has a target; the cache's time beside plain's; ours beside open_clip's; and flat memory."""
    rows, model, lines = record["rows"], record["settings"]["model"], []
    if model in MFU and record["device"] == "cuda":
        plain = [row for row in rows if row["method"] == "plain"]
        mfu = Target(f"plain at {MFU[model]:.0%} MFU at least", lambda x: x >= MFU[model], "{:.1%}")
        lines.append(mfu.judge(figures(plain, _case, "mfu")))
    cached = [row for row in rows if Name.of(row["method"]).base == "cache"]
    frozen = [row for row in cached if Name.of(row["method"]).kind == "frozen"]
    others = [row for row in cached if row not in frozen and Name.of(row["method"]).kind not in ("unlean", "neither")]
    cache = Target("the cache in at most 1.25 times plain's time", lambda x: x <= 1.25)
    locked = Target("with a frozen image tower, in at most 1.05 times plain's", lambda x: x <= 1.05)
    unlike = Target("exact and cached in at most the time of open_clip's plain step", lambda x: x <= 1)
    faster = Target("faster than open_clip in every row", lambda x: x > 1)
    span = " to ".join(map(format_count, FLAT))
    text = f"memory flat within 2 % from {span} pairs, the loss's linear part aside"
    return [
        *lines,
        cache.judge(figures(others, _case, "ratio.median")),
        locked.judge(figures(frozen, _case, "ratio.median")),
        unlike.judge(figures([row for row in others if row["method"] == "cache"], _case, "to_open_clip.median")),
        faster.judge(beside_open_clip(rows)),
        Target(text, lambda x: x <= 0.02, "{:.1%}").judge(flatness(cached)),
    ]


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
    """Growth of each pass of a method between the batches of FLAT. The features that encoding leaves belong to the loss."""
    found: list[Found] = [(row["case"], row["status"]) for row in rows if row["status"] in WRONG]
    for method in dict.fromkeys(row["method"] for row in rows):
        own = {row["batch"]: row["parts"] for row in rows if row["method"] == method and "parts" in row}
        own = {batch: parts for batch, parts in own.items() if "mem_encode_bytes" in parts}
        if len(own) > 1 and (min(own) > FLAT[0] or max(own) < FLAT[1]):
            found.append((method, f"was measured from {format_count(min(own))} to {format_count(max(own))} only"))
        elif len(own) > 1:
            encode = [parts["mem_encode_bytes"] - parts["features_bytes"] for parts in own.values()]
            replay = [parts["mem_replay_bytes"] for parts in own.values()]
            found.append((f"{method}: encode, less features,", max(encode) / min(encode) - 1))
            found.append((f"{method}: replay", max(replay) / min(replay) - 1))
    return found


def panels(record: Row) -> list[Lines | Bars]:
    """Time beside plain, and memory against the batch."""
    timed = [row for row in record["rows"] if row.get("ratio")]
    memory: dict[str, dict[int, Value]] = {}
    for row in record["rows"]:
        sizes = {int(batch): max(size, 2**16) / MIB for batch, size in row["memory"].items()}
        memory[row["method"]] = memory.get(row["method"], {}) | sizes
    lines = {name: sorted(sizes.items()) for name, sizes in memory.items() if len(sizes) > 1}
    names = [f"{row['method']} at {format_count(row['batch'])}" for row in timed]
    return [
        Bars("seconds a sample relative to plain", names, {"": [row["ratio"] for row in timed]}, mark=1),
        Lines("peak memory of a step, MiB", lines),
    ]


BENCHMARKS = {"step": Benchmark(("case",), title, COLUMNS, targets, panels, notes)}
