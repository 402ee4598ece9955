"""The step benchmark's picture: time relative to plain, and peak memory against batch at a fixed chunk."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

from clipscale.bench.figures import processor
from clipscale.bench.loss_draw import MARKS
from clipscale.report.plots import COLOURS, STYLE
from clipscale.units import format_count, parse_count


def draw(record: dict[str, Any], path: Path) -> Figure:
    """Write the picture: bars of time, curves of memory."""
    rows, settings, facts = record["rows"], record["settings"], record["machine"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 4.1), layout="constrained")
        times, memory = figure.subplots(1, 2)
        timed = [row for row in rows if row.get("ratio")][::-1]
        values = [row["ratio"]["median"] for row in timed]
        spans = [[v - r["ratio"]["min"], r["ratio"]["max"] - v] for v, r in zip(values, timed, strict=True)]
        times.barh([label(row, settings) for row in timed], values, color=COLOURS[0], height=0.6)
        if timed:
            middles = range(len(timed))
            times.errorbar(
                values, middles, xerr=list(zip(*spans, strict=True)), fmt="none", ecolor="#475569", elinewidth=1
            )
            for y, value in enumerate(values):
                times.annotate(
                    f"{value:.2f}", (0, y), xytext=(4, 0), textcoords="offset points", va="center", color="white"
                )
        times.axvline(1, color="#475569", linewidth=1)
        times.grid(axis="y", visible=False)
        times.set_title(f"seconds a sample relative to plain (batch {settings['batch']}, chunk {settings['chunk']})")
        curves = {name: memory_of(name, rows) for name in dict.fromkeys(row["method"] for row in rows)}
        curves = {name: found for name, found in curves.items() if len(found) > 1}
        sizes = sorted({batch for found in curves.values() for batch in found})
        for i, (name, found) in enumerate(curves.items()):
            points = sorted((batch, max(size, 2**16) / 2**20) for batch, size in found.items())
            look = {"color": COLOURS[i % len(COLOURS)], "marker": MARKS[i % len(MARKS)], "markersize": 4}
            memory.plot(*zip(*points, strict=True), label=name, **look)
        if curves:
            memory.legend()
            memory.set_xscale("log", base=2)
            memory.set_yscale("log", base=2)
            memory.xaxis.set_major_locator(FixedLocator(sizes))
            memory.xaxis.set_major_formatter(FuncFormatter(lambda n, _: format_count(round(n))))
            memory.xaxis.set_minor_formatter(NullFormatter())
            memory.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        memory.set_xlabel("batch, pairs")
        memory.set_title(f"peak memory of a step, MiB (chunk {settings['chunk']})")
        where = processor(facts, record["device"], record["threads"])
        title = f"model={settings['model']}, {settings['precision']}, {where}, torch {facts['versions']['torch']}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        figure.savefig(path, dpi=120, facecolor="white", format="png")
    return figure


def label(row: dict[str, Any], settings: dict[str, Any]) -> str:
    """The method, with its batch where that is one of its own."""
    own = format_count(row["batch"])
    return row["method"] if row["batch"] == parse_count(settings["batch"]) else f"{row['method']} at {own}"


def memory_of(name: str, rows: list[dict[str, Any]]) -> dict[int, int]:
    """Batch -> peak, of all rows of a method."""
    return {int(batch): size for row in rows if row["method"] == name for batch, size in row["memory"].items()}
