"""The curves of a run: loss, evaluation, throughput and memory."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from clipscale.common.terminal import printable

Record = dict[str, Any]
Curve = tuple[Sequence[float], Sequence[float]]
"""Steps and values. A value that is not finite is a gap."""

GIB = 2**30
PLOTTED = {"top1": "top-1", "image_to_text_r1": "image→text R@1", "text_to_image_r1": "text→image R@1"}
"""Evaluation metrics that have a curve; the page's tables show all of them."""
MEMORY = {"mem_peak_bytes": "GPU, peak", "mem_loss_bytes": "GPU, of the loss", "host_rss_bytes": "host"}


def draw(records: Sequence[Record], evaluations: Sequence[Record]) -> Figure:
    """Four plots over the steps."""
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    (loss, quality), (speed, memory) = figure.subplots(2, 2)
    draw_curves(loss, "loss, and its mean over a fortieth of the run", with_mean(*curve(records, "loss")))
    draw_curves(quality, "evaluation, %", quality_curves(evaluations))
    draw_curves(speed, "throughput, samples/s", with_mean(*curve(records, "samples_per_s")))
    draw_curves(memory, "memory, GiB", {label: curve(records, name, 1 / GIB) for name, label in MEMORY.items()})
    for axes in (quality, speed, memory):
        axes.set_ylim(bottom=0)
    return figure


def curve(records: Sequence[Record], name: str, factor: float = 1) -> Curve:
    """Steps and values of a field, from the records that have it."""
    points = [(r["step"], factor * r[name]) for r in records if r.get(name) is not None]
    return [step for step, _ in points], [value if np.isfinite(value) else np.nan for _, value in points]


def with_mean(steps: Sequence[float], values: Sequence[float]) -> dict[str, Curve]:
    """A curve, and the means of as many of its values as make a fortieth, at their middle."""
    width = max(1, len(values) // 40)
    means: Any = np.convolve(values, np.full(width, 1 / width), "valid") if values else []
    return {"": (steps, values), "mean": (steps[width // 2 : width // 2 + len(means)], means)}


def quality_curves(evaluations: Sequence[Record]) -> dict[str, Curve]:
    """A curve for each plotted metric of each evaluation set."""
    curves: dict[str, tuple[list[float], list[float]]] = {}
    for evaluation in evaluations:
        for name, metrics in evaluation["results"].items():
            for metric in PLOTTED.keys() & metrics.keys():
                steps, values = curves.setdefault(f"{name}: {PLOTTED[metric]}", ([], []))
                steps.append(evaluation["step"])
                values.append(100 * metrics[metric])
    return dict(sorted(curves.items()))


def draw_curves(axes: Axes, title: str, curves: Mapping[str, Curve]) -> None:
    """Curves by their labels, with their last value; one without a label is pale."""
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel("step")
    axes.grid(color="#e5e7eb")
    for label, (steps, values) in curves.items():
        if len(steps):
            name = f"{printable(label)} {values[-1]:.4g}" if label else None
            axes.plot(steps, values, label=name, marker="." if len(steps) < 30 else "", alpha=1 if label else 0.25)
    if axes.lines:
        axes.legend(fontsize=7, frameon=False)
    else:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center")
