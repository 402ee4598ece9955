"""Prints text that may come from strangers, such as names and captions: no control character reaches the terminal."""

import logging
import re
import sys

LONGEST = 4000
"""Characters of a printed error or warning; the rest of it is left out."""


def printable(text: object) -> str:
    """The text on one line: what is not printable, newlines included, becomes an escape such as `\\x1b`."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def without_password(text: str) -> str:
    return re.sub(r"://[^\s/'\"<>]+@", "://", text)  # without the scheme: looking for one takes time squared


def say(text: object, *, error: bool = False) -> None:
    """Print a line on stdout, or on stderr for an `error`."""
    print(printable(text), file=sys.stderr if error else sys.stdout, flush=True)


def report(error: object, details: str = "") -> None:
    """Print a failure on stderr: the lines of its traceback, if there is one, and one line that says what it is."""
    for line in [*details.splitlines(), without_password(f"error: {error}")[:LONGEST]]:
        say(line, error=True)


class _Printable(logging.Formatter):
    """The message alone, as logging prints it where nothing is configured."""

    def format(self, record: logging.LogRecord) -> str:
        return without_password(printable(record.getMessage()))[:LONGEST]


def prepare() -> None:
    """Let this process's warnings be printable. Every process of ours calls it once."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Printable())
