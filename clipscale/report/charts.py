"""The charts of runs: which there are, their curves, and all of them as a picture for papers."""

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml

from clipscale.common.errors import UserError
from clipscale.common.units import one_of
from clipscale.report.runs import Record, Run
from clipscale.report.table import FIGURES

Chart = dict[str, Any]
"""An entry of `charts` in figures.yaml."""
AXES = ("step", "samples", "hours", "y")
"""The columns of a curve."""
LINES = dict(zip(FIGURES["dashes"], ("-", "--", ":", "-.", (0, (8, 3)))))


def charts_of(runs: Sequence[Run], expected: str = "") -> list[Chart]:
    """The charts over the run that have something to show; those of evaluation sets come last.

    `expected` names the curve that `published` has behind that of ImageNet's top-1. Raises UserError.
    """
    keys = {key for run in runs for row in run.rows for key, value in row.items() if value is not None}
    charts = [chart for chart in FIGURES["charts"] if chart["key"] in keys]
    curves = yaml.safe_load(Path(__file__).with_name("expected.yaml").read_text(encoding="utf-8"))
    if expected and expected not in curves:
        raise UserError(f"expected={expected}: choose {one_of(curves)}")
    for key in sorted(key for key in keys if key.startswith("eval/")):
        name, metric = key.removeprefix("eval/").rsplit("/", 1)
        imagenet = metric == "top1" and re.match(r"imagenet[-_]?(1k|val)?( \(|$)", name, re.IGNORECASE)
        if title := FIGURES["evaluations"].get(metric):
            chart = {"key": key, "title": f"{name}, {title}", "unit": "%", "per": 0.01, "zero": True}
            charts.append(chart | ({"published": curves[expected]} if expected and imagenet else {}))
    return charts


def medians(records: Sequence[Record], bars: Chart) -> dict[str, float]:
    """Label of a bar -> the median of its field, where records have it."""
    columns = {label: [r[key] for r in records if r.get(key) is not None] for key, label in bars["fields"].items()}
    return {label: median(values) / bars.get("per", 1) for label, values in columns.items() if values}


def points(run: Run, chart: Chart) -> np.ndarray:
    """The rows that have the chart's field, N x AXES; a value that is not finite is NaN."""
    key, gaps = chart["key"], chart.get("gaps")
    shown = [row for row in run.rows if row.get(key) is not None or (gaps and key in row)]
    rows = [[row[name] for name in (*AXES[:3], key)] for row in shown]
    table = np.array(rows, float).reshape(-1, 4) / [1, 1, 1, chart.get("per", 1)]
    table[~np.isfinite(table[:, 3]), 3] = np.nan
    return table


def thinned(table: np.ndarray, parts: int) -> np.ndarray:
    """The first and the last row, and of each of so many parts the lowest, the highest and one gap: peaks stay."""
    if len(table) <= 2 * parts:
        return table
    kept, y = {0, len(table) - 1}, table[:, 3]
    for part in np.array_split(np.arange(len(table)), parts):
        finite, gaps = part[~np.isnan(y[part])], part[np.isnan(y[part])]
        kept.update(gaps[:1], finite[[y[finite].argmin(), y[finite].argmax()]] if len(finite) else ())
    return table[sorted(kept)]


def means(table: np.ndarray, parts: int) -> np.ndarray:
    """The means of so many equal parts, without gaps."""
    finite = table[np.isfinite(table[:, 3])]
    return np.array([part.mean(0) for part in np.array_split(finite, parts) if len(part)]).reshape(-1, 4)


def draw(runs: Sequence[Run], path: Path) -> None:
    """Write the charts over the samples, two in a row, as PNG or PDF: means, and what is lowest and highest, pale."""
    import matplotlib  # here: training starts a third of a second sooner
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    charts = charts_of(runs)
    rows = -(-len(charts) // 2)
    with matplotlib.rc_context({"pdf.fonttype": 42, "font.size": 7, "axes.titlesize": 7}):  # 42: as publishers want it
        figure = Figure(figsize=(7, 1.7 * rows + 0.15 * len(runs)), layout="constrained")
        places = figure.subplots(rows, 2, squeeze=False).flat
        for chart, axes in zip(charts, places):
            for number, run in enumerate(runs):
                (colour, _), dash = (FIGURES[kind][number % len(FIGURES[kind])] for kind in ("colours", "dashes"))
                table, line = points(run, chart), {"color": colour, "linewidth": 1}
                axes.plot(*means(table, 60)[:, [1, 3]].T, linestyle=LINES[dash], label=run.name, **line)
                axes.plot(*thinned(table, 300)[:, [1, 3]].T, alpha=0.25, **line)
            unit = chart.get("unit", "")
            axes.set_title(f"{chart['title']}{unit and ', '}{unit}", loc="left", parse_math=False)  # a $ is a $
            axes.set(xlabel="samples", yscale="log" if chart.get("log") else "linear")
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            axes.grid(color="0.9")
        for axes in places:
            axes.remove()
        if runs[1:]:
            legend = figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
            for text in legend.get_texts():
                text.set_parse_math(False)
        figure.savefig(path, dpi=200)
