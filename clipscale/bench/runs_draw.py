"""The picture of predicted and measured memory: bytes by phase for every run, and below them their ratio with the bar's band."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from clipscale.bench.loss_draw import MARKS
from clipscale.bench.runs_table import where
from clipscale.bench.verdicts import TENTH
from clipscale.report.plots import COLOURS, STYLE

Row = dict[str, Any]

SIDES = {"predicted_bytes": ("predicted", "#93c5fd"), "measured_bytes": ("measured", COLOURS[0])}
MOST = 4
"""Runs beside each other."""


def draw(record: Row, path: Path) -> Figure:
    """Write the picture."""
    rows = [row for row in record["rows"] if row["status"] == "ok"]
    lines = -(-len(rows) // MOST) or 1
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 2.6 * lines + 3.4), layout="constrained")
        grid = figure.add_gridspec(lines + 1, min(MOST, max(1, len(rows))))
        first: Axes | None = None
        for number, row in enumerate(rows):
            axes = figure.add_subplot(grid[number // MOST, number % MOST], sharex=first, sharey=first)
            sizes(axes, row)
            axes.tick_params(labelleft=number % MOST == 0)
            first = first or axes
        if first:
            figure.legend(*first.get_legend_handles_labels(), loc="upper right", ncols=2)
        ratios(figure.add_subplot(grid[lines, :]), rows)
        title = f"memory of a step, {where(record)}, torch {record['machine']['versions']['torch']}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        figure.savefig(path, dpi=120, facecolor="white", format="png")
    return figure


def sizes(axes: Axes, row: Row) -> None:
    """Two bars for every phase of a run, and what the predicted is of the measured."""
    compared = row["predicted"]["compared"]
    for side, (key, (name, colour)) in enumerate(SIDES.items()):
        places = [i + 0.4 * (side - 0.5) for i, found in enumerate(compared.values()) if found[key]]
        lengths = [found[key] / 2**20 for found in compared.values() if found[key]]
        axes.barh(places, lengths, 0.4, color=colour, label=name)
    for place, found in enumerate(compared.values()):
        end = max(found["predicted_bytes"], found["measured_bytes"] or 0) / 2**20
        said = "not measured" if found["ratio"] is None else f"{found['ratio']:.2f}"
        axes.annotate(said, (end, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7.5)
    axes.set_xscale("log")
    axes.margins(x=0.25)
    axes.set_yticks(range(len(compared)), list(compared))
    axes.set_ylim(len(compared) - 0.5, -0.5)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}" if size >= 1 else f"{size:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", visible=False)
    axes.set_title(f"{row['run']}, MiB")


def ratios(axes: Axes, rows: list[Row]) -> None:
    """Predicted over measured by phase, a mark for each run, and the band that the bar allows."""
    phases = list(dict.fromkeys(phase for row in rows for phase in row["predicted"]["compared"]))
    axes.axhspan(1 - TENTH, 1 + TENTH, color="#dcfce7", zorder=0)
    axes.axhline(1, color="#475569", linewidth=1)
    most = 1.5 * TENTH
    for number, row in enumerate(rows):
        found = {p: f["ratio"] for p, f in row["predicted"]["compared"].items() if f["ratio"] is not None}
        shift = 0.5 * ((number + 0.5) / len(rows) - 0.5)
        look: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "marker": MARKS[number % len(MARKS)]}
        places = [phases.index(phase) + shift for phase in found]
        axes.plot(places, list(found.values()), linestyle="none", label=row["run"], **look)
        most = max([most, *(1.1 * abs(ratio - 1) for ratio in found.values())])
    axes.set_ylim(1 - min(most, 1), 1 + most)
    axes.set_xticks(range(len(phases)), phases)
    axes.set_xlim(-0.5, len(phases) - 0.5)
    axes.grid(axis="x", visible=False)
    axes.set_title(f"predicted over measured (green: the bar, within {TENTH:.0%})")
    if rows:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
