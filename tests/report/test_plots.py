"""The report's curves: smoothing, what is kept of long runs, and as many curves as there are evaluation sets."""

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from clipscale.report.plots import POINTS, draw_loss, draw_quality, smoothed, thinned


def axes() -> Axes:
    return Figure().subplots()


def test_smoothing_is_a_mean_that_ignores_gaps() -> None:
    values = np.array([1.0, 2.0, math.nan, 4.0, 9.0])
    assert smoothed(values, 3).tolist() == [1.5, 1.5, 3.0, 6.5, 6.5]
    assert smoothed(values[[0, 1, 3, 4]], 1).tolist() == [1, 2, 4, 9]
    assert np.allclose(smoothed(np.full(50, 2.5), 8), 2.5)


def test_a_long_curve_keeps_spikes_of_one_step() -> None:
    """Also next to values that are not finite, and in buckets without finite values."""
    steps, values = np.arange(20_001.0), np.ones(20_001)
    values[[7003, 12_345]] = 50, -3
    values[7004], values[9000:9100] = math.nan, math.inf
    kept_steps, kept = thinned(steps, values)
    assert len(kept) <= POINTS
    assert (kept_steps[kept == 50], kept_steps[kept == -3]) == (7003, 12_345)
    assert (np.diff(kept_steps) > 0).all()


def test_the_loss_curve_shows_a_spike() -> None:
    drawn = axes()
    draw_loss(drawn, [{"step": step, "loss": 50.0 if step == 7003 else 1.0} for step in range(1, 20_001)])
    assert max(np.max(line.get_ydata()) for line in drawn.lines) == 50


def test_every_evaluation_set_has_a_curve_that_differs_from_the_others() -> None:
    results = {f"set{number}": {"top1": number / 20} for number in range(20)}
    drawn = axes()
    draw_quality(drawn, [{"step": step, "results": results} for step in (1, 2)], 2)
    styles = {(line.get_color(), line.get_linestyle()) for line in drawn.lines}
    assert len(drawn.lines) == len(styles) == 20
    legend = drawn.get_legend()
    assert legend is not None and len(legend.get_texts()) == 20
