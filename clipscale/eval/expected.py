"""Compares a run's results with what its preset says that it should end with."""

from clipscale.common.record import Record, Results
from clipscale.config.expected import SOURCE, bands_of
from clipscale.eval.sets.known import known_sets


def compared(expected: Record, results: Results) -> str:
    """One line on all results that `expected` (the setting) has a range for; empty: none.

    results: set -> metric -> share in [0, 1]. A published set goes by any name of its folder.
    """
    parts = []
    for key, (low, high) in bands_of(expected).items():
        name, _, metric = key.rpartition(".")
        for label in labels_of(name):
            metrics = results.get(label, {})
            if metric in metrics:
                value = round(100 * metrics[metric], 1)
                parts.append(f"{name} {metric} {value:.1f}: {place(value, low, high)} {low:g} to {high:g}")
    source = f" ({expected[SOURCE]})" if expected.get(SOURCE) else ""
    return f"expected: {'; '.join(parts)}{source}" if parts else ""


def labels_of(name: str) -> list[str]:
    """The names that results of a set may have, by the folder where it lies."""
    known = known_sets().get(name)
    return sorted({label.removeprefix("wds_") for label in known.candidates}) if known else [name]


def place(value: float, low: float, high: float) -> str:
    """Where a value lies beside a range, ends included."""
    if value < low:
        return "below"
    return "within" if value <= high else "above"
