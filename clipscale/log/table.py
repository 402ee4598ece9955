"""Tables of text for the console, and evaluation results in that form."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from clipscale.common import files
from clipscale.common.record import Results
from clipscale.common.terminal import clear
from clipscale.common.text import printable

# The names of a run's figures, and how they are shown.
FIGURES = files.read_yaml(Path(__file__).with_name("figures.yaml"))
TITLES = FIGURES["heads"]
# The first column is not wrapped up to this width: half of an 80-column terminal.
NAME_WIDTH = 40
# Columns of a file or a pipe: more than any line has.
MAX_WIDTH = 10_000


class TextTable(NamedTuple):
    """A table whose cells are text."""

    # If all are empty, there is no header line, and all columns are flush left. Otherwise all but the first are flush
    # right.
    heads: Sequence[str]
    # A row may end early.
    rows: Sequence[Sequence[str]]
    title: str = ""


def show(*tables: TextTable) -> None:
    """Print tables at a terminal's own width, or into a file so wide that nothing is cut.

    Lines in a file end without blanks. Markup is printed as it is. NO_COLOR also turns bold off.
    """
    clear()
    colours: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    console = Console(highlight=False, emoji=False, markup=False, color_system=colours)
    if not console.is_terminal:
        console.width = MAX_WIDTH
    with console.capture() as printed:
        for table in tables:
            if table.title:
                console.print(printable(table.title))
            console.print(_laid_out(table))
    for line in printed.get().splitlines():
        print(line.rstrip())


def _laid_out(text: TextTable) -> Table:
    titled = any(text.heads)
    names = max((len(row[0]) for row in text.rows), default=0)
    table = Table(box=SIMPLE_HEAD if titled else None, show_header=titled, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(printable(text.heads[0]), no_wrap=names <= NAME_WIDTH, overflow="fold")
    for head in text.heads[1:]:
        table.add_column(printable(head), justify="right" if titled else "left", overflow="fold")
    for row in text.rows:
        table.add_row(*map(printable, row))
    return table


def with_start(results: Results, start: Results) -> Results:
    """Three lines (start, end, difference) for each set that was also measured before the first step."""
    lines: Results = {}
    for name, end in results.items():
        first = start.get(name, {})
        if first.keys() == end.keys():
            lines |= {f"{name}, start": first, f"{name}, end": end}
            lines[f"{name}, difference"] = {metric: end[metric] - first[metric] for metric in end}
        else:
            lines[name] = end
    return lines


def result_tables(results: Results, title: str = "") -> list[TextTable]:
    """One table for each group of evaluation sets that share their metrics; fractions in per cent."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, result in results.items():
        metrics = tuple(metric for metric in {**TITLES, **result} if metric in result)
        groups.setdefault(metrics, []).append(name)
    tables: list[TextTable] = []
    for metrics, names in groups.items():
        # The count of samples that are left out has no column if all are 0.
        columns = [metric for metric in metrics if metric != "broken" or any(results[name][metric] for name in names)]
        rows = [[name, *(_cell(column, results[name][column]) for column in columns)] for name in names]
        heads = ["set", *(TITLES.get(column, column) for column in columns)]
        tables.append(TextTable(heads, rows, "" if tables else title))
    return tables


def print_results(results: Results, title: str) -> None:
    """Print evaluation results as tables."""
    show(*result_tables(results, title))


def _cell(metric: str, value: float) -> str:
    plain = FIGURES["plain"].get(metric)
    return plain.format(value) if plain else f"{100 * value:z.1f}"
