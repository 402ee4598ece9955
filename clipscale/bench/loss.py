"""`clipscale bench loss`: time, memory, matmuls, bytes and error of the loss's methods, as a table, JSON and a picture.

Letters: N pairs of all ranks (and as many columns: M = N), D feature width.
"""

import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from statistics import median
from typing import Any

import torch
from rich.console import Console

from clipscale.bench.harness import RETURNING_MALLOC, Answer, Job, measure
from clipscale.bench.loss_methods import DTYPES, Case, Method, chosen
from clipscale.bench.loss_work import unit_flops
from clipscale.bench.memory import HOW as MEMORY_HOW
from clipscale.bench.present import (
    MIB,
    Bars,
    Benchmark,
    Column,
    Curves,
    extent,
    finish,
    mebibytes,
    milliseconds,
)
from clipscale.bench.record import begin, counts, device_of, final, processor, words, write
from clipscale.bench.targets import Target, figures, quotients
from clipscale.bench.worker import spread
from clipscale.config.tools import LossBenchSettings
from clipscale.errors import UserError
from clipscale.hardware import cores
from clipscale.report.table import plain_console
from clipscale.units import format_count, nearest

Row = dict[str, Any]

COUNTED_UNITS = 4
"""The work every method is credited with, in units of 2 N M D FLOP: scores forward; scores again and two gradients backward."""
SHARE = 0.5
"""Of the time left, what a case may use for rounds after its first."""
OURS = "infcl"
"""The loss of a user who does not choose."""
CASE = ("n", "d", "dtype")
HOW = {
    "time": "wall clock with the device waited for; methods interleaved, every second round backwards, after a round that is not counted; "
    "medians, least and most; of several ranks the slowest",
    "flops": f"{COUNTED_UNITS} units of 2 N M D FLOP for every method, whatever it computes; 'units' is what passes through torch's "
    "matmuls, all ranks together",
    "gemm": "after each timed step a burst of torch.mm of square random matrices, `products` of them back to back, and one of (rows, D) by "
    "(D, rows), same dtype, all ranks at once; 'of GEMM' is of the median over the square bursts",
    "memory": "forward: growth of the peak; backward: the same less the gradients of the features; the larger one; the most of any rank",
    "error": "largest relative distance of value and gradients from the float64 oracle on the same features",
    "sent": "bytes that a rank sends in one step, a collective counted as its ring algorithm",
}


def main(settings: LossBenchSettings, console: Console | None = None) -> list[Row]:
    """Measure, print and save. Raises UserError for settings that cannot be."""
    end = time.monotonic() + (settings.seconds or math.inf)
    console = console or plain_console()
    cases, methods = plan(settings)
    ranks = f"-{settings.ranks}ranks" if settings.ranks > 1 else ""
    record, path = begin(
        settings.out,
        f"loss-{cases[0].device}{ranks}",
        "loss",
        settings,
        how=HOW | {"memory_source": MEMORY_HOW[cases[0].device]},
        methods={method.name: method.about for method in methods},
        load_average_before=_load(),
        gemm=[],
    )
    for case in sorted(cases, key=unit_flops):
        own = [row for row in record["rows"] if same_case(row, case)]
        done = {row["method"] for row in own if final(row)}
        todo = [method for method in methods if method.name not in done]
        names = {method.name for method in todo}
        kept = [row for row in record["rows"] if not (same_case(row, case) and row["method"] in names)]
        gemm = record["gemm"]
        finished: list[list[Answer]] = []

        def hear(answers: list[Answer]) -> None:
            """Every measurement goes into the record at once, so that an interruption leaves what came before."""
            rows, bursts = rows_of(case, todo, [*finished, answers])  # noqa: B023
            record["rows"] = ordered([*kept, *rows], cases, methods)  # noqa: B023
            record["gemm"] = [*gemm, *bursts]  # noqa: B023
            write(path, record | {"load_average_after": _load()})

        where = f"N={format_count(case.n)} D={case.d} {case.dtype}"
        with console.status(where) as status:
            while job := next_job(case, todo, finished, settings):
                status.update(f"{where}: {'time' if job.timed else f'memory of {job.names[0]}'}")
                if not math.isinf(end):
                    job = replace(job, seconds=max(0.0, end - time.monotonic()))
                malloc = RETURNING_MALLOC if job.probed and case.device == "cpu" else {}
                finished.append(measure("clipscale.bench.loss_work:work", job, malloc, hear))
        if not finished:
            hear([])
    record["load_average_after"] = _load()
    return finish(record, path, console)


def plan(settings: LossBenchSettings) -> tuple[list[Case], list[Method]]:
    """The cases and the methods of the settings. Raises UserError."""
    device = device_of(settings.device)
    if not settings.scale > 0:
        raise UserError(f"scale={settings.scale:g}: must be positive; it is the multiplier, not its logarithm")
    if device == "cuda" and settings.ranks > torch.cuda.device_count():
        raise UserError(f"ranks={settings.ranks}: there are {torch.cuda.device_count()} CUDA devices; use fewer ranks")
    dtypes = words(settings.dtype)
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
    return [Case(n, d, dtype, device, settings.ranks, settings.scale) for dtype, d, n in shapes], methods


def same_case(row: Row, case: Case) -> bool:
    return all(row[key] == getattr(case, key) for key in CASE)


def ordered(rows: list[Row], cases: list[Case], methods: Sequence[Method]) -> list[Row]:
    """Case by case and method by method in the order of the settings; rows of earlier runs that these leave out come first."""
    places = {(case.n, case.d, case.dtype, m.name): i for i, (case, m) in enumerate(product(cases, methods))}
    return sorted(rows, key=lambda row: places.get((row["n"], row["d"], row["dtype"], row["method"]), -1))


def next_job(
    case: Case, methods: Sequence[Method], finished: Sequence[list[Answer]], settings: LossBenchSettings
) -> Job | None:
    """What the case needs next: on the CPU, and on several ranks, the memory of each method in processes of its own, so that one
    method's peak or failure does not reach the next; then time of all, interleaved, in one set of processes."""
    able = [m.name for m in methods if m.installed and m.obstacle(case) is None]
    apart = able if case.device == "cpu" or case.ranks > 1 else []
    about = {"case": asdict(case), "reference": settings.reference, "profile": settings.profile}
    threads = max(1, cores() // case.ranks) if case.device == "cpu" and case.ranks > 1 else None
    job = Job(about, case.device, ranks=case.ranks, threads=threads, share=SHARE)
    if len(finished) < len(apart):
        return replace(job, probed=[(apart[len(finished)], case.n)])
    records = [(name, found) for answers in finished for answer in answers for name, found in answer["cases"].items()]
    failed = {name for name, found in records if found["status"] != "ok"}
    timed = [name for name in able if name not in failed]
    if len(finished) > len(apart) or not timed:
        return None
    probed = [] if apart else [(name, case.n) for name in able]
    return replace(job, probed=probed, timed=timed, repeats=settings.repeats)


# ---- rows ----


def rows_of(case: Case, methods: Sequence[Method], jobs: Sequence[Sequence[Answer]]) -> tuple[list[Row], list[Row]]:
    """One row for each method, and the GEMM measurement, from the answers of each job's ranks."""
    found: dict[str, Row] = {}
    gemm: list[Row] = []
    where = asdict(case)
    for answers in jobs:
        for name in answers[0]["cases"] if answers else ():
            found[name] = found.get(name, {}) | joined([answer["cases"][name] for answer in answers], case)
        seconds = [max(times) for times in zip(*(answer.get("gemm", {}).get("seconds", []) for answer in answers))]
        if seconds:
            burst = answers[0]["gemm"]
            flop, panel = case.ranks * burst["products"] * 2.0, burst["panel"]
            square = {"side": burst["side"], "products": burst["products"], "seconds": seconds}
            square |= rates(flop * burst["side"] ** 3, seconds)
            gemm.append(
                where | square | {"panel": panel | rates(flop * panel["rows"] ** 2 * panel["width"], panel["seconds"])}
            )
    rows = []
    for method in methods:
        row: Row = where | {"method": method.name, "scale": method.scale or case.scale}
        if not method.installed:
            row |= {"status": "not installed", "reason": f"install {method.package}"}
        elif obstacle := method.obstacle(case):
            row |= {"status": "not supported", "reason": obstacle}
        else:
            row |= found.get(method.name, {"status": "not run", "reason": "the run was stopped before it"})
        if row["status"] == "ok" and "total_s" not in row:
            row |= {"status": "not run", "reason": "its time was not measured: the run was stopped"}
        if row["status"] == "ok":
            row["counted_flops"] = COUNTED_UNITS * unit_flops(case)
            row["flops_per_s"] = row["counted_flops"] / row["total_s"]["median"]
            row["gemm_fraction"] = row["flops_per_s"] / gemm[0]["flops_per_s"]
        rows.append(row)
    return rows, gemm


def rates(flop: float, seconds: list[float]) -> Row:
    """Of bursts of so many operations."""
    return {"flops_per_s": flop / median(seconds), "best_flops_per_s": flop / min(seconds)}


def joined(ranks: list[Row], case: Case) -> Row:
    """One method's record from those of all ranks: the slowest time, the largest memory, bytes and error, all matmuls together."""
    wrong = next((rank for rank in ranks if rank["status"] != "ok"), None)
    if wrong is not None:
        return {key: wrong[key] for key in ("status", "reason", "traceback")}
    found: Row = {"status": "ok"}
    if ranks[0]["steps"]:
        steps = list(zip(*(rank["steps"] for rank in ranks)))
        for part in ("forward", "backward"):
            found[f"{part}_s"] = spread([max(step[part] for step in step_of_ranks) for step_of_ranks in steps])
        found["total_s"] = spread([max(sum(step.values()) for step in step_of_ranks) for step_of_ranks in steps])
    if "extra_bytes" in ranks[0]:
        for name in ("growth_bytes", "extra_bytes", "sent_bytes", "error"):
            found[name] = max((rank[name] for rank in ranks if rank[name] is not None), default=None)
        errors = ranks[0]["errors"]
        found["errors"] = errors and {name: max(rank["errors"].get(name, 0.0) for rank in ranks) for name in errors}
        found["units"] = None if ranks[0]["units"] is None else sum(rank["units"] for rank in ranks)
        sent = found["sent_bytes"]
        found["sent_per_feature"] = None if sent is None else sent / (case.n * case.d)
    if "profile" in ranks[0]:
        found["profile"] = ranks[0]["profile"]
    return found


def _load() -> float | None:
    """Processes that wanted a core, over the last minute."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


# ---- how the record is shown ----

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
    Column("extra MiB", "extra_bytes", mebibytes),
    Column("error", "error", "{:.1e}".format),
)
RANKS = (
    Column("sent MiB", "sent_bytes", lambda size: f"{size / MIB:,.2f}"),
    Column("per B*D", "sent_per_feature", "{:.2f}".format),
)
"""More columns where there are several ranks."""


def columns(record: Row) -> list[Column]:
    return [*COLUMNS, *(RANKS if record["settings"]["ranks"] > 1 else ())]


def title(record: Row) -> str:
    ranks = record["settings"]["ranks"]
    where = processor(record, record["rows"][0]["device"]) + (f", {ranks} ranks" if ranks > 1 else "")
    return f"contrastive loss, forward and backward, on {where}"


def notes(record: Row) -> list[str]:
    """The methods, why some have no figures, the GEMM rates, and where the time goes."""
    lines = [f"{name}: {about}" for name, about in record["methods"].items()]
    reasons: dict[tuple[str, str, str], int] = {}
    for row in record["rows"]:
        if "reason" in row:
            reasons.setdefault((row["method"], row["status"], row["reason"]), row["n"])
    lines += [
        f"{method}: {status} (first at N = {format_count(n)}): {reason}"
        for (method, status, reason), n in reasons.items()
    ]
    bursts: dict[str, list[Row]] = {}
    for gemm in record["gemm"]:
        bursts.setdefault(f"{gemm['dtype']} GEMM of side {gemm['side']}", []).append(gemm)
        if panel := gemm.get("panel"):
            shape = f"({panel['rows']}, {gemm['d']}) by ({gemm['d']}, {panel['rows']})"
            bursts.setdefault(f"{gemm['dtype']} GEMM of {shape}", []).append({"products": gemm["products"]} | panel)
    for name, found in bursts.items():
        speeds = [gemm["flops_per_s"] / 1e12 for gemm in found]
        seconds = [s for gemm in found for s in gemm["seconds"]]
        products = "/".join(map(str, sorted({gemm.get("products", 1) for gemm in found})))
        lines.append(
            f"{name}: {min(speeds):.3g} to {max(speeds):.3g} TFLOP/s by case, medians of bursts of {products} back to back "
            f"({milliseconds(min(seconds))} to {milliseconds(max(seconds))} ms a burst)"
        )
    for row in record["rows"]:
        if "profile" in row:
            kinds = ", ".join(f"{name} {share:.0%}" for name, share in row["profile"]["kinds"].items())
            lines.append(
                f"{row['method']} at N = {format_count(row['n'])}, D = {row['d']}, {row['dtype']}: {kinds}{limits(row)}"
            )
    return [
        *lines,
        *kernel_choices(record["rows"]),
        "TFLOP/s credits every method with 4 units of 2*N*N*D FLOP; units: the matmuls it really did, all ranks together.",
        "Extra: peak memory beyond features and their gradients, of one rank. Error: largest relative distance of value and "
        "gradients from float64. How each is measured stands in the JSON.",
    ]


def limits(row: Row) -> str:
    """How near to the GEMM rate each half of our kernels' work comes, and what the device idled.

    Of the four units, two are in the score kernels (forward, and again backward) and two in the library's products (two gradients).
    """
    profile = row["profile"]
    if "score kernels" not in profile["kinds"] or "gemm_fraction" not in row:
        return ""
    rate = row["flops_per_s"] / row["gemm_fraction"]
    halves = [
        f"{name} at {row['counted_flops'] / 2 / (share * profile['total_s']) / rate:.0%}"
        for name in ("score kernels", "matrix products")
        if (share := profile["kinds"].get(name))
    ]
    return f"; {', '.join(halves)} of the GEMM rate; idle {1e3 * profile.get('idle_s', 0.0):.2g} ms"


def kernel_choices(rows: Sequence[Row]) -> list[str]:
    """What each choice of the kernels made otherwise gains over `triton` as it is."""
    plain = {
        _case(row): row["total_s"]["median"] for row in rows if row["method"] == "triton" and row["status"] == "ok"
    }
    lines = []
    for row in rows:
        if row["method"].startswith("triton-") and row["status"] == "ok" and _case(row) in plain:
            longer = row["total_s"]["median"] / plain[_case(row)] - 1
            how = f"{abs(longer):.1%} {'slower' if longer > 0 else 'faster'} than triton as it is"
            lines.append(f"{row['method']} at {_case(row)}: {how}")
    return lines


def _case(row: Row) -> str:
    return f"{format_count(row['n'])} x {row['d']} {row['dtype']}"


def targets(record: Row) -> list[str]:
    """Of one rank. On CUDA: share of the GEMM rate, speed beside inf-cl, memory at 1M; on a CPU: speed and memory beside ClipLoss."""
    rows = [row for row in record["rows"] if row["ranks"] == 1]
    ours = [row for row in rows if row["method"] == OURS]
    devices, lines = {row["device"] for row in rows}, []
    if "cuda" in devices:
        where = "N >= 64k, D = 768, bf16"
        large = [row for row in ours if row["n"] >= 2**16 and row["d"] == 768 and row["dtype"] == "bf16"]
        huge = [row | {"extra_gib": row.get("extra_bytes", 0) / 2**30} for row in ours if row["n"] >= 2**20]
        rate = Target(f"at least 75 % of the GEMM rate at 4 units ({where})", lambda x: x >= 0.75, "{:.1%}")
        speed = Target(f"at least 8 times as fast as inf-cl ({where})", lambda x: x >= 8)
        memory = Target("at most 2 GiB of extra memory (N >= 1M)", lambda x: x <= 2, "{:.2f} GiB")
        lines += [
            rate.judge(figures(large, _case, "gemm_fraction")),
            speed.judge(quotients(large, rows, "inf_cl", _case, "total_s.median")),
            memory.judge(figures(huge, _case, "extra_gib")),
        ]
    if "cpu" in devices:
        where = "N >= 16k, D = 512, on a CPU"
        large = [row for row in ours if row["n"] >= 2**14 and row["d"] == 512]
        speed = Target(f"at least 1.5 times as fast as ClipLoss ({where})", lambda x: x >= 1.5)
        memory = Target(f"at most a twentieth of ClipLoss's extra memory ({where})", lambda x: x >= 20, "1/{:.0f}")
        lines += [
            speed.judge(quotients(large, rows, "open_clip", _case, "total_s.median")),
            memory.judge(quotients(large, rows, "open_clip", _case, "extra_bytes")),
        ]
    return lines


def panels(record: Row) -> list[Curves | Bars]:
    """For each width and dtype time and memory against the batch, and forward and backward apart."""
    found: list[Curves | Bars] = []
    for d, dtype in dict.fromkeys((row["d"], row["dtype"]) for row in record["rows"]):
        rows = [row for row in record["rows"] if (row["d"], row["dtype"]) == (d, dtype)]
        names = list(dict.fromkeys(row["method"] for row in rows))
        ok = {name: [row for row in rows if row["method"] == name and row["status"] == "ok"] for name in names}
        full = {name: [r["n"] for r in rows if (r["method"], r["status"]) == (name, "out of memory")] for name in names}

        def times(key: str, heading: str) -> Curves:
            lines = {
                name: [(row["n"], *(1e3 * row[key][part] for part in ("median", "min", "max"))) for row in own]
                for name, own in ok.items()  # noqa: B023
            }
            return Curves(f"{heading}, ms (D = {d}, {dtype})", lines, full)  # noqa: B023

        memory = {name: [(row["n"], max(row["extra_bytes"], 2**16) / MIB) for row in own] for name, own in ok.items()}
        found += [
            times("total_s", "forward + backward"),
            Curves(f"extra memory, MiB (D = {d}, {dtype})", memory, full),
            times("forward_s", "forward"),
            times("backward_s", "backward"),
        ]
    return found


BENCHMARKS = {"loss": Benchmark(title, columns, notes, targets, panels, groups=CASE)}
