"""The loss benchmark's picture: time and memory against batch, one line for each method."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

from clipscale.report.plots import COLOURS, STYLE
from clipscale.spelling import format_count

Row = dict[str, Any]

MARKS = "os^Dv<>P"


def draw(record: dict[str, Any], path: Path) -> Figure:
    """Write the picture: a line of two panels for each width and dtype."""
    rows: list[Row] = record["rows"]
    groups = list(dict.fromkeys((row["d"], row["dtype"]) for row in rows))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 3.6 * len(groups) + 0.5), layout="constrained")
        grid = figure.subplots(len(groups), 2, squeeze=False)
        for (d, dtype), (times, memories) in zip(groups, grid):
            shown = [row for row in rows if (row["d"], row["dtype"]) == (d, dtype)]
            curves(times, shown, lambda row: 1e3 * row["total_s"]["median"], _range)
            curves(memories, shown, lambda row: max(row["extra_bytes"], 2**16) / 2**20, None)
            times.set_title(f"forward + backward, ms (D = {d}, {dtype})")
            memories.set_title(f"extra memory, MiB (D = {d}, {dtype})")
            memories.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
        figure.suptitle(title(record), x=0.01, ha="left", fontsize=10)
        figure.savefig(path, dpi=120, facecolor="white", format="png")
    return figure


def title(record: dict[str, Any]) -> str:
    facts, ranks = record["machine"], record["settings"]["ranks"]
    processor = facts["gpus"][0] if record["rows"][0]["device"] == "cuda" else f"{facts['cpu']}, {facts['cpus']} cores"
    return f"{processor}{f', {ranks} ranks' if ranks > 1 else ''}, torch {facts['versions']['torch']}"


def _range(row: Row) -> tuple[float, float]:
    return 1e3 * row["total_s"]["min"], 1e3 * row["total_s"]["max"]


def curves(axes: Axes, rows: list[Row], value: Any, extent: Any) -> None:
    """One line for each method; a cross on the upper edge where it ran out of memory."""
    names = list(dict.fromkeys(row["method"] for row in rows))
    sizes = sorted({row["n"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for position, name in enumerate(names):
        look: dict[str, Any] = {
            "color": COLOURS[position % len(COLOURS)],
            "marker": MARKS[position % len(MARKS)],
            "markersize": 4,
        }
        found = [row for row in rows if row["method"] == name and row["status"] == "ok"]
        if found:
            x = [row["n"] for row in found]
            axes.plot(x, [value(row) for row in found], label=name, **look)
            if extent is not None:
                low, high = zip(*map(extent, found))
                axes.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)
        full = [row["n"] for row in rows if row["method"] == name and row["status"] == "out of memory"]
        if full:
            axes.plot(
                full, [1] * len(full), "x", color=look["color"], clip_on=False, transform=axes.get_xaxis_transform()
            )
            axes.plot([], [], "x", color=look["color"], label=f"{name}: out of memory")
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: format_count(round(n))))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.set_xlabel("batch, pairs")
