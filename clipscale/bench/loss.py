"""`clipscale bench loss`: time, memory, matmuls, bytes and error of the loss's methods, as a table, JSON and a picture.

Letters: N pairs of all ranks (and as many columns: M = N), D feature width.
"""

import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from rich.console import Console

from clipscale.bench import processes
from clipscale.bench.figures import counts, device_of, spread
from clipscale.bench.loss_draw import draw
from clipscale.bench.loss_methods import DTYPES, Case, Method, chosen
from clipscale.bench.loss_table import legend, table
from clipscale.bench.loss_work import Job, unit_flops
from clipscale.bench.machine import asked, machine
from clipscale.bench.memory import HOW as MEMORY_HOW
from clipscale.bench.processes import RETURNING_MALLOC, Answer, Ended
from clipscale.bench.records import earlier, settled, write
from clipscale.bench.sheet import publish
from clipscale.bench.verdicts import of_choices, of_loss
from clipscale.config.tools import LossBenchSettings
from clipscale.errors import UserError
from clipscale.hardware import cores
from clipscale.report.table import plain_console
from clipscale.units import format_count, nearest

Row = dict[str, Any]

COUNTED_UNITS = 4
"""The work every method is credited with, in units of 2 N M D FLOP: scores forward; scores again and two gradients backward."""
MARGIN = 0.95
"""Part of the free memory that a measurement on the CPU may take."""
HOW = {
    "time": "wall clock with the device waited for; methods in turns, every second round backwards, after a round that is not counted; "
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
    start = time.monotonic()
    console = console or plain_console()
    cases, methods = plan(settings)
    out = Path(settings.out).expanduser()
    out.mkdir(parents=True, exist_ok=True)
    ranks = f"-{settings.ranks}ranks" if settings.ranks > 1 else ""
    path = out / f"loss-{cases[0].device}{ranks}.json"
    record: dict[str, Any] = {
        "benchmark": "loss",
        "settings": asked(settings),
        "machine": machine("bench loss", settings),
        "how": HOW | {"memory_source": MEMORY_HOW[cases[0].device]},
        "methods": {method.name: method.about for method in methods},
        "load_average_before": _load(),
        "gemm": [],
        "rows": [],
    }
    before = earlier(path, record) if settings.resume else {}
    kept: list[Row] = before.get("rows", [])
    record |= {"gemm": before.get("gemm", []), "methods": before.get("methods", {}) | record["methods"]}
    end = start + settings.seconds if settings.seconds else math.inf
    fresh: list[Row] = []
    for case in sorted(cases, key=unit_flops):
        done = {row["method"] for row in kept if is_of(row, case) and settled(row)}
        todo = [method for method in methods if method.name not in done]
        again = {method.name for method in todo}
        kept = [row for row in kept if not (is_of(row, case) and row["method"] in again)]
        repeats, late = affordable(case, todo, [*kept, *fresh], end - time.monotonic(), settings.repeats)
        timely = [method for method in todo if method.name not in late]
        answers: list[list[Answer]] = []
        rows, gemm = rows_of(case, todo, answers, late)
        for answer in measured(case, timely, replace(settings, repeats=repeats), console):
            answers.append(answer)
            rows, gemm = rows_of(case, todo, answers, late)
            record |= {"rows": ordered([*kept, *fresh, *rows], cases, methods), "load_average_after": _load()}
            write(path, record | {"gemm": record["gemm"] + gemm})  # set by set: what is stopped has what is before
        fresh += rows
        record["gemm"] += gemm
    record["rows"] = ordered([*kept, *fresh], cases, methods)
    record["verdicts"] = [*of_loss(record["rows"]), *of_choices(record["rows"])]
    write(path, record)
    present(record, path, console)
    return list(record["rows"])


def present(record: Row, path: Path, console: Console) -> None:
    """Table and picture of the record at `path`, printed and beside it."""
    publish(table(record), [*legend(record), *record["verdicts"]], path, partial(draw, record), console)


def is_of(row: Row, case: Case) -> bool:
    return all(row[key] == getattr(case, key) for key in ("n", "d", "dtype"))


def ordered(rows: list[Row], cases: list[Case], methods: Sequence[Method]) -> list[Row]:
    """Case by case and method by method as they were asked for; rows of an earlier run that were not asked for again come first."""
    places = {(case.n, case.d, case.dtype, m.name): i for i, (case, m) in enumerate(product(cases, methods))}
    return sorted(rows, key=lambda row: places.get((row["n"], row["d"], row["dtype"], row["method"]), -1))


def affordable(
    case: Case, methods: Sequence[Method], rows: Sequence[Row], left: float, repeats: int
) -> tuple[int, dict[str, str]]:
    """How many rounds there is time for, at least one, and for which methods there is none: their reasons by name.

    A step is expected to take what it took in the largest case of the same method and type so far, times the ratio of the work. A
    case takes `repeats` + 3 steps of each (memory, matmuls or profile, a warm-up), and half of the time left at most, unless one round
    needs more.
    """
    if math.isinf(left):
        return repeats, {}
    steps: dict[str, float] = {}
    for method in methods:
        known = [r for r in rows if (r["method"], r["dtype"], r["status"]) == (method.name, case.dtype, "ok")]
        nearest_row = max(known, key=lambda r: r["counted_flops"], default=None)
        if nearest_row is not None:
            steps[method.name] = nearest_row["total_s"]["median"] * case_flops(case) / nearest_row["counted_flops"]
    late: dict[str, str] = {}
    for name, seconds in sorted(steps.items(), key=lambda entry: -entry[1]):
        if 4 * sum(s for n, s in steps.items() if n not in late) > left:
            late[name] = f"a step would take about {seconds:.3g} s, by a smaller case; {max(0.0, left):.0f} s were left"
    if left <= 0:
        late |= {method.name: "no time was left" for method in methods if method.name not in late}
    whole = sum(seconds for name, seconds in steps.items() if name not in late)
    rounds = repeats if not whole else max(1, min(repeats, int(left / 2 / whole) - 3))
    return rounds, late


def plan(settings: LossBenchSettings) -> tuple[list[Case], list[Method]]:
    """The cases and the methods of the settings. Raises UserError."""
    device = device_of(settings.device)
    for name, least in (("ranks", 1), ("repeats", 1), ("reference", 0)):
        if getattr(settings, name) < least:
            raise UserError(f"{name}={getattr(settings, name)}: must be at least {least}")
    if not settings.scale > 0:
        raise UserError(f"scale={settings.scale:g}: must be positive; it is the multiplier, not its logarithm")
    if device == "cuda" and settings.ranks > torch.cuda.device_count():
        raise UserError(f"ranks={settings.ranks}: there are {torch.cuda.device_count()} CUDA devices; use fewer ranks")
    dtypes = [word.strip() for word in settings.dtype.split(",") if word.strip()]
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
    cases = [
        Case(n, d, dtype, device, settings.ranks, settings.scale) for dtype in dtypes for d in widths for n in sizes
    ]
    return cases, methods


# ---- measuring ----


def measured(
    case: Case, methods: Sequence[Method], settings: LossBenchSettings, console: Console
) -> Iterator[list[Answer]]:
    """The answers of each set of processes that the case needs.

    On the CPU, and on several ranks, memory takes a set of its own for each method, so that one method's peak or failure is not the
    next one's. Time takes one set for all, so that methods alternate.
    """
    able = [m.name for m in methods if m.installed and m.obstacle(case) is None]
    if not able:
        return
    apart = case.device == "cpu" or case.ranks > 1
    common: dict[str, Any] = {"repeats": settings.repeats, "reference": settings.reference, "profile": settings.profile}
    if case.device == "cpu":
        common["memory"] = int(MARGIN * psutil.virtual_memory().available / case.ranks)
        common["threads"] = max(1, cores() // case.ranks) if case.ranks > 1 else None
    where = f"N={format_count(case.n)} D={case.d} {case.dtype}"
    with console.status(where) as status:
        failed = set()
        for name in able if apart else []:
            status.update(f"{where}: memory of {name}")
            answers = run(Job(case, probed=[name], **common))
            failed |= {name for answer in answers if answer["methods"][name]["status"] != "ok"}
            yield answers
        status.update(f"{where}: time")
        timed = [name for name in able if name not in failed]
        if timed:
            yield run(Job(case, probed=[] if apart else able, timed=timed, **common))


def run(job: Job) -> list[Answer]:
    """The answers of all ranks that gave one, in rank order; for a process that ended without one, why every method failed there."""
    variables = RETURNING_MALLOC if job.probed and job.case.device == "cpu" else {}
    ended = processes.run("clipscale.bench.loss_work", asdict(job), ranks=job.case.ranks, variables=variables)
    return [one.answer or silent(job, one) for one in ended if one.answer or one.status is not None]


def silent(job: Job, ended: Ended) -> Answer:
    """The answer of a process that left none."""
    status, reason = ended.cause
    found = {"status": status, "reason": reason, "traceback": ended.said[-5000:]}
    return {"methods": {name: dict(found) for name in dict.fromkeys(job.probed + job.timed)}}


def rows_of(
    case: Case, methods: Sequence[Method], answers: list[list[Answer]], late: dict[str, str] | None = None
) -> tuple[list[Row], list[Row]]:
    """One row for each method, and the GEMM measurement, from what the sets of processes answered; `late`: why some were not asked."""
    found: dict[str, Row] = {}
    gemm: list[Row] = []
    where = asdict(case)
    for one_set in answers:
        for name in one_set[0]["methods"]:
            found[name] = found.get(name, {}) | _joined([answer["methods"][name] for answer in one_set], case)
        seconds = [max(times) for times in zip(*(answer.get("gemm", {}).get("seconds", []) for answer in one_set))]
        if seconds:
            burst = one_set[0]["gemm"]
            flop, panel = case.ranks * burst["products"] * 2.0, burst["panel"]
            square = {"side": burst["side"], "products": burst["products"], "seconds": seconds}
            square |= rates(flop * burst["side"] ** 3, seconds)
            panel |= rates(flop * panel["rows"] ** 2 * panel["width"], panel["seconds"])
            gemm.append(where | square | {"panel": panel})
    rows = []
    for method in methods:
        row: Row = where | {"method": method.name, "scale": method.scale or case.scale}
        obstacle = method.obstacle(case)
        if not method.installed:
            row |= {"status": "not installed", "reason": f"install {method.package}"}
        elif obstacle:
            row |= {"status": "not supported", "reason": obstacle}
        elif method.name in (late or {}):
            row |= {"status": "not run", "reason": (late or {})[method.name]}
        else:
            row |= found.get(method.name, {"status": "not run", "reason": "its turn did not come"})
        if row["status"] == "ok" and "total_s" not in row:
            row |= {"status": "not run", "reason": "its time was not measured: the run was stopped"}
        if row["status"] == "ok":
            row["counted_flops"] = case_flops(case)
            row["flops_per_s"] = row["counted_flops"] / row["total_s"]["median"]
            row["gemm_fraction"] = row["flops_per_s"] / gemm[0]["flops_per_s"]
        rows.append(row)
    return rows, gemm


def rates(flop: float, seconds: list[float]) -> Row:
    """Of bursts of so many operations."""
    return {"flops_per_s": flop / median(seconds), "best_flops_per_s": flop / min(seconds)}


def case_flops(case: Case) -> float:
    """What every method is credited with."""
    return COUNTED_UNITS * unit_flops(case)


def _joined(ranks: list[Row], case: Case) -> Row:
    """One method's record from those of all ranks: the slowest time, the largest memory, bytes and error, all matmuls together."""
    wrong = next((rank for rank in ranks if rank["status"] != "ok"), None)
    if wrong is not None:
        return {key: wrong[key] for key in ("status", "reason", "traceback")}
    joined: Row = {"status": "ok"}
    if "forward_s" in ranks[0]:
        passes = {
            name: [max(times) for times in zip(*(rank[name] for rank in ranks))] for name in ("forward_s", "backward_s")
        }
        whole = [[f + b for f, b in zip(rank["forward_s"], rank["backward_s"])] for rank in ranks]
        passes["total_s"] = [max(times) for times in zip(*whole)]
        joined |= {name: spread(times) for name, times in passes.items()}
    if "extra_bytes" in ranks[0]:
        for name in ("growth_bytes", "extra_bytes", "sent_bytes", "error"):
            known = [rank[name] for rank in ranks if rank[name] is not None]
            joined[name] = max(known, default=None)
        joined["errors"] = ranks[0]["errors"] and {
            name: max(rank["errors"].get(name, 0.0) for rank in ranks) for name in ranks[0]["errors"]
        }
        joined["units"] = None if ranks[0]["units"] is None else sum(rank["units"] for rank in ranks)
        sent = joined["sent_bytes"]
        joined["sent_per_feature"] = None if sent is None else sent / (case.n * case.d)
    if "profile" in ranks[0]:
        joined["profile"] = ranks[0]["profile"]
    return joined


def _load() -> float | None:
    """Processes that wanted a core, over the last minute."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
