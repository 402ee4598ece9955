"""Prints text that may come from strangers, such as names, captions and reasons. No control character reaches the terminal."""

import logging
import re
import sys

LONGEST = 4000
"""Characters of a printed error or warning; the rest of it is left out."""


def printable(text: object) -> str:
    """The text on one line. What is not printable, newlines and lone surrogates included, becomes an escape such as `\\x1b`."""
    plain = str(text)
    if plain.isascii() and plain.isprintable():
        return plain
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in plain)


def without_password(text: str) -> str:
    """The text without the `user:password@` of addresses."""
    return re.sub(r"([A-Za-z][A-Za-z0-9+.-]*://)[^\s/'\"<>]+@", r"\1", text)


def message(text: object) -> str:
    """An error or a warning: printable, without passwords, and no longer than LONGEST."""
    line = without_password(printable(text))
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}..."


def say(text: object, *, error: bool = False) -> None:
    """Print a line on stdout, or on stderr for an `error`."""
    print(printable(text), file=sys.stderr if error else sys.stdout, flush=True)


def say_all(text: str, *, error: bool = False) -> None:
    """Print several lines, such as a traceback."""
    for line in text.splitlines():
        say(line, error=error)


def report(error: object, details: str = "") -> None:
    """Print a failure on stderr: the lines of its traceback, if there is one, and one line that says what it is."""
    say_all(details, error=True)
    say(message(f"error: {error}"), error=True)


class _Printable(logging.Formatter):
    """The message alone, as logging prints it where nothing is configured."""

    def format(self, record: logging.LogRecord) -> str:
        return message(record.getMessage())


def prepare() -> None:
    """Let this process's warnings and output be printable. Every process of ours calls it once; a second call is harmless."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Printable())
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")  # an ASCII terminal
