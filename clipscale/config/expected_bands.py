"""The setting `expected`: the results that a preset's source has published for its run."""

from collections.abc import Mapping
from typing import cast

from clipscale.common.errors import UserError
from clipscale.config.parse import accepted_value
from clipscale.config.setting import Setting, flatten

# The key that is not a metric. It says who has published the numbers.
SOURCE = "source"
PER_CENT = {"least": 0, "most": 100}


def parse_bands(expected: Mapping[str, object]) -> dict[str, tuple[float, float]]:
    """`SET.METRIC` -> the lowest and the highest value, in per cent. Raises UserError for other forms."""
    bands = {}
    for name, band in flatten(expected):
        if name != SOURCE:
            setting = Setting(f"expected.{name}", tuple[float, float], None, "", bounds=PER_CENT)
            low, high = cast("tuple[float, float]", accepted_value(setting, band))
            if low > high or "." not in name:
                raise UserError(f"expected.{name}=[{low:g},{high:g}]: give SET.METRIC: [LOWEST, HIGHEST]")
            bands[name] = (low, high)
    return bands
