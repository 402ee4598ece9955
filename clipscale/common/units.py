"""Counts and bytes as text, and as what a user types."""

import re
from fractions import Fraction

BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "b": 10**9}
# Units of a number with decimals.
DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}


class Bytes(int):
    """The type of a setting that is a number of bytes, which are typed as `parse_bytes` reads them."""


def parse_count(text: str) -> int:
    """`768k` -> 786,432: k, M and G after a whole number are powers of 1024, a plain integer is itself.

    B, and any unit after decimals, are powers of 1000, as in papers: `13B`, `12.8M` -> 12,800,000. Raises ValueError
    for other forms.
    """
    match = re.fullmatch(r"\s*(\d+(\.\d+)?)\s*([kmgb]?)\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a count such as 100000, 768k, 12.8M or 13B")
    units = DECIMAL if match[2] else BINARY
    value = Fraction(match[1]) * units[match[3].lower()]
    if value.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)


def parse_bytes(text: str) -> int:
    """`512G`, `512GB` and `512 GiB` -> 2^39, `1.5T` -> 3 * 2^39: memory comes in powers of 1024.

    Raises ValueError for other forms.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 8G, 512GB or 2T")
    return int(Fraction(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))


def format_count(count: int) -> str:
    """The shortest exact form: 1,048,576 -> `1M`, 786,432 -> `768k`, 100,000 -> `100000`."""
    for suffix, unit in (("G", 2**30), ("M", 2**20), ("k", 2**10)):
        if count and count % unit == 0:
            return f"{count // unit}{suffix}"
    return str(count)


def format_decimal(number: float) -> str:
    """Three digits in decimal units, as papers have it: 12,800,000 -> `12.8M`, 34 billion -> `34B`."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def format_bytes(count: float) -> str:
    """Bytes in the largest fitting unit: `512 B`, `19.5 MiB`, `2.34 GiB`."""
    for unit, decimals in (("B", 0), ("KiB", 1), ("MiB", 1), ("GiB", 2)):
        if count < 1024:
            return f"{count:.{decimals}f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"
