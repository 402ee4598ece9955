"""Writes plans as text, by the templates beside this file."""

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from clipscale.common.units import format_bytes, format_count, format_decimal


def written(template: str, **values: Any) -> str:
    """The text of a template: `page`, `compared` or `conclusion`."""
    return _templates().get_template(f"{template}.txt").render(values)


@cache
def _templates() -> Environment:
    templates = Environment(loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True)
    templates.filters |= {
        "bytes": format_bytes,
        "count": format_count,
        "decimal": format_decimal,
        "duration": duration,
        "rate": lambda rate: f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}",
    }
    return templates


def duration(seconds: float) -> str:
    """Three digits in the largest unit: `2.5 min`, `8.6 days`."""
    for unit, size in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
