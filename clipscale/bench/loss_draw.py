"""The loss benchmark's picture: time and memory against batch, one line for each method."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

from clipscale.bench.figures import processor
from clipscale.report.plots import COLOURS, STYLE
from clipscale.units import format_count

Row = dict[str, Any]

MARKS = "os^Dv<>P"


def draw(record: dict[str, Any], path: Path) -> Figure:
    """Write the picture: for each width and dtype time and memory, and below them forward and backward apart."""
    rows: list[Row] = record["rows"]
    groups = list(dict.fromkeys((row["d"], row["dtype"]) for row in rows))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 7.2 * len(groups) + 0.5), layout="constrained")
        grid = figure.subplots(2 * len(groups), 2, squeeze=False)
        for (d, dtype), (times, memories), passes in zip(groups, grid[::2], grid[1::2]):
            shown = [row for row in rows if (row["d"], row["dtype"]) == (d, dtype)]
            named = zip(("total_s", "forward_s", "backward_s"), ("forward + backward", "forward", "backward"))
            for axes, (key, name) in zip((times, *passes), named):
                curves(axes, shown, lambda row, key=key: milliseconds(row[key]))  # type: ignore[misc]
                axes.set_title(f"{name}, ms (D = {d}, {dtype})")
            curves(memories, shown, lambda row: (max(row["extra_bytes"], 2**16) / 2**20,))
            memories.set_title(f"extra memory, MiB (D = {d}, {dtype})")
            memories.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
        figure.suptitle(title(record), x=0.01, ha="left", fontsize=10)
        figure.savefig(path, dpi=120, facecolor="white", format="png")
    return figure


def title(record: dict[str, Any]) -> str:
    facts, ranks = record["machine"], record["settings"]["ranks"]
    where = processor(facts, record["rows"][0]["device"])
    return f"{where}{f', {ranks} ranks' if ranks > 1 else ''}, torch {facts['versions']['torch']}"


def milliseconds(spread: dict[str, float]) -> tuple[float, float, float]:
    """Median, least and most."""
    return 1e3 * spread["median"], 1e3 * spread["min"], 1e3 * spread["max"]


def curves(axes: Axes, rows: list[Row], value: Callable[[Row], tuple[float, ...]]) -> None:
    """One line for each method through the first of a row's values, a band between the others; a cross on the upper edge where it ran out
    of memory."""
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
            y, *extent = zip(*map(value, found))
            axes.plot(x, y, label=name, **look)
            if extent:
                low, high = extent
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
