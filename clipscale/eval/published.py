"""Compares a run's results with those that its preset's source has published."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from clipscale.common.record import Results
from clipscale.config.expected_bands import SOURCE, parse_bands
from clipscale.eval.sets.known import known_sets


@dataclass(frozen=True)
class PublishedBands:
    """Published scores, and where they are from."""

    # `SET.METRIC` -> the lowest and the highest value, in per cent.
    bands: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    source: str = ""

    @staticmethod
    def from_setting(expected: Mapping[str, object]) -> "PublishedBands":
        """Read the setting `expected`. Raises UserError for other forms."""
        return PublishedBands(parse_bands(expected), str(expected.get(SOURCE, "")))

    def line(self, results: Results) -> str:
        """Each result that has a band, with the band; empty if none has one.

        results: set -> metric -> share in [0, 1].
        """
        parts = []
        for key, (low, high) in self.bands.items():
            name, _, metric = key.rpartition(".")
            for label in result_labels(name):
                if metric in results.get(label, {}):
                    value = round(100 * results[label][metric], 1)
                    parts.append(
                        f"{label} {metric} {value:.1f} %, {side_of_band(value, low, high)} {low:g} to {high:g}"
                    )
        source = f" ({self.source})" if self.source else ""
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
