"""The charts of a report, and the points of their curves."""

from collections.abc import Sequence, Set
from typing import TypedDict

import numpy as np

from clipscale.log.table import FIGURES
from clipscale.tools.report.runs import Run

# A curve's columns by their names; None is a gap.
Columns = dict[str, list[float | None]]


class Curve(TypedDict):
    """A run's curve in a chart."""

    points: Columns
    means: Columns


class Chart(TypedDict, total=False):
    """A chart of the page: figures.yaml has those over a run, and what their keys mean."""

    key: str
    title: str
    unit: str
    per: float
    zero: bool
    gaps: bool
    # Whether it shows an evaluation.
    evaluation: bool
    # Whether a button shows it.
    more: bool
    # The curve of each run.
    runs: list[Curve]
    # Whether a curve has more than one point.
    drawn: bool


class Drawing(TypedDict):
    """The input of the page's script."""

    colours: list[str]
    dashes: list[str]
    charts: list[Chart]
    # The names of the runs.
    names: list[str]


# The columns of a curve.
AXES = ("step", "samples", "hours", "y")
# Points of a chart, about, over all its curves.
CHART_POINTS = 3000
# Charts of evaluations next to the loss.
FIRST_CHARTS = 4


def curves(runs: Sequence[Run]) -> Drawing:
    """The input of the page's script: `charts`, with the columns of each run's curve."""
    bins = max(100, CHART_POINTS // len(runs) // 2)

    def columns(table: np.ndarray) -> Columns:  # with seven digits; null is a gap
        values = [[None if v != v else float(f"{v:.7g}") for v in column] for column in table.T.tolist()]
        return dict(zip(AXES, values))

    charts = charts_of(runs)
    for chart in charts:
        tables = [points(run, chart) for run in runs]
        chart["runs"] = [
            {"points": columns(thinned_rows(table, bins)), "means": columns(bin_means(table, bins))} for table in tables
        ]
        chart["drawn"] = max(map(len, tables)) > 1  # one point is a number in cards and tables
    return {
        "colours": FIGURES["colours"],
        "dashes": FIGURES["dashes"],
        "charts": charts,
        "names": [run.name for run in runs],
    }


def charts_of(runs: Sequence[Run]) -> list[Chart]:
    """The charts that have something to show: the loss, the evaluation sets, then the others over the run."""
    rows = [row for run in runs for row in run.rows]
    keys = dict.fromkeys(key for row in rows for key, value in row.items() if value is not None)
    charts: list[Chart] = [{**chart} for chart in FIGURES["charts"] if chart["key"] in keys]
    batches = {record["batch"] for run in runs for record in run.records}
    title = loss_title(batches, {run.settings.get("loss.objective", "softmax") for run in runs})
    loss: list[Chart] = [{**chart, "title": title.capitalize()} for chart in charts[:1] if title]
    evaluation_charts = [evaluation_chart(key) for key in keys if key.startswith("eval/")]
    evaluations = [chart for chart in evaluation_charts if chart]
    for number, chart in enumerate(evaluations):
        chart["more"] = number >= FIRST_CHARTS
    return [*loss, *evaluations, *charts[1:]]


def loss_title(batches: Set[int], objectives: Set[str]) -> str:
    """The title of a chart of losses; empty if the losses cannot be compared.

    Softmax losses of different batches can be compared after subtracting ln(batch), the loss of a guess. Sigmoid losses
    cannot.
    """
    if len(batches) == 1:
        return "loss"
    return "" if "sigmoid" in objectives else "loss less ln(batch)"


def evaluation_chart(key: str) -> Chart | None:
    """The chart of `eval/SET/METRIC`; None for a metric that is not shown."""
    name, metric = key.removeprefix("eval/").rsplit("/", 1)
    chart: Chart = {"evaluation": True, "key": key}
    if metric not in FIGURES["plain"]:
        chart = {**chart, "unit": "%", "per": 0.01, "zero": True}
    title = FIGURES["evaluations"].get(metric)
    return {**chart, "title": f"{name}, {title}"} if title else None


def points(run: Run, chart: Chart) -> np.ndarray:
    """The rows that have the chart's field, N x AXES; a value that is not finite is NaN."""
    key = chart["key"]
    shown = [row for row in run.rows if row.get(key) is not None or (chart.get("gaps") and key in row)]
    rows = [[row[name] for name in (*AXES[:3], key)] for row in shown]
    table = np.array(rows, float).reshape(-1, 4) / [1, 1, 1, chart.get("per", 1)]
    if key == "loss" and "ln" in chart["title"]:
        table[:, 3] -= np.log([row["batch"] or 1 for row in shown])
    table[~np.isfinite(table[:, 3]), 3] = np.nan
    return table


def thinned_rows(table: np.ndarray, bins: int) -> np.ndarray:
    """The first and the last row, and the lowest, the highest and one gap of each bin, so that peaks stay."""
    if len(table) <= 2 * bins:
        return table
    kept = {0, len(table) - 1}
    y = table[:, 3]
    for rows in np.array_split(np.arange(len(table)), bins):
        gaps = rows[np.isnan(y[rows])]
        kept.update(gaps[:1])
        if len(gaps) < len(rows):
            kept.update((rows[np.nanargmin(y[rows])], rows[np.nanargmax(y[rows])]))
    return table[sorted(kept)]


def bin_means(table: np.ndarray, bins: int) -> np.ndarray:
    """The means of this many equal bins, without gaps."""
    finite = table[np.isfinite(table[:, 3])]
    return np.array([rows.mean(0) for rows in np.array_split(finite, bins) if len(rows)]).reshape(-1, 4)
