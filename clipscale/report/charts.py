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
    """Write the charts over the samples, two in a row, as PNG or PDF."""
    import matplotlib  # here: training starts a third of a second sooner
    from matplotlib.figure import Figure

    charts = charts_of(runs)
    rows = -(-len(charts) // 2)
    # Labels are data: a dollar sign is a dollar sign. Type 42: fonts that publishers accept.
    with matplotlib.rc_context({"text.parse_math": False, "pdf.fonttype": 42, "font.size": 8}):
        figure = Figure(figsize=(7, 1.9 * rows), layout="constrained")
        for chart, axes in zip(charts, figure.subplots(rows, 2, squeeze=False).flat):
            for number, run in enumerate(runs):
                (colour, _), dash = (FIGURES[kind][number % len(FIGURES[kind])] for kind in ("colours", "dashes"))
                _, samples, _, values = thinned(points(run, chart), 500).T
                axes.plot(samples, values, color=colour, linestyle=LINES[dash], linewidth=1, label=run.name)
            axes.set_title(", ".join(filter(None, (chart["title"], chart.get("unit")))), loc="left")
            axes.set_yscale("log" if chart.get("log") else "linear")
            axes.grid(color="0.9")
        if runs[1:]:
            figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
        figure.savefig(path, dpi=200)
