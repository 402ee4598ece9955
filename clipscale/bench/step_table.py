"""The step benchmark's record as a table, with a legend."""

from typing import Any

from clipscale.bench.figures import processor
from clipscale.bench.sheet import Sheet
from clipscale.bench.verdicts import growths
from clipscale.units import format_count

HEADS = ("method", "batch", "samples/s", "step ms", "min-max", "to plain", "MFU", "peak MiB")


def table(record: dict[str, Any]) -> Sheet:
    """One line for each case."""
    settings, where = record["settings"], processor(record["machine"], record["device"], record["threads"])
    title = f"step in chunks of {settings['chunk']}, model={settings['model']}, {settings['precision']}, on {where}"
    return Sheet(title, HEADS, ("method",), [[cells(row) for row in record["rows"]]])


def cells(row: dict[str, Any]) -> list[str]:
    found = [row["method"], "max" if row["batch"] is None else format_count(row["batch"])]
    if "step_s" in row:
        times, relative = row["step_s"], row["ratio"]
        found += [f"{row['samples_per_s']:,.0f}", f"{1e3 * times['median']:,.0f}"]
        found += [
            f"{1e3 * times['min']:,.0f}-{1e3 * times['max']:,.0f}",
            f"{relative['median']:.2f}" if relative else "-",
            f"{row['mfu']:.1%}" if row.get("mfu") is not None else "-",
        ]
    else:
        found += [row["status"], "", "", "", ""]
    return [*found, "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:,.0f}"]


def legend(record: dict[str, Any]) -> list[str]:
    """What the table does not say for itself."""
    lines = [f"{name}: {about}" for name, about in record["methods"].items()]
    lines += [f"{row['case']}: {row['status']}: {row['reason']}" for row in record["rows"] if row["status"] != "ok"]
    lines += [
        f"{row['case']}: "
        + ", ".join(f"{size}: {found}" for size, found in row["tried"].items())
        + (" (more would take too long)" if "bound" in row else "")
        for row in record["rows"]
        if row.get("tried")
    ]
    lines += flatness(record["rows"])
    if record["pinned"] is False:
        lines.append(
            "The samples' host memory could not be page-locked: copies to the device were slower than they are in training."
        )
    lines.append(
        "To plain: seconds a sample, against what the method's kind has without the cache. Peak: growth during one step."
    )
    return lines


def flatness(rows: list[dict[str, Any]]) -> list[str]:
    """Of every method measured on a device at several batches: what its passes take beyond the features, and the loss a pair."""
    lines = []
    for method, least, most, passes in growths(rows):
        said = [
            f"{name} {min(sizes) / 2**20:,.0f} to {max(sizes) / 2**20:,.0f} MiB ({max(sizes) / min(sizes) - 1:.1%})"
            for name, sizes in passes.items()
        ]
        a_pair = most["parts"]["mem_loss_bytes"] / most["batch"]
        span = " to ".join(format_count(row["batch"]) for row in (least, most))
        lines.append(f"{method} from {span} pairs: {', '.join(said)}; the loss {a_pair:,.0f} bytes a pair")
    return lines
