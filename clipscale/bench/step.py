"""`clipscale bench step`: gradients of one batch, plain, with the cache, with kept graphs and with a frozen tower; time and memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Self

from rich.console import Console

from clipscale.bench.harness import KEEPING_MALLOC, RETURNING_MALLOC, Answer, Job
from clipscale.bench.present import MIB, Bars, Benchmark, Column, Found, Key, Lines, Value, extent, figures, judged
from clipscale.bench.record import counts, device_of, drive, processor
from clipscale.bench.step_work import Name
from clipscale.bench.worker import spread
from clipscale.common.errors import UserError
from clipscale.common.units import format_count, nearest, split
from clipscale.config.presets import group_options
from clipscale.config.tools import StepBenchSettings

Row = dict[str, Any]

METHODS = {
    "plain": "forward and backward of the whole batch in one graph",
    "cache": "the gradient cache: every chunk without a graph, the loss, every chunk again",
    "keep-50": "the cache, with memory for half of all graphs (keep-N: for N per cent; keep-NG: N GiB)",
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
BY_DEFAULT = [name for name in METHODS if not name.startswith("compiled")]
CURVES = ("plain", "cache", "open_clip")
"""Methods whose memory is drawn against the batch."""
FLAT = 2**15, 2**20
"""Batches between which memory is to be flat."""


def main(settings: StepBenchSettings, console: Console | None = None) -> list[Row]:
    """Measure, print and save. Raises UserError for settings that cannot be."""
    part = plan(settings)
    device, names = part.job.device, map(method_of, part.cases)
    methods = {name: METHODS.get(name, METHODS["keep-50"]) for name in names}
    more = {"device": device, "methods": methods, "threads": None, "pinned": None}
    return drive("step", "clipscale.bench.step_work:StepWorker", [part], settings, f"step-{device}", console, **more)


@dataclass(frozen=True)
class StepPart:
    """All methods of one model and chunk."""

    job: Job
    cases: list[str]
    """METHOD@BATCH or METHOD@max."""
    batches: list[int]
    """At which memory is measured."""
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
        yield replace(self.job, timed=self.cases, variables=KEEPING_MALLOC if cpu else {})

    def found(self, answers: Sequence[Sequence[Answer]]) -> Row:
        """One row for each case from the answers of the memory jobs and the time job."""
        rows, every = [], [answer for (answer,) in filter(None, answers)]
        records = {name: record for answer in every for name, record in answer["cases"].items()}
        done = {case: record for case, record in records.items() if "@" in case and record["steps"]}
        lacking = {"status": "not run", "reason": "the run was stopped before it", "traceback": "", "steps": []}
        for case in self.cases:
            name, _, size = case.partition("@")
            timed, probe = records.get(case, lacking), records.get(name, {"status": "ok"})
            batch = timed.get("size", None if size == "max" else int(size))
            row: Row = {"case": case, "method": name, "batch": batch, "chunk": self.job.about["chunk"], "status": "ok"}
            row |= {key: timed[key] for key in ("tried", "flops", "mfu", "parts") if key in timed}
            memory = probe.get("memory", {}) | timed.get("memory", {})
            row["memory"] = {int(key): value for key, value in memory.items()}
            row["peak_bytes"] = row["memory"].get(batch)
            if timed["steps"]:
                seconds = step_seconds(timed)
                row["step_s"] = spread(seconds)
                row["samples_per_s"] = batch / row["step_s"]["median"]
                if row.get("mfu") is not None:
                    row["mfu"] *= seconds[-1] / row["step_s"]["median"]
                row["ratio"] = ratio(timed, [done[other] for other in done if method_of(other) == baseline(case)])
                row["to_open_clip"] = ratio(
                    timed, [done[other] for other in done if other == f"open_clip-plain@{batch}"]
                )
            wrong = next((record for record in (timed, probe) if record["status"] != "ok"), None)
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
    batch, chunk = settings.batch, settings.chunk
    if chunk > batch:
        raise UserError(f"chunk={chunk}: a batch={batch} has no chunk that large; choose 1 to {batch}")
    about = {"model": settings.model, "chunk": chunk, "precision": settings.precision}
    job = Job(about, device, repeats=settings.repeats)
    return StepPart(job, chosen(settings.methods, batch, chunk), sorted(set(counts("memory", settings.memory))))


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
        pairs = size if size == "max" else counts("methods", size)[0] if size else batch
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


def ratio(record: Row, peers: Sequence[Row]) -> dict[str, Any] | None:
    """Of seconds a sample to those of the peer at the same batch, or else at the largest, within each round; None without peers."""
    size = record["size"]
    peer = max(peers, key=lambda peer: (peer["size"] == size, peer["size"]), default=None)
    if peer is None:
        return None
    rounds = zip(step_seconds(record), step_seconds(peer))
    return spread([own / size / (other / peer["size"]) for own, other in rounds])


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
            lines.append(f"{row['case']}: {tries}")
    if record["pinned"] is False:
        lines.append("The samples' host memory could not be page-locked: copies were slower than in training.")
    return lines


def targets(record: Row) -> list[str]:
    """The cache's time beside plain's and beside open_clip's plain step, and flat memory."""
    cached = [row for row in record["rows"] if Name.of(row["method"]).base == "cache"]
    frozen = [row for row in cached if Name.of(row["method"]).kind == "frozen"]
    others = [row for row in cached if row not in frozen and Name.of(row["method"]).kind not in ("unlean", "neither")]
    default = [row for row in others if row["method"] == "cache"]
    theirs = "exact and cached in at most the time of open_clip's plain step"
    flat = f"memory flat within 2 % from {' to '.join(map(format_count, FLAT))} pairs, the loss's linear part aside"
    return [
        judged("the cache in at most 1.25 times plain's time", lambda x: x <= 1.25, figures(others, _case, "ratio.median")),
        judged("with a frozen image tower, in at most 1.05 times plain's", lambda x: x <= 1.05, figures(frozen, _case, "ratio.median")),
        judged(theirs, lambda x: x <= 1, figures(default, _case, "to_open_clip.median")),
        judged(flat, lambda x: x <= 0.02, flatness(cached), "{:.1%}"),
    ]  # fmt: skip


def _case(row: Row) -> str:
    return str(row["case"])


def flatness(rows: Sequence[Row]) -> list[Found]:
    """Growth of each pass of a method between the batches of FLAT. The features that encoding leaves belong to the loss."""
    found: list[Found] = [(row["case"], row["status"]) for row in rows if row["status"] != "ok"]
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


BENCHMARK = Benchmark(("case",), title, COLUMNS, targets, panels, notes)
