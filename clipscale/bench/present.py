"""Tables and pictures of records. A benchmark declares columns, notes, targets and panels; this module prints and draws them.

`python -m clipscale.bench.present RECORD.json ...` makes the table (.md) and the picture (.png) beside a record again, without measuring.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter
from rich.console import Console

from clipscale.bench import record as records
from clipscale.report.plots import COLOURS, STYLE
from clipscale.report.table import TextTable, plain_console
from clipscale.units import format_count

Row = dict[str, Any]

HOMES = {"loss": "loss", "step": "step", "data": "data", "runs": "fit", "largest": "largest"}
"""Benchmark, as a record names it -> the module that declares it in BENCHMARKS."""
MARKS = "os^Dv<>P"
GREY = "#475569"
MIB = 2**20


# ---- what a benchmark declares ----


def _look(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKS[number % len(MARKS)], "markersize": 4}


@dataclass(frozen=True)
class Column:
    """A column of the table."""

    head: str
    key: str
    """Of the row, dotted where it lies deeper: `total_s.median`."""
    form: Callable[[Any], str] = str
    words: bool = False
    """Flush left."""
    case: bool = False
    """Part of what was measured, which a row without figures has too."""


@dataclass(frozen=True)
class Curves:
    """A panel of one line for each name, through (x, y) or (x, y, low, high), the latter with a band."""

    title: str
    lines: Mapping[str, Sequence[tuple[float, ...]]]
    crosses: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Name -> where on the upper edge it is marked as out of memory."""
    base: float | None = 10
    """Of the y axis' logarithm; None: y is linear, and the points are not joined."""
    mark: float | None = None
    """Where on the x axis a dashed line stands."""

    height = 3.8
    """Inches."""

    def draw(self, axes: Axes) -> None:
        """Batches on a logarithmic x axis."""
        axes.set_xscale("log", base=2)
        for number, (name, points) in enumerate(self.lines.items()):
            look = _look(number)
            if points:
                x, y, *band = map(list, zip(*sorted(points)))
                axes.plot(x, y, label=name, linestyle="solid" if self.base else "none", **look)
                if band:
                    axes.fill_between(x, band[0], band[1], color=look["color"], alpha=0.15, linewidth=0)
            if full := self.crosses.get(name):
                look = {"color": look["color"], "marker": "x", "linestyle": "none"}
                axes.plot(full, [1] * len(full), clip_on=False, transform=axes.get_xaxis_transform(), **look)
                axes.plot([], [], label=f"{name}: out of memory", **look)
        if self.mark is not None:
            axes.axvline(self.mark, color=GREY, linewidth=1, linestyle="--", label="predicted")
        if self.base:
            axes.set_yscale("log", base=self.base)
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        else:
            axes.set_ylim(bottom=0)
        sizes = {point[0] for points in self.lines.values() for point in points}
        axes.xaxis.set_major_locator(FixedLocator(sorted(sizes | {x for full in self.crosses.values() for x in full})))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: format_count(round(n))))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("batch, pairs")
        axes.set_title(self.title)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()


@dataclass(frozen=True)
class Bars:
    """A panel of horizontal bars: for each group one of every series, as (value, low, high), (value,), or None for none."""

    title: str
    groups: Sequence[str]
    series: Mapping[str, Sequence[tuple[float, ...] | None]]
    texts: Sequence[str] = ()
    """What stands at the end of each group's bars."""
    log: bool = False
    mark: float | None = None
    """Where a line stands that values are compared with."""

    @property
    def height(self) -> float:
        """Inches."""
        return max(3.8, 0.8 + 0.24 * len(self.groups) * max(1, len(self.series)))

    def draw(self, axes: Axes) -> None:
        height = 0.8 / max(1, len(self.series))
        for number, (name, values) in enumerate(self.series.items()):
            middles = [group + (number - (len(self.series) - 1) / 2) * height for group in range(len(self.groups))]
            found = [(place, value) for place, value in zip(middles, values, strict=True) if value is not None]
            lengths = [value[0] for _, value in found]
            axes.barh([place for place, _ in found], lengths, height, color=COLOURS[number % len(COLOURS)], label=name)
            spans = [(place, *value) for place, value in found if len(value) > 1]
            for place, _, low, high in spans:
                axes.plot([low, high], [place, place], color=GREY, linewidth=1.2)
        for group, text in enumerate(self.texts):
            ends = [values[group] for values in self.series.values()]
            end = max((value[-1] for value in ends if value is not None), default=0.0)
            axes.annotate(text, (end, group), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7.5)
        if self.mark is not None:
            axes.axvline(self.mark, color=GREY, linewidth=1)
        if self.log:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}" if x >= 1 else f"{x:g}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.margins(x=0.25)
        axes.set_yticks(range(len(self.groups)), list(self.groups))
        axes.set_ylim(max(1, len(self.groups)) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        axes.set_title(self.title)
        if len(self.series) > 1:
            axes.legend()


@dataclass(frozen=True)
class Benchmark:
    """How a kind of record is shown."""

    title: Callable[[Row], str]
    columns: Callable[[Row], Sequence[Column]]
    notes: Callable[[Row], list[str]]
    """What the table does not show."""
    targets: Callable[[Row], list[str]]
    """The targets as lines: reached, missed, or not measured."""
    panels: Callable[[Row], list[Curves | Bars]]
    across: int = 2
    """Panels beside each other."""
    lines: Callable[[Row], list[Row]] = lambda record: list(record["rows"])
    """Rows of the table."""
    groups: Sequence[str] = ()
    """Rows that agree in these keys are set apart from others on the console."""


# ---- tables ----


def finish(record: Row, path: Path, console: Console | None = None) -> list[Row]:
    """Judge the targets, write the record, and show it. Returns its rows."""
    record["targets"] = benchmark_of(record).targets(record)
    records.write(path, record)
    show(record, path, console)
    return list(record["rows"])


def show(record: Row, path: Path, console: Console | None = None) -> None:
    """Print the table, the notes and the targets; put all of it (.md) and the picture (.png) beside the record at `path`."""
    shown, console = benchmark_of(record), console or plain_console()
    columns, notes = shown.columns(record), [*shown.notes(record), *shown.targets(record)]
    groups = [
        [cells(row, columns) for row in group]
        for _, group in groupby(shown.lines(record), key=lambda row: [row[key] for key in shown.groups])
    ]
    words = [column.head for column in columns if column.words]
    table = TextTable([column.head for column in columns], groups, shown.title(record), words)
    console.print(table, *notes, sep="\n")
    bullets = "\n".join(f"- {note}" for note in notes)
    text = f"# {table.title}\n\n{table.markdown()}\n\n{bullets}\n"
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    draw(record, path.with_suffix(".png"))
    console.print("", *(path.with_suffix(suffix) for suffix in (path.suffix, ".md", ".png")), sep="\n")


def cells(row: Row, columns: Sequence[Column]) -> list[str]:
    """A row as text. One that failed has its status in the first column that lacks a figure."""
    found, status = [], row.get("status", "ok")
    for column in columns:
        value = lookup(row, column.key)
        if value is None and status != "ok" and not column.case:
            found.append("" if status in found else status)
        else:
            found.append("-" if value is None else column.form(value))
    return found


def lookup(row: Row, key: str) -> Any:
    """The value under a dotted key; None where there is none."""
    value: Any = row
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def milliseconds(seconds: float) -> str:
    ms = 1e3 * seconds
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


def mebibytes(size: float) -> str:
    return f"{size / MIB:,.1f}"


def extent(form: Callable[[float], str]) -> Callable[[Mapping[str, float]], str]:
    """Least and most of a spread."""
    return lambda spread: f"{form(spread['min'])}-{form(spread['max'])}"


# ---- pictures ----


def draw(record: Row, path: Path) -> Figure:
    """Write the picture: the panels of the record in a grid."""
    shown = benchmark_of(record)
    panels = shown.panels(record)
    across = min(shown.across, max(1, len(panels)))
    rows = [panels[i : i + across] for i in range(0, len(panels), across)]
    heights = [max(panel.height for panel in row) for row in rows] or [Curves.height]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, sum(heights) + 0.3), layout="constrained")
        grid = figure.add_gridspec(len(heights), across, height_ratios=heights)
        for number, panel in enumerate(panels):
            panel.draw(figure.add_subplot(grid[number // across, number % across]))
        title = f"{shown.title(record)}, torch {record['machine']['versions']['torch']}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        figure.savefig(path, dpi=120, facecolor="white", format="png")
    return figure


# ---- from a record alone ----


def benchmark_of(record: Row) -> Benchmark:
    """What declares this record."""
    name = record["benchmark"]
    found: Benchmark = import_module(f"clipscale.bench.{HOMES[name]}").BENCHMARKS[name]
    return found


def main(paths: Sequence[str]) -> None:
    for path in map(Path, paths):
        show(json.loads(path.read_text()), path)


if __name__ == "__main__":
    main(sys.argv[1:])
