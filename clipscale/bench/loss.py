"""`clipscale bench loss`: time, memory, matmuls, bytes and error of the loss's methods, as a table, JSON and a picture.

Letters: N pairs of all ranks (and as many columns: M = N), D feature width.
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from rich.console import Console

from clipscale.bench.draw import draw
from clipscale.bench.machine import asked, machine
from clipscale.bench.memory import HOW as MEMORY_HOW
from clipscale.bench.methods import DTYPES, Case, Method, chosen
from clipscale.bench.processes import Answer, run
from clipscale.bench.table import legend, table
from clipscale.bench.worker import Job, unit_flops
from clipscale.errors import UserError
from clipscale.report.table import plain_console
from clipscale.spelling import format_count, nearest, parse_count

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
    "gemm": "one torch.mm of square random matrices in each round, same dtype, all ranks at once",
    "memory": "forward: growth of the peak; backward: the same less the gradients of the features; the larger one; the most of any rank",
    "error": "largest relative distance of value and gradients from the float64 oracle on the same features",
    "sent": "bytes that a rank sends in one step, a collective counted as its ring algorithm",
}


@dataclass
class LossBenchSettings:
    """`clipscale bench loss`: the contrastive loss of clipscale and others, side by side."""

    n: str = "1k,2k,4k,8k"
    """Batches (pairs of all ranks), separated by commas."""
    d: str = "512"
    """Feature widths."""
    methods: str = "auto"
    """Presets (infcl, clip, ...), backends (tiled, dense, triton) and peers (open_clip, inf_cl, torch, compile)."""
    dtype: str = "fp32"
    """`fp32`, `bf16`, `fp16`, `tf32`."""
    device: str = "auto"
    """`auto` (CUDA where there is one), `cpu` or `cuda`."""
    ranks: int = 1
    """Processes that share the batch; with several, bytes on the wire are counted too."""
    repeats: int = 5
    """Measurements of each time."""
    scale: float = 100.0
    """Logit scale: 100 is where CLIP's training ends; the sigmoid preset keeps its own."""
    reference: int = 4096
    """Largest batch whose error against the float64 oracle is measured; 0: none."""
    out: str = "runs/bench"
    """Folder for loss-DEVICE.json and .png (loss-DEVICE-Pranks with several ranks); earlier ones are replaced."""


def main(settings: LossBenchSettings, console: Console | None = None) -> list[Row]:
    """Measure, print and save. Raises UserError for settings that cannot be."""
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
    for case in cases:
        answers = measured(case, methods, settings, console)
        rows, gemm = rows_of(case, methods, answers)
        record["rows"] += rows
        record["gemm"] += gemm
        record["load_average_after"] = _load()
        _write(path, record)  # case by case: what is stopped has the cases before
    console.print(table(record))
    for line in legend(record):
        console.print(line)
    picture = path.with_suffix(".png")
    draw(record, picture)
    console.print(f"\n{path}\n{picture}")
    return list(record["rows"])


def plan(settings: LossBenchSettings) -> tuple[list[Case], list[Method]]:
    """The cases and the methods of the settings. Raises UserError."""
    device = settings.device
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"device={device}: give auto, cpu or cuda")
    if device != "cpu" and torch.cuda.is_available():
        device = "cuda"
    elif device == "cuda":
        raise UserError("device=cuda: torch finds no CUDA device; use device=cpu")
    else:
        device = "cpu"
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
    sizes, widths = _counts("n", settings.n), _counts("d", settings.d)
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


def _counts(name: str, text: str) -> list[int]:
    try:
        counts = [parse_count(word) for word in text.split(",") if word.strip()]
    except ValueError as error:
        raise UserError(f"{name}={text}: {error}") from error
    if 0 in counts:
        raise UserError(f"{name}={text}: must be at least 1")
    return counts


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
    common: dict[str, Any] = {"repeats": settings.repeats, "reference": settings.reference}
    if case.device == "cpu":
        common["memory"] = int(MARGIN * psutil.virtual_memory().available / case.ranks)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        common["threads"] = max(1, cores // case.ranks) if case.ranks > 1 else None
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


def rows_of(
    case: Case, methods: Sequence[Method], answers: Iterator[list[Answer]] | list[list[Answer]]
) -> tuple[list[Row], list[Row]]:
    """One row for each method, and the GEMM measurement, from what the sets of processes answered."""
    found: dict[str, Row] = {}
    gemm: list[Row] = []
    where = {key: value for key, value in asdict(case).items() if key != "seed"}
    for one_set in answers:
        for name in one_set[0]["methods"]:
            found[name] = found.get(name, {}) | _joined([answer["methods"][name] for answer in one_set], case)
        seconds = [max(times) for times in zip(*(answer.get("gemm", {}).get("seconds", []) for answer in one_set))]
        if seconds:
            side = one_set[0]["gemm"]["side"]
            rate = case.ranks * 2.0 * side**3 / median(seconds)
            gemm.append(where | {"side": side, "seconds": seconds, "flops_per_s": rate})
    rows = []
    for method in methods:
        row: Row = where | {"method": method.name, "scale": method.scale or case.scale}
        obstacle = method.obstacle(case)
        if not method.installed:
            row |= {"status": "not installed", "reason": f"install {method.package}"}
        elif obstacle:
            row |= {"status": "not supported", "reason": obstacle}
        else:
            row |= found[method.name]
        if row["status"] == "ok":
            row["counted_flops"] = COUNTED_UNITS * unit_flops(case)
            row["flops_per_s"] = row["counted_flops"] / row["total_s"]["median"]
            row["gemm_fraction"] = row["flops_per_s"] / gemm[0]["flops_per_s"]
        rows.append(row)
    return rows, gemm


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
        joined |= {name: _spread(times) for name, times in passes.items()}
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
    return joined


def _spread(times: list[float]) -> dict[str, Any]:
    return {"median": median(times), "min": min(times), "max": max(times), "all": times}


def _load() -> float | None:
    """Processes that wanted a core, over the last minute."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _write(path: Path, record: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record | {"written": time.strftime("%Y-%m-%dT%H:%M:%S%z")}, indent=1) + "\n")
    part.rename(path)
