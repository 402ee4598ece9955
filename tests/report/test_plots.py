"""Curves: smoothing."""

import math

import numpy as np

from clipscale.report.plots import smoothed


def test_smoothing_is_a_mean_that_ignores_gaps() -> None:
    values = np.array([1.0, 2.0, math.nan, 4.0, 9.0])
    assert smoothed(values, 3).tolist() == [1.5, 1.5, 3.0, 6.5, 6.5]
    assert smoothed(values[[0, 1, 3, 4]], 1).tolist() == [1, 2, 4, 9]
    assert np.allclose(smoothed(np.full(50, 2.5), 8), 2.5)
