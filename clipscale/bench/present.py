"""Tables, targets and pictures of records. A benchmark declares columns, notes, targets and panels; this module prints and draws them.

`python -m clipscale.bench.present RECORD.json ...` makes the table (.md) and the picture (.png) beside a record again, without measuring.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import cycle, groupby
from math import nan
from pathlib import Path
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter
from rich.console import Console

from clipscale.common.units import format_count
from clipscale.report.plots import COLOURS, STYLE
from clipscale.report.table import TextTable, plain_console

Row = dict[str, Any]
Key = tuple[Any, ...]
Value = Mapping[str, float] | float | None
"""A figure, or the spread of one; None: not measured."""

LOOKS = cycler(color=COLOURS) + cycler(marker="os^Dv<>P")
MIB = 2**20


# ---- what a benchmark declares ----


@dataclass(frozen=True)
class Column:
    """A column of the table."""

    head: str
    key: str
    """Of the row, dotted for a nested value: `total_s.median`."""
    form: Callable[[Any], str] = str
    words: bool = False
    """Flush left."""
    case: bool = False
    """Part of what was measured, which a row without figures has too."""


@dataclass(frozen=True)
class Lines:
    """A panel of one line for each name, through (batch, value), on logarithmic axes."""

    title: str
    lines: Mapping[str, Sequence[tuple[int, Value]]]
    height = 3.8
    """Inches."""

    def draw(self, axes: Axes) -> None:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        for (name, points), look in zip(self.lines.items(), cycle(LOOKS)):
            batches = [batch for batch, _ in points]
            middles, errors = _spans([value for _, value in points])
            axes.errorbar(
                batches, middles, yerr=errors, label=name, markersize=4, color=look["color"], marker=look["marker"]
            )
        axes.xaxis.set_major_locator(FixedLocator(sorted({batch for line in self.lines.values() for batch, _ in line})))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda batch, _: format_count(round(batch))))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("batch, pairs")
        axes.set_title(self.title)
        if self.lines:
            axes.legend()


@dataclass(frozen=True)
class Bars:
    """A panel of horizontal bars: for each group one of every series."""

    title: str
    groups: Sequence[str]
    series: Mapping[str, Sequence[Value]]
    mark: float | None = None
    """A line that values are compared with."""

    @property
    def height(self) -> float:
        """Inches."""
        return max(3.8, 0.8 + 0.24 * len(self.groups) * len(self.series))

    def draw(self, axes: Axes) -> None:
        thick = 0.8 / max(1, len(self.series))
        for number, (name, values) in enumerate(self.series.items()):
            middles, errors = _spans(values)
            places = [group + (number - (len(self.series) - 1) / 2) * thick for group in range(len(values))]
            colour = COLOURS[number % len(COLOURS)]
            bars = axes.barh(places, middles, thick, xerr=errors, ecolor="#475569", color=colour, label=name)
            axes.bar_label(bars, fmt=lambda x: f"{x:,.0f}" if x >= 100 else f"{x:.3g}", padding=3, fontsize=7.5)
        if self.mark is not None:
            axes.axvline(self.mark, color="#475569", linewidth=1)
        axes.margins(x=0.15)
        axes.set_yticks(range(len(self.groups)), list(self.groups))
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_title(self.title)
        if len(self.series) > 1:
            axes.legend()


def _spans(values: Sequence[Value]) -> tuple[list[float], list[list[float]]]:
    """Middles, and how far below and above them the least and most lie."""
    spreads = [value if isinstance(value, Mapping) else dict.fromkeys(("median", "min", "max"), nan if value is None else value)
               for value in values]  # fmt: skip
    lows = [spread["median"] - spread["min"] for spread in spreads]
    return [s["median"] for s in spreads], [lows, [s["max"] - s["median"] for s in spreads]]


@dataclass(frozen=True)
class Benchmark:
    """How a kind of record is shown."""

    name: Sequence[str]
    """Keys of a row that name it. Rows that differ in any but the last are set apart on the console."""
    title: Callable[[Row], str]
    columns: Sequence[Column]
    targets: Callable[[Row], list[str]]
    """The targets as lines: reached, missed, or not measured."""
    panels: Callable[[Row], Sequence[Lines | Bars]]
    notes: Callable[[Row], list[str]] = lambda record: []
    """What the table does not show."""

    def key(self, row: Row) -> Key:
        return tuple(row[name] for name in self.name)


# ---- tables ----


def show(record: Row, path: Path, console: Console | None = None) -> None:
    """Print the table, the notes and the targets; put all of it (.md) and the picture (.png) beside the record at `path`."""
    shown, console = benchmark_of(record), console or plain_console()
    rows = record["rows"]
    first = next(column for column in shown.columns if not column.case)  # has the status of a row that failed
    columns = [c for c in shown.columns if c.case or c is first or any(lookup(row, c.key) is not None for row in rows)]
    notes = [f"{name}: {about}" for name, about in record.get("methods", {}).items()]
    notes += dict.fromkeys(
        f"{row[shown.name[-1]]}: {row['status']}: {row['reason']}" for row in rows if row.get("reason")
    )
    notes += [*shown.notes(record), *shown.targets(record)]
    groups = [[cells(row, columns) for row in group] for _, group in groupby(rows, lambda row: shown.key(row)[:-1])]
    table = TextTable([c.head for c in columns], groups, shown.title(record), [c.head for c in columns if c.words])
    console.print(table, *notes, sep="\n")
    bullets = "\n".join(f"- {note}" for note in notes)
    path.with_suffix(".md").write_text(f"# {table.title}\n\n{table.markdown()}\n\n{bullets}\n", encoding="utf-8")
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
    """The value under a dotted key; None if there is none."""
    value: Any = row
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def extent(form: Callable[[float], str]) -> Callable[[Mapping[str, float]], str]:
    """Least and most of a spread."""
    return lambda spread: f"{form(spread['min'])}-{form(spread['max'])}"


# ---- targets ----

Found = tuple[str, float | str]
"""What a figure is of, and the figure; or why there is none."""

WRONG = ("failed", "out of memory")
"""Statuses that miss a target. A row that lacks a figure for another reason is named and does not count."""


def judged(text: str, holds: Callable[[float], bool], found: Iterable[Found], form: str = "{:.2f}") -> str:
    """One line on a bound for every figure that is found: `reached`, `missed`, or `not measured`."""
    found = list(found)
    values = [value for _, value in found if not isinstance(value, str)]
    wrong = [value for _, value in found if value in WRONG]
    shown = ", ".join(f"{name} {value if isinstance(value, str) else form.format(value)}" for name, value in found)
    if not values and not wrong:
        return f"not measured: {text}: {shown or 'there are no such rows'}"
    return f"{'reached' if not wrong and all(map(holds, values)) else 'missed'}: {text}: {shown}"


def figures(rows: Iterable[Row], name: Callable[[Row], str], key: str) -> list[Found]:
    """The figure under a dotted key, or why a row has none."""

    def figure(row: Row) -> float | str:
        value = lookup(row, key)
        return str(row["status"]) if row["status"] != "ok" else "has no such figure" if value is None else float(value)

    return [(name(row), figure(row)) for row in rows]


# ---- pictures ----


def draw(record: Row, path: Path) -> Figure:
    """Write the picture: the panels of the record, two beside each other."""
    shown = benchmark_of(record)
    panels = shown.panels(record)
    heights = [max(panel.height for panel in panels[i : i + 2]) for i in range(0, len(panels), 2)] or [Lines.height]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, sum(heights) + 0.3), layout="constrained")
        grid = figure.add_gridspec(len(heights), min(2, max(1, len(panels))), height_ratios=heights)
        for number, panel in enumerate(panels):
            panel.draw(figure.add_subplot(grid[number // 2, number % 2]))
        title = f"{shown.title(record)}, torch {record['machine']['versions']['torch']}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        figure.savefig(path, dpi=120, facecolor="white", format="png")
    return figure


# ---- from a record alone ----


def benchmark_of(record: Row) -> Benchmark:
    """What the module of that name declares."""
    found: Benchmark = import_module(f"clipscale.bench.{record['benchmark']}").BENCHMARK
    return found


def main(paths: Sequence[str]) -> None:
    for path in map(Path, paths):
        show(json.loads(path.read_text()), path)


if __name__ == "__main__":
    main(sys.argv[1:])
