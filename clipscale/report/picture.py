"""The charts of runs as a picture for papers."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from clipscale.report.charts import charts_of, points, published, thinned
from clipscale.report.runs import Run
from clipscale.report.table import FIGURES

STYLES = dict(zip(FIGURES["dashes"], ("-", "--", ":", "-.", (0, (8, 3)))))


def draw(runs: Sequence[Run], expected: str, path: Path) -> None:
    """Write the charts over the samples, two in a row, as PNG or PDF."""
    charts = charts_of(runs, expected)
    rows = -(-len(charts) // 2)
    # Labels are data: a dollar sign is a dollar sign. Type 42: fonts that publishers accept.
    with matplotlib.rc_context({"text.parse_math": False, "pdf.fonttype": 42, "font.size": 8}):
        figure = Figure(figsize=(7, 1.9 * rows), layout="constrained")
        for chart, axes in zip(charts, figure.subplots(rows, 2, squeeze=False).flat):
            if curve := published(expected, chart, runs[0]):
                axes.plot(curve["samples"], curve["y"], color="0.8", linewidth=3, label=curve["title"])
            for number, run in enumerate(runs):
                (colour, _), style = (FIGURES[kind][number % len(FIGURES[kind])] for kind in ("colours", "dashes"))
                _, samples, _, values = thinned(points(run, chart), 500).T
                axes.plot(samples, values, color=colour, linestyle=STYLES[style], linewidth=1, label=run.name)
            axes.set_title(", ".join(filter(None, (chart["title"], chart.get("unit")))), loc="left")
            axes.set_yscale("log" if chart.get("log") else "linear")
            axes.grid(color="0.9")
        handles = dict(zip(*reversed(axes.get_legend_handles_labels())))
        if len(handles) > 1:
            figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2, frameon=False)
        figure.savefig(path, dpi=200)
