"""What a preset's run should end with: the setting `expected`, by set and metric."""

from collections.abc import Mapping
from typing import Any

from clipscale.common.errors import UserError
from clipscale.config.setting import flat

SOURCE = "source"
"""The key that is no metric: who has published the numbers."""


def bands_of(expected: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """`SET.METRIC` -> the lowest and the highest value, in percent. Raises UserError for other forms."""
    bands = {}
    for name, band in flat(expected):
        if name == SOURCE:
            continue
        numbers = [value for value in band if isinstance(value, int | float)] if isinstance(band, list | tuple) else []
        if "." not in name or len(numbers) != 2 or not 0 <= numbers[0] <= numbers[1] <= 100:
            raise UserError(f"expected: {name} is {band}; give SET.METRIC two percentages, imagenet1k.top1: [18.5, 20]")
        bands[name] = (float(numbers[0]), float(numbers[1]))
    return bands
