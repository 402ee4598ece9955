"""The charts of a report, which figures.yaml lists, and the curves of runs in them."""

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
AXES = ("step", "samples", "hours", "y")
"""The columns of a curve."""
IMAGENET = re.compile(r"eval/imagenet[-_]?(1k|val)?( \(.*\))?/top1", re.IGNORECASE)


def charts_of(runs: Sequence[Run], expected: str = "") -> list[Chart]:
    """The charts over the run that have something to show; those of evaluation sets come last."""
    keys = {key for run in runs for key in run.keys}
    if expected and not any(map(IMAGENET.fullmatch, keys)):
        keys.add("eval/imagenet1k/top1")
    charts = [chart for chart in FIGURES["charts"] if chart["key"] in keys]
    for key in sorted(key for key in keys if key.startswith("eval/")):
        name, metric = key.removeprefix("eval/").rsplit("/", 1)
        if title := FIGURES["evaluations"].get(metric):
            charts.append({"key": key, "title": f"{name}, {title}", "unit": "%", "per": 0.01, "zero": True})
    return charts


def medians(records: Sequence[Record], bars: Chart) -> dict[str, float]:
    """Label of a bar -> the median of its field, where records have it."""
    columns = {label: [r[key] for r in records if r.get(key) is not None] for key, label in bars["fields"].items()}
    return {label: median(values) / bars.get("per", 1) for label, values in columns.items() if values}


def points(run: Run, chart: Chart) -> np.ndarray:
    """The rows that have the chart's field, N x AXES; a value that is not finite is NaN."""
    rows = [[r["step"], r["samples"], r["hours"], r[chart["key"]]] for r in run.rows if r.get(chart["key"]) is not None]
    table = np.array(rows, float).reshape(-1, 4) / [1, 1, 1, chart.get("per", 1)]
    table[~np.isfinite(table[:, 3]), 3] = np.nan
    return table


def thinned(table: np.ndarray, parts: int) -> np.ndarray:
    """The first and the last row, and of each of so many parts the lowest, the highest and one gap: peaks stay."""
    kept = {0, len(table) - 1}
    for part in np.array_split(np.arange(len(table)), parts) if len(table) > 2 * parts else []:
        finite, gaps = part[~np.isnan(table[part, 3])], part[np.isnan(table[part, 3])]
        kept |= {finite[table[finite, 3].argmin()], finite[table[finite, 3].argmax()]} if len(finite) else set()
        kept |= {*gaps[:1]}
    return table[sorted(kept)] if len(table) > 2 * parts else table


def means(table: np.ndarray, parts: int) -> np.ndarray:
    """The means of so many equal parts, without gaps."""
    finite = table[np.isfinite(table[:, 3])]
    return np.array([part.mean(0) for part in np.array_split(finite, parts) if len(part)]).reshape(-1, 4)


def published(name: str, chart: Chart, run: Run) -> Record | None:
    """The published curve of this name, in the chart of ImageNet's top-1, at the run's steps and hours per sample.

    `behind`: points below its end half-way. Raises UserError for an unknown name.
    """
    if not name or not IMAGENET.fullmatch(chart["key"]):
        return None
    curves = yaml.safe_load(Path(__file__).with_name("expected.yaml").read_text(encoding="utf-8"))
    if name not in curves:
        raise UserError(f"expected={name}: choose {one_of(curves)}")
    curve, last = curves[name], run.rows[-1]
    samples = [curve["samples_per_epoch"] * epoch for epoch in curve["top1"]]
    scaled = {axis: [last[axis] / last["samples"] * count for count in samples] for axis in AXES[:3]}
    y = [100 * value for value in curve["top1"].values()]
    return curve | scaled | {"y": y, "behind": round(y[-1] - 100 * curve["top1"][max(curve["top1"]) // 2], 1)}
