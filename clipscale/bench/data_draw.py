"""The data benchmark's picture: rates of one core and of the whole path, by source size."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from clipscale.bench.figures import processor
from clipscale.report.plots import COLOURS, STYLE

TITLES = {"decode": "pictures to pixels, one core", "stream": "shards to batches"}


def draw(record: dict[str, Any], path: Path) -> Figure:
    """Write the picture: a panel for each kind of rate, a group of bars for each source size."""
    rows, facts = record["rows"], record["machine"]
    kinds = [kind for kind in TITLES if any(row["kind"] == kind for row in rows)]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 3.8), layout="constrained")
        for axes, kind in zip(figure.subplots(1, max(1, len(kinds)), squeeze=False)[0], kinds):
            shown = [row for row in rows if row["kind"] == kind]
            sides = list(dict.fromkeys(row["side"] for row in shown))
            methods = list(dict.fromkeys(row["method"] for row in shown))
            width = 0.8 / len(methods)
            for i, method in enumerate(methods):
                own = [row for row in shown if row["method"] == method]
                places = [sides.index(row["side"]) + (i - (len(methods) - 1) / 2) * width for row in own]
                rates = [row["per_s"]["median"] for row in own]
                spans = [[rate - row["per_s"]["min"] for rate, row in zip(rates, own, strict=True)],
                         [row["per_s"]["max"] - rate for rate, row in zip(rates, own, strict=True)]]  # fmt: skip
                axes.bar(
                    places, rates, width, yerr=spans, color=COLOURS[i % len(COLOURS)], ecolor="#475569", label=method
                )
            axes.set_xticks(range(len(sides)), [str(side) for side in sides])
            axes.set_xlabel("side of the source, pixels")
            workers = f", {record['settings']['workers']} workers" if kind == "stream" else ""
            axes.set_title(f"{TITLES[kind]}{workers}: samples/s")
            axes.grid(axis="x", visible=False)
            axes.legend()
        side = record["settings"]["image_size"]
        figure.suptitle(f"{processor(facts)}, {side} pixels out", x=0.01, ha="left", fontsize=10)
        figure.savefig(path, dpi=120, facecolor="white", format="png")
    return figure
