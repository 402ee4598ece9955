"""Counts, bytes and run folders as text, and suggestions for mistyped words."""

import re
import zlib
from collections.abc import Iterable
from difflib import get_close_matches
from fractions import Fraction
from itertools import chain
from pathlib import Path

BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "b": 10**9}
# Units of a number with decimals.
DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}


class Bytes(int):
    """The type of a setting that is a number of bytes, which are typed as `parse_bytes` reads them."""


def run_folder(name: str) -> Path:
    """`runs/NAME` for a plain name; anything with a slash is a path."""
    return Path(name).expanduser() if "/" in name or name in (".", "..") else Path("runs") / name


def path_or_run(name: str) -> Path:
    """The path, if there is one, or else the folder of the run of that name."""
    path = Path(name).expanduser()
    return path if path.exists() else run_folder(name)


def unused_path(folder: Path) -> Path:
    """The folder, or if it exists, the first free one with a number appended."""
    numbered = (folder.with_name(f"{folder.name}-{i}") for i in range(2, 10_000))
    return next(path for path in chain([folder], numbered) if not path.exists())


def file_name(text: str, most: int = 100) -> str:
    """A name of letters, digits and `_.,=+-`, of at most `most` characters: the text itself if possible.

    Otherwise it ends in the text's CRC-32, so that different texts have different names.
    """
    name = re.sub(r"[^A-Za-z0-9_.,=+-]+", "-", text).strip("-.")
    return name if name == text and len(name) <= most else f"{name[: most - 9]}-{zlib.crc32(text.encode()):08x}"


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
        raise ValueError(f"{text!r} is no size such as 8G, 512GB or 2T")
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


def counted(count: int, noun: str) -> str:
    """`1 shard`, `2,000 shards`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """`; did you mean 'optim.lr'?`, or nothing if no known name is close.

    Compares the last parts of dotted names first (`lr` and `optim.lrr` suggest `optim.lr`), then beginnings, then all.
    """
    names = list(candidates)
    leaves = {name: name.rpartition(".")[2] for name in names}
    if not word:
        return ""
    section, _, leaf = word.rpartition(".")
    like = [leaf] if leaf in leaves.values() else get_close_matches(leaf, set(leaves.values()), cutoff=0.75)
    close = [name for name in names if leaves[name] in like] or [name for name in names if name.startswith(word)]
    close = close or get_close_matches(word, names, cutoff=0.6)
    close = sorted(close, key=lambda name: name.rpartition(".")[0] != section)  # first those in the section
    return f"; did you mean {one_of(repr(name) for name in close[:3])}?" if close else ""


def one_of(names: Iterable[str]) -> str:
    """`a, b or c`."""
    *most, final = names
    return f"{', '.join(most)} or {final}" if most else final
