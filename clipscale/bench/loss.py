"""`clipscale bench loss`: time, memory, matmuls, bytes and error of the loss's methods, as a table, JSON and a picture.

Letters: N pairs of all ranks (and as many columns: M = N), D feature width.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import inf
from statistics import median
from typing import Any, Self

import torch
from rich.console import Console

from clipscale.bench.harness import RETURNING_MALLOC, Answer, Job
from clipscale.bench.loss_methods import DTYPES, Case, Method, chosen
from clipscale.bench.loss_work import unit_flops
from clipscale.bench.present import MIB, Benchmark, Column, Found, Key, Lines, Value, extent, figures, judged, lookup
from clipscale.bench.record import counts, device_of, drive, processor
from clipscale.bench.worker import spread
from clipscale.common.errors import UserError
from clipscale.common.hardware import cores
from clipscale.common.units import format_count, nearest, split
from clipscale.config.tools import LossBenchSettings

Row = dict[str, Any]

COUNTED_UNITS = 4
"""The work every method is credited with, in units of 2 N M D FLOP: scores forward; scores again and two gradients backward."""
OURS = "infcl"
"""The loss of a user who does not choose."""


def main(settings: LossBenchSettings, console: Console | None = None) -> list[Row]:
    """Measure, print and save. Raises UserError for settings that cannot be."""
    parts = plan(settings)
    device, methods = parts[0].case.device, {method.name: method.about for method in parts[0].methods}
    name = f"loss-{device}-{settings.ranks}ranks" if settings.ranks > 1 else f"loss-{device}"
    return drive(
        "loss", "clipscale.bench.loss_work:LossWorker", parts, settings, name, console, methods=methods, gemm=[]
    )


@dataclass(frozen=True)
class LossPart:
    """One case of all methods."""

    case: Case
    methods: Sequence[Method]
    settings: LossBenchSettings

    @property
    def label(self) -> str:
        return f"N={format_count(self.case.n)} D={self.case.d} {self.case.dtype}"

    def names(self) -> list[Key]:
        return [(self.case.n, self.case.d, self.case.dtype, method.name) for method in self.methods]

    def without(self, done: set[Key]) -> Self:
        left = [method for method, key in zip(self.methods, self.names(), strict=True) if key not in done]
        return replace(self, methods=left)

    def jobs(self, answers: Sequence[Sequence[Answer]]) -> Iterator[Job]:
        """On the CPU, and on several ranks, the memory of each method in processes of its own, so that one method's peak or failure
        does not reach the next; then the time of all, interleaved, in one set of processes."""
        case, cpu = self.case, self.case.device == "cpu"
        able = [method.name for method in self.methods if method.installed and method.obstacle(case) is None]
        about = {"case": asdict(case), "reference": self.settings.reference}
        threads = max(1, cores() // case.ranks) if cpu and case.ranks > 1 else None
        job = Job(about, case.device, ranks=case.ranks, threads=threads)
        apart = able if cpu or case.ranks > 1 else []
        for name in apart:
            yield replace(job, probed=[(name, case.n)], variables=RETURNING_MALLOC if cpu else {})
        records = [item for ranks in answers for answer in ranks for item in answer["cases"].items()]
        failed = {name for name, record in records if record["status"] != "ok"}
        if timed := [name for name in able if name not in failed]:
            probed = [] if apart else [(name, case.n) for name in able]
            yield replace(job, probed=probed, timed=timed, repeats=self.settings.repeats)

    def found(self, answers: Sequence[Sequence[Answer]]) -> Row:
        """One row for each method, and the GEMM measurement, from the answers of each job's ranks."""
        case, where = self.case, asdict(self.case)
        found: dict[str, Row] = {}
        for ranks in answers:
            for name in ranks[0]["cases"] if ranks else ():
                found[name] = found.get(name, {}) | joined([answer["cases"][name] for answer in ranks], case)
        gemm = [where | rates(ranks, case) for ranks in answers if ranks and ranks[0]["gemm"]["seconds"]]
        rows = []
        for method in self.methods:
            row: Row = where | {"method": method.name, "scale": method.scale or case.scale}
            if not method.installed:
                row |= {"status": "not installed", "reason": f"install {method.package}"}
            elif obstacle := method.obstacle(case):
                row |= {"status": "not supported", "reason": obstacle}
            else:
                row |= found.get(method.name, {"status": "ok"})
            if row["status"] == "ok" and "total_s" not in row:
                row |= {"status": "not run", "reason": "its time was not measured: the run was stopped"}
            if row["status"] == "ok":
                row["counted_flops"] = COUNTED_UNITS * unit_flops(case)
                row["flops_per_s"] = row["counted_flops"] / row["total_s"]["median"]
                row["gemm_fraction"] = row["flops_per_s"] / gemm[0]["flops_per_s"]
            rows.append(row)
        return {"rows": rows, "gemm": gemm}


def plan(settings: LossBenchSettings) -> list[LossPart]:
    """The cases with their methods, the least work first. Raises UserError."""
    device = device_of(settings.device)
    if not settings.scale > 0:
        raise UserError(f"scale={settings.scale:g}: must be positive; it is the multiplier, not its logarithm")
    if device == "cuda" and settings.ranks > torch.cuda.device_count():
        raise UserError(f"ranks={settings.ranks}: there are {torch.cuda.device_count()} CUDA devices; use fewer ranks")
    dtypes = split(settings.dtype)
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise UserError(f"dtype={dtype}: unknown{nearest(dtype, DTYPES)}; there are {', '.join(DTYPES)}")
    if "tf32" in dtypes and device == "cpu":
        raise UserError("dtype=tf32: only CUDA devices have it; use dtype=fp32")
    sizes, widths = counts("n", settings.n), counts("d", settings.d)
    for n in sizes:
        if n % settings.ranks:
            raise UserError(f"n={n}: does not divide among {settings.ranks} ranks; choose a multiple")
    methods = chosen(settings.methods, device, settings.ranks)
    for name, values in (("n", sizes), ("d", widths), ("dtype", dtypes), ("methods", methods)):
        if not values:
            raise UserError(f"{name} is empty; give at least one")
    shapes = product(dtypes, widths, sizes)
    cases = [Case(n, d, dtype, device, settings.ranks, settings.scale) for dtype, d, n in shapes]
    return [LossPart(case, methods, settings) for case in sorted(cases, key=unit_flops)]


# ---- rows ----


def rates(ranks: Sequence[Answer], case: Case) -> Row:
    """FLOP/s of the bursts of matrix products, of all ranks together; the slowest rank's seconds count."""
    gemm = ranks[0]["gemm"]
    seconds = [max(times) for times in zip(*(answer["gemm"]["seconds"] for answer in ranks))]
    flop = 2.0 * case.ranks * gemm["products"] * gemm["side"] ** 3
    return gemm | {"seconds": seconds, "flops_per_s": flop / median(seconds)}


def joined(ranks: list[Row], case: Case) -> Row:
    """One method's record from those of all ranks: the slowest time, the largest memory, bytes and error, all matmuls together."""
    wrong = next((rank for rank in ranks if rank["status"] != "ok"), None)
    if wrong is not None:
        return {key: wrong[key] for key in ("status", "reason", "traceback")}

    def most(key: str) -> Any:
        return max((rank[key] for rank in ranks if rank[key] is not None), default=None)

    found: Row = {"status": "ok"}
    if ranks[0]["steps"]:
        steps = list(zip(*(rank["steps"] for rank in ranks)))
        for part in ("forward", "backward"):
            found[f"{part}_s"] = spread([max(step[part] for step in of_ranks) for of_ranks in steps])
        found["total_s"] = spread([max(sum(step.values()) for step in of_ranks) for of_ranks in steps])
    if "extra_bytes" in ranks[0]:
        found |= {key: most(key) for key in ("extra_bytes", "sent_bytes", "error")}
        found["units"] = None if ranks[0]["units"] is None else sum(rank["units"] for rank in ranks)
        sent = found["sent_bytes"]
        found["sent_per_feature"] = None if sent is None else sent / (case.n * case.d)
    return found


# ---- how the record is shown ----


def milliseconds(seconds: float) -> str:
    ms = 1e3 * seconds
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


COLUMNS = (
    Column("N", "n", format_count, case=True),
    Column("D", "d", case=True),
    Column("dtype", "dtype", case=True),
    Column("method", "method", words=True, case=True),
    Column("forward ms", "forward_s.median", milliseconds),
    Column("backward ms", "backward_s.median", milliseconds),
    Column("total ms", "total_s.median", milliseconds),
    Column("min-max", "total_s", extent(milliseconds)),
    Column("TFLOP/s", "flops_per_s", lambda rate: f"{rate / 1e12:.3g}"),
    Column("of GEMM", "gemm_fraction", lambda share: f"{100 * share:.0f} %"),
    Column("units", "units", "{:.2f}".format),
    Column("extra MiB", "extra_bytes", lambda size: f"{size / MIB:,.1f}"),
    Column("error", "error", "{:.1e}".format),
    Column("sent MiB", "sent_bytes", lambda size: f"{size / MIB:,.2f}"),
    Column("per B*D", "sent_per_feature", "{:.2f}".format),
)


def title(record: Row) -> str:
    ranks = record["settings"]["ranks"]
    where = processor(record, record["rows"][0]["device"]) + (f", {ranks} ranks" if ranks > 1 else "")
    return f"contrastive loss, forward and backward, on {where}"


def name_of(row: Row) -> str:
    return f"{format_count(row['n'])} x {row['d']} {row['dtype']}"


def notes(record: Row) -> list[str]:
    """The GEMM rates."""
    speeds: dict[str, list[float]] = {}
    for gemm in record["gemm"]:
        speeds.setdefault(f"{gemm['dtype']} GEMM of side {gemm['side']}", []).append(gemm["flops_per_s"] / 1e12)
    return [f"{name}: {min(found):.3g} to {max(found):.3g} TFLOP/s by case" for name, found in speeds.items()]


def targets(record: Row) -> list[str]:
    """Of one rank. On CUDA: share of the GEMM rate, speed beside inf-cl, memory at 1M; on a CPU: speed and memory beside ClipLoss."""
    rows = [row for row in record["rows"] if row["ranks"] == 1]
    ours = [row for row in rows if row["method"] == OURS]
    devices, lines = {row["device"] for row in rows}, []
    if "cuda" in devices:
        where = "N >= 64k, D = 768, bf16"
        large = [row for row in ours if row["n"] >= 2**16 and row["d"] == 768 and row["dtype"] == "bf16"]
        huge = [row | {"extra_gib": row.get("extra_bytes", 0) / 2**30} for row in ours if row["n"] >= 2**20]
        rates, sizes = figures(large, name_of, "gemm_fraction"), figures(huge, name_of, "extra_gib")
        speeds = quotients(large, rows, "inf_cl", name_of, "total_s.median")
        lines += [
            judged(f"at least 80 % of the GEMM rate at 4 units ({where})", lambda x: x >= 0.8, rates, "{:.1%}"),
            judged(f"at least 8 times as fast as inf-cl ({where})", lambda x: x >= 8, speeds),
            judged("at most 1.9 GiB of extra memory (N >= 1M)", lambda x: x <= 1.9, sizes, "{:.2f} GiB"),
        ]
    if "cpu" in devices:
        where = "N >= 16k, D = 512, on a CPU"
        large = [row for row in ours if row["n"] >= 2**14 and row["d"] == 512]
        speeds, sizes = (quotients(large, rows, "open_clip", name_of, key) for key in ("total_s.median", "extra_bytes"))
        small = f"at most a twentieth of ClipLoss's extra memory ({where})"
        lines += [
            judged(f"at least 1.5 times as fast as ClipLoss ({where})", lambda x: x >= 1.5, speeds),
            judged(small, lambda x: x >= 20, sizes, "1/{:.0f}"),
        ]
    return lines


def quotients(ours: Iterable[Row], rows: Sequence[Row], peer: str, name: Callable[[Row], str], key: str) -> list[Found]:
    """The peer's figure under a dotted key over ours, case by case."""
    found: list[Found] = []
    for row in ours:
        same = next((r for r in rows if r["method"] == peer and name(r) == name(row)), {"status": "not run"})
        if row["status"] != "ok":
            found.append((name(row), row["status"]))
        elif same["status"] != "ok":
            found.append((name(row), f"({peer}: {same['status']})"))
        else:
            own, theirs = lookup(row, key), lookup(same, key)
            found.append((name(row), theirs / own if own else inf))
    return found


def scaled(spread: Mapping[str, float], factor: float) -> dict[str, float]:
    """A spread in another unit."""
    return {part: factor * spread[part] for part in ("median", "min", "max")}


PANELS: dict[str, Callable[[Row], Value]] = {
    "forward + backward, ms": lambda row: scaled(row["total_s"], 1e3),
    "extra memory, MiB": lambda row: max(row["extra_bytes"], 2**16) / MIB,
    "forward, ms": lambda row: scaled(row["forward_s"], 1e3),
    "backward, ms": lambda row: scaled(row["backward_s"], 1e3),
}


def panels(record: Row) -> list[Lines]:
    """For each width and dtype time and memory against the batch, and forward and backward apart."""
    found = []
    shapes = dict.fromkeys((row["d"], row["dtype"]) for row in record["rows"])
    for (d, dtype), (heading, value) in product(shapes, PANELS.items()):
        lines: dict[str, list[tuple[int, Value]]] = {}
        for row in sorted(record["rows"], key=lambda row: int(row["n"])):
            if (row["d"], row["dtype"], row["status"]) == (d, dtype, "ok"):
                lines.setdefault(row["method"], []).append((row["n"], value(row)))
        found.append(Lines(f"{heading} (D = {d}, {dtype})", lines))
    return found


BENCHMARK = Benchmark(("n", "d", "dtype", "method"), title, COLUMNS, targets, panels, notes)
