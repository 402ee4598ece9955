"""What a preset's run should end with: the setting `expected`, by set and metric."""

from clipscale.common.record import Record
from clipscale.config.parse import accepted
from clipscale.config.setting import Setting, flat

SOURCE = "source"
"""The key that is no metric: who has published the numbers."""
PERCENT = {"least": 0, "most": 100}


def bands_of(expected: Record) -> dict[str, tuple[float, float]]:
    """`SET.METRIC` -> the lowest and the highest value, in percent. Raises UserError for other forms."""
    return {
        name: accepted(Setting(f"expected.{name}", tuple[float, float], None, "", bounds=PERCENT), band)
        for name, band in flat(expected)
        if name != SOURCE
    }
