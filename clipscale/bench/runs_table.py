"""Predicted and measured memory of runs as a table: a line for every phase of every run."""

from typing import Any

from clipscale.bench.figures import processor
from clipscale.bench.sheet import Sheet
from clipscale.bench.verdicts import TENTH

Row = dict[str, Any]

HEADS = ("run", "phase", "predicted MiB", "measured MiB", "ratio", "within 10 %")
LEFT = ("run", "phase", "within 10 %")


def table(record: Row) -> Sheet:
    """Runs without figures have one line that says why."""
    title = f"memory of a step, predicted by clipscale plan and measured, on {where(record)}"
    return Sheet(title, HEADS, LEFT, [lines(row) for row in record["rows"]])


def where(record: Row) -> str:
    machine = record["machine"]
    return processor(machine, "cuda" if machine["gpus"] else "cpu")


def lines(row: Row) -> list[list[str]]:
    """Of one run."""
    if row["status"] != "ok":
        return [[row["run"], row["status"]]]
    found = []
    for phase, sizes in row["predicted"]["compared"].items():
        ratio = sizes["ratio"]
        held = "-" if ratio is None else "yes" if abs(ratio - 1) <= TENTH else "no"
        shown = [_mib(sizes[f"{name}_bytes"]) for name in ("predicted", "measured")]
        found.append([row["run"], phase, *shown, "-" if ratio is None else f"{ratio:.3f}", held])
    return found


def legend(record: Row) -> list[str]:
    """What each run was, and how well it did where it was evaluated."""
    said = []
    for row in record["rows"]:
        what = " ".join(row["settings"])
        said.append(f"{row['run']}: {what}" + (f": {row['status']}: {row['reason']}" if row["status"] != "ok" else ""))
    said += [f"{row['run']}: {figures}" for row in record["rows"] for figures in evaluated(row)]
    return [
        *said,
        "Encode to optim: the peak of that part of the step beyond what was there before it. Peak: of the whole step. Host:",
        "resident memory of the process, which the bar leaves out. How each is measured stands in the JSON.",
    ]


def evaluated(row: Row) -> list[str]:
    """Of each evaluation set of the newest evaluation, the shares in per cent."""
    found = row.get("evaluated") or {"results": {}}
    sets = {
        name: {k: v for k, v in shares.items() if isinstance(v, float)} for name, shares in found["results"].items()
    }
    return [
        f"{name} at step {found['step']:,}: " + ", ".join(f"{key} {value:.1%}" for key, value in shares.items())
        for name, shares in sets.items()
    ]


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:,.1f}"
