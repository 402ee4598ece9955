"""The report's picture: curves of loss, evaluation, throughput and memory, and images retrieved for a few captions."""

import itertools
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from clipscale.common.terminal import printable
from clipscale.report.evaluations import read_galleries

Record = dict[str, Any]

GIB = 2**30
COLOURS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#0891b2", "#be123c", "#ca8a04", "#475569")
DASHES = ("-", "--", ":", "-.")
"""Line styles of evaluation curves: one for each round of the eight colours."""
RIGHT, WRONG = "#16a34a", "#d1d5db"
STYLE: Any = {
    "agg.path.chunksize": 10_000,  # curves of a million steps
    "text.parse_math": False,  # captions are data: a dollar sign is a dollar sign
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9ca3af",
    "axes.grid": True,
    "grid.color": "#e5e7eb",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
}
PLOTTED = {"top1": "top-1", "image_to_text_r1": "image→text R@1", "text_to_image_r1": "text→image R@1"}
"""Evaluation metrics that have a curve; the page's tables show all of them."""
LEGEND_ROWS = 8
"""Curves in one column of a legend: they fill half of a plot's height."""


def draw(run_dir: Path, records: Sequence[Record], evaluations: Sequence[Record]) -> Figure:
    """Four plots, and below them a gallery of retrieved images for each retrieval set (two at most)."""
    galleries = read_galleries(run_dir, 2)
    heights = [2.9, 2.9, *(0.5 + 1.14 * math.ceil(len(record["rows"]) / 2) for record, _ in galleries)]
    figure = Figure(figsize=(11, sum(heights) + 0.6), layout="constrained")
    parts = figure.subfigures(len(heights) - 1, 1, height_ratios=[sum(heights[:2]), *heights[2:]], squeeze=False)[:, 0]
    (loss, quality), (speed, memory) = parts[0].subplots(2, 2)
    parts[0].suptitle(printable(run_dir.resolve().name), x=0.01, ha="left", fontsize=13, fontweight="bold")
    draw_loss(loss, records)
    draw_quality(quality, evaluations, records[-1]["step"])
    draw_speed(speed, records)
    draw_memory(memory, records)
    for part, (record, images) in zip(parts[1:], galleries):
        draw_gallery(part, record, images)
    return figure


# ---- curves ----


def smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the `window` values around each one, of fewer at the ends. Ignores values that are not finite."""
    width = min(2 * (window // 2) + 1, 2 * len(values) - 1)
    finite = np.isfinite(values)
    total = np.cumsum(np.concatenate([[0.0], np.where(finite, values, 0.0)]))
    count = np.cumsum(np.concatenate([[0], finite]))
    first = np.maximum(np.arange(len(values)) - width // 2, 0)
    last = np.minimum(np.arange(len(values)) + width // 2 + 1, len(values))
    with np.errstate(invalid="ignore"):
        return (total[last] - total[first]) / (count[last] - count[first])


def curve(records: Sequence[Record], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a field, from the records that have it. What is not finite is shown as a gap."""
    points = [(r["step"], r[name]) for r in records if isinstance(r.get(name), int | float)]
    steps, values = np.array(points, dtype=float).reshape(-1, 2).T
    return steps, np.where(np.isfinite(values), values, np.nan)


def draw_smooth(axes: Axes, steps: np.ndarray, values: np.ndarray, colour: str) -> np.ndarray:
    """A pale curve of all values and a strong one of their mean over a fortieth of the run, which is returned."""
    smooth = smoothed(values, len(values) // 40)
    axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
    axes.plot(steps, smooth, color=colour)
    return smooth


def draw_loss(axes: Axes, records: Sequence[Record]) -> None:
    steps, values = curve(records, "loss")
    smooth = draw_smooth(axes, steps, values, COLOURS[0])
    if len(values):
        end = (steps[-1], smooth[-1])
        axes.annotate(f"{smooth[-1]:.3f}", end, xytext=(4, 0), textcoords="offset points", color=COLOURS[0])
    finite = values[np.isfinite(values)]
    if len(finite) and finite.min() > 0 and finite.max() / finite.min() > 3:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    _finish(axes, "loss")


def draw_quality(axes: Axes, evaluations: Sequence[Record], steps: int) -> None:
    curves: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for evaluation in evaluations:
        for name, metrics in evaluation["results"].items():
            for metric in [m for m in PLOTTED if m in metrics]:
                curves.setdefault((name, metric), []).append((evaluation["step"], 100 * metrics[metric]))
    styles = itertools.cycle(itertools.product(DASHES, COLOURS))
    for (dashes, colour), ((name, metric), points) in zip(styles, curves.items()):
        label = f"{printable(name)}: {PLOTTED[metric]} {points[-1][1]:.1f} %"
        axes.plot(*zip(*points), color=colour, linestyle=dashes, marker="o", markersize=4, label=label)
    best = max((value for points in curves.values() for _, value in points), default=100)
    axes.set_ylim(0, min(102, max(5, 1.25 * best)))
    axes.set_xlim(0, 1.03 * steps)
    _finish(axes, "evaluation, %", legend=True, empty="no evaluation")


def draw_speed(axes: Axes, records: Sequence[Record]) -> None:
    steps, values = curve(records, "samples_per_s")
    draw_smooth(axes, steps, values, COLOURS[2])
    axes.set_ylim(0, 1.15 * np.nanmax(values) if np.isfinite(values).any() else 1)
    wait_steps, waits = curve(records, "data_wait_frac")
    if len(waits):
        share = axes.twinx()
        share.plot(wait_steps, 100 * smoothed(waits, len(waits) // 40), color=COLOURS[1], linewidth=1.0)
        share.set_ylim(0, 100)
        share.grid(False)
        share.set_ylabel("waiting for data, %", color=COLOURS[1])
    _finish(axes, "throughput, samples/s")


def draw_memory(axes: Axes, records: Sequence[Record]) -> None:
    fields = (("mem_peak_bytes", "GPU, peak"), ("mem_loss_bytes", "GPU, of the loss"), ("host_rss_bytes", "host"))
    highest = 0.0
    for colour, (name, label) in zip(COLOURS[3:], fields):
        steps, values = curve(records, name)
        if len(values):
            values = values / GIB
            highest = max(highest, np.nanmax(values, initial=0.0))
            axes.plot(steps, values, color=colour, label=f"{label} {values[-1]:.2f}")
    axes.set_ylim(0, 1.25 * highest or 1)
    _finish(axes, "memory, GiB", legend=True)


def _finish(axes: Axes, title: str, *, legend: bool = False, empty: str = "not measured") -> None:
    """Title, step axis and legend; `empty` is written into a plot without a curve."""
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if not any(len(line.get_xdata()) for line in axes.lines):  # type: ignore[arg-type]
        axes.text(0.5, 0.5, empty, transform=axes.transAxes, ha="center", color="#6b7280")
    elif legend:
        columns = math.ceil(len(axes.lines) / LEGEND_ROWS)
        axes.legend(loc="best", ncols=columns, fontsize=8 if columns == 1 else 6)


# ---- retrieved images ----


def draw_gallery(part: Any, record: Record, images: np.ndarray) -> None:
    """Captions in two columns, each above its nearest images. The correct image is framed."""
    tile, columns, rows = record["tile"], record["columns"], record["rows"]
    step = f", step {record['step']}" if record["step"] is not None else ""
    part.suptitle(
        f"retrieved images: {printable(record['set'])}{step}", x=0.01, ha="left", fontsize=10, fontweight="bold"
    )
    part.text(0.995, 0.995, "framed: the correct one; dashed: not found", ha="right", va="top", fontsize=8, color=RIGHT)
    grid = part.subplots(math.ceil(len(rows) / 2), 2, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    for axes, (y, row) in zip(grid.flat, enumerate(rows)):
        strip = images[y * tile : (y + 1) * tile]
        # The correct image follows after a gap if it is not among the nearest.
        places = [(x, x * 1.06) for x in range(columns)]
        places += [] if row["hit"] is not None else [(columns, columns * 1.06 + 0.35)]
        for x, left in places:
            correct = x in (row["hit"], columns)
            axes.imshow(strip[:, x * tile : (x + 1) * tile], extent=(left, left + 1, 0, 1), interpolation="none")
            colour, width = (RIGHT, 2.5) if correct else (WRONG, 0.6)
            frame = Rectangle((left, 0), 1, 1, fill=False, edgecolor=colour, linewidth=width)
            frame.set_linestyle("--" if x == columns else "-")
            axes.add_patch(frame)
        axes.set_xlim(-0.03, (columns + 1) * 1.06 + 0.4)
        axes.set_ylim(-0.05, 1.05)
        axes.set_aspect("equal", anchor="W")
        axes.set_title(
            textwrap.shorten(printable(row["caption"]), 78, placeholder="…"), fontsize=8.5, fontweight="normal", pad=3
        )
