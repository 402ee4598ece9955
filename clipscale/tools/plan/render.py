"""Writes plans as text, by the templates beside this file."""

import math
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from clipscale.common.units import format_bytes, format_count, format_decimal
from clipscale.log.metrics import duration

TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True)
TEMPLATES.filters |= {
    "bytes": format_bytes,
    "count": format_count,
    "decimal": format_decimal,
    "duration": duration,
    "cores": lambda cores: f"{math.ceil(cores)} core{'s' if cores > 1 else ''}",
    "rate": lambda rate: f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}",
}


def render(template: str, **values: object) -> str:
    """The text of a template: `page`, `conclusion` or `start`."""
    return TEMPLATES.get_template(f"{template}.txt").render(values)
