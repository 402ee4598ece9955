"""Compares a run's results with those that its preset's source has published."""

from collections.abc import Mapping
from typing import cast

from clipscale.common.errors import UserError
from clipscale.common.record import Results
from clipscale.config.parse import accepted_value
from clipscale.config.setting import Setting, flatten
from clipscale.eval.sets.known import known_sets

# The key of the setting `expected` that is not a metric. It says who has published the numbers.
SOURCE = "source"
PER_CENT = {"least": 0, "most": 100}


def published_line(expected: Mapping[str, object], results: Results) -> str:
    """Each result that has a published band, with the band; empty if none has one. Raises UserError.

    `expected`: the setting. Results are shares in [0, 1].
    """
    parts = []
    for key, (low, high) in parse_bands(expected).items():
        name, _, metric = key.rpartition(".")
        for label in result_labels(name):
            if metric in results.get(label, {}):
                value = round(100 * results[label][metric], 1)
                parts.append(f"{label} {metric} {value:.1f} %, {side_of_band(value, low, high)} {low:g} to {high:g}")
    source = f" ({expected[SOURCE]})" if expected.get(SOURCE) else ""
    return f"published: {'; '.join(parts)}{source}" if parts else ""


def parse_bands(expected: Mapping[str, object]) -> dict[str, tuple[float, float]]:
    """The setting `expected`: `SET.METRIC` -> the lowest and the highest value, in per cent. Raises UserError for other
    forms."""
    bands = {}
    for name, band in flatten(expected):
        if name != SOURCE:
            setting = Setting(f"expected.{name}", tuple[float, float], None, "", bounds=PER_CENT)
            low, high = cast("tuple[float, float]", accepted_value(setting, band))
            if low > high or "." not in name:
                raise UserError(f"expected.{name}=[{low:g},{high:g}]: give SET.METRIC: [LOWEST, HIGHEST]")
            bands[name] = (low, high)
    return bands


def result_labels(name: str) -> list[str]:
    """The names that a set's results may have: it may lie in several folders, and have the moving average's mark."""
    known_set = known_sets().get(name)
    labels = {label.removeprefix("wds_") for label in known_set.candidates} if known_set else {name}
    return sorted(labels | {f"{label} (ema)" for label in labels})


def side_of_band(value: float, low: float, high: float) -> str:
    """Where a value lies beside a band, ends included."""
    if value < low:
        return "below"
    return "within" if value <= high else "above"
