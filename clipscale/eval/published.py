"""Compares a run's results with those that its preset's source has published."""

from collections.abc import Mapping

from clipscale.common.record import Results
from clipscale.config.expected_bands import SOURCE, parse_bands
from clipscale.eval.sets.known import known_sets


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
