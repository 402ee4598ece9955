"""Text for the user: safe to print, with counted nouns, lists of words, and suggestions for mistyped ones."""

import re
from collections.abc import Iterable
from difflib import get_close_matches


def printable(text: object) -> str:
    """The text on one line: what is not printable, newlines included, becomes an escape such as `\\x1b`."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def without_password(text: str) -> str:
    """The text with `://` in the place of `://USER:PASSWORD@`."""
    return re.sub(r"://[^\s/'\"<>]+@", "://", text)  # the scheme is not in the pattern: time would be squared


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
    close = sorted(close, key=lambda name: name.rpartition(".")[0] != section)  # names of the same section come first
    return f"; did you mean {one_of(repr(name) for name in close[:3])}?" if close else ""


def one_of(names: Iterable[str]) -> str:
    """`a, b or c`."""
    *most, final = names
    return f"{', '.join(most)} or {final}" if most else final
