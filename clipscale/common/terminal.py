"""Prints lines, and on a terminal the present task and its progress.

Names and captions may come from strangers, so no control character of theirs reaches the terminal.
"""

import logging
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from typing import TypeVar

from clipscale.common import ranks
from clipscale.common.errors import UserError
from clipscale.common.text import printable, without_password

T = TypeVar("T")
# Environment variable with the name of the run, which its lines begin with after the time of day. A sweep sets it where
# the lines of several runs arrive together.
RUN_LABEL = "CLIPSCALE_RUN_LABEL"
# Most characters of a printed error or warning.
MAX_LENGTH = 4000
# Empties a terminal's last line.
CLEAR = "\r\x1b[K"
# Wraps lines of a log on a terminal.
LINE_WRAPPER = textwrap.TextWrapper(100, subsequent_indent=" " * 9, break_long_words=False, break_on_hyphens=False)
# Without a terminal, seconds between lines about the progress of long work.
LINE_S = 60.0
# Seconds until a bar appears.
BAR_AFTER_S = 2.0
# Seconds between a bar's updates.
BAR_EVERY_S = 0.2
# A bar's width in characters.
BAR_WIDTH = 20


def is_main_rank() -> bool:
    """Whether this process prints for its run. Rank 0 does, a single process, and one with an invalid rank."""
    with suppress(UserError):
        return ranks.rank() == 0 or ranks.rank() >= ranks.size()
    return True


def on_terminal() -> bool:
    """Whether stderr is a terminal that can redraw a line."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def print_line(text: object, *, error: bool = False) -> None:
    """Print a line on stdout, or on stderr for an `error`."""
    clear()
    stream = sys.stderr if error else sys.stdout
    stream.write(f"{printable(text)}\n")  # one write: unbuffered, print() would make two
    stream.flush()


def log_line(text: object, *, error: bool = False) -> None:
    """Print a line of a run's log: it begins with the time of day. A terminal shows a long one between words."""
    label = os.environ.get(RUN_LABEL)
    line = f"{datetime.now():%H:%M:%S} {f'{label}: ' if label else ''}{printable(text)}"
    for row in LINE_WRAPPER.wrap(line) if on_terminal() else [line]:
        print_line(row, error=error)


def log_warning(text: object, *, error: bool = False) -> None:
    """Print a warning as a line of a run's log: on stdout among the lines of its steps, or on stderr with `error`."""
    log_line(f"warning: {text}", error=error)


def show_task(task: str) -> None:
    """On a terminal: show what begins now, until the next line is printed."""
    _show(f"{datetime.now():%H:%M:%S} {task} ...")


def announce_task(task: str, *, error: bool = False) -> None:
    """Show what begins now, as `show_task`; without a terminal as a line of the log, on stderr with `error`."""
    if on_terminal():
        show_task(task)
    elif is_main_rank():
        log_line(f"{task} ...", error=error)


class _LastLine:
    """Whether the terminal's last line may hold something to remove. At first that is the parent process's line."""

    is_temporary = True


def clear() -> None:
    """Remove what `show_task` or a bar shows, of this process or of its parent."""
    if _LastLine.is_temporary and on_terminal():
        print(CLEAR, end="", file=sys.stderr, flush=True)
    _LastLine.is_temporary = False


def _show(text: str) -> None:
    if on_terminal() and is_main_rank():
        _LastLine.is_temporary = True
        shown = printable(text)[: shutil.get_terminal_size().columns - 1]  # a line that wraps cannot be removed
        print(f"{CLEAR}{shown}", end="", file=sys.stderr, flush=True)


class Progress:
    """Shows how far long work is: a bar on a terminal, elsewhere a line every LINE_S seconds."""

    _began_at = _shown_at = 0.0
    _shows_bar = False

    def __call__(self, task: str, done: int, total: int) -> None:
        """`done` of `total` parts of the work called `task`, which begins with 0 parts. `total` may be an estimate."""
        now = time.monotonic()
        if done == 0:
            self._began_at = now
            self._shown_at = now
        if not 0 < done < total:
            if self._shows_bar:
                clear()
            self._shows_bar = False
            return
        remaining = timedelta(seconds=round((now - self._began_at) * (total / done - 1)))
        text = f"{task}: {done} of {total}, {done / total:.0%}, {remaining} left"
        if not on_terminal():
            if now - self._shown_at >= LINE_S and is_main_rank():
                log_line(text, error=True)
                self._shown_at = now
        elif now - self._began_at >= BAR_AFTER_S and now - self._shown_at >= BAR_EVERY_S:
            full = BAR_WIDTH * done // total
            _show(f"{'━' * full}{'╌' * (BAR_WIDTH - full)} {text}")
            self._shows_bar = True
            self._shown_at = now


def tracked(items: Iterable[T], task: str, total: int) -> Iterator[T]:
    """Yield the parts of long work one by one, and show its progress. `task`: as in `writing shards`."""
    show_task(task)
    progress = Progress()
    progress(task, 0, total)
    for done, item in enumerate(items, 1):
        yield item
        progress(task, done, total)


def print_failure(error: object, details: str = "") -> None:
    """Print a failure on stderr: the lines of its traceback, if there is one, and one line that says what it is."""
    for line in [*details.splitlines(), without_password(f"error: {error}")[:MAX_LENGTH]]:
        print_line(line, error=True)


class _Printable(logging.Formatter):
    """The message alone, as logging prints it where nothing is configured."""

    def format(self, record: logging.LogRecord) -> str:
        clear()
        return without_password(printable(record.getMessage()))[:MAX_LENGTH]


def make_warnings_printable() -> None:
    """From here on, what this process logs without a handler of its own is printed on one line."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Printable())
