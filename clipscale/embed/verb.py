"""The verb `clipscale embed`."""

from typing import Any

from clipscale.config.tools import EmbedConfig, check_embed
from clipscale.embed.run import embed


def main(config: EmbedConfig) -> dict[str, Any]:
    """Write features to `out`. Returns its folder and samples. Raises UserError."""
    check_embed(config)
    return embed(config)
