"""Text of strangers is printed without obeying it: no control character, line break or markup reaches the terminal."""

import logging
import os
import re
import sys
from pathlib import Path
from unittest.mock import Mock, call

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipscale.cli.main import main
from clipscale.common import terminal
from clipscale.common.terminal import MAX_LENGTH, RUN_LABEL, log_line
from clipscale.common.text import printable
from clipscale.log.table import TextTable, show
from tests.conftest import Capture
from tests.support.interpreter import interpreted
from tests.support.terminals import on_terminal, screen

GROUP = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
HOSTILE = "a\x1b]0;title\x07\x9b31m\nerror: [red]b[/red]\u202e\ud800\r"


@given(st.text(st.characters(categories=None, codec=None)))
def test_printable_text_has_no_control_characters_and_loses_nothing(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable() or not shown
    shown.encode()
    if text.isprintable():
        assert shown == text


@pytest.mark.parametrize("text", [HOSTILE, "x" * 100_000])
def test_an_error_is_one_printable_line(text: str, capsys: Capture) -> None:
    assert main([text]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable() and len(line) <= MAX_LENGTH


def test_a_warning_is_one_printable_line(capsys: Capture) -> None:
    terminal.make_warnings_printable()
    record = logging.LogRecord("clipscale", logging.WARNING, "", 1, "shard %s", (HOSTILE,), None)
    assert logging.lastResort is not None
    logging.lastResort.handle(record)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()


def test_a_table_shows_text_as_it_is(capsys: Capture) -> None:
    show(TextTable((HOSTILE, "b"), [(HOSTILE, "[bold]1[/bold]")], title=HOSTILE))
    shown = capsys.readouterr().out
    assert "[bold]1[/bold]" in shown and "[red]b[/red]" in shown
    assert all(line.isprintable() for line in shown.split("\n"))


WORK = """\
from clipscale.common import terminal
from clipscale.common.terminal import show_task, print_line, tracked
terminal.BAR_AFTER_S = terminal.BAR_EVERY_S = 0
show_task("beginning")
print_line("begun")
for part in tracked(range(4), "parts [red]" + "x" * 200, 4):
    pass
print_line("done")
"""


def test_a_long_line_of_a_log_is_folded_on_a_terminal_alone(tmp_path: Path) -> None:
    code = "from clipscale.common.terminal import log_line; log_line('one word after another ' * 10, error=True)"
    status, output = on_terminal([sys.executable, "-c", code], tmp_path, os.environ)
    lines = screen(output)
    assert status == 0 and len(lines) == 4 and max(map(len, lines)) <= 100, lines
    done = interpreted(code)
    assert done.stderr.count("\n") == 1


def test_lines_of_runs_that_share_an_output_begin_with_their_names(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    log_line("step=1")
    monkeypatch.setenv(RUN_LABEL, "seed=0")
    log_line("step=1")
    assert re.sub(r"\d\d:\d\d:\d\d ", "", capsys.readouterr().out).splitlines() == ["step=1", "seed=0: step=1"]


def test_a_terminal_shows_what_is_done_and_keeps_only_lines(tmp_path: Path) -> None:
    status, output = on_terminal([sys.executable, "-c", WORK], tmp_path, os.environ)
    assert (status, screen(output)) == (0, ["begun", "done", ""])
    shown = output.split("\x1b[K")
    assert "beginning ..." in shown[1] and any("━╌" in part and "1 of 4" not in part for part in shown)
    assert max(len(part.rstrip("\r\n")) for part in shown) < 100, "a line that wraps cannot be removed"


@pytest.mark.parametrize("variable", [{"RANK": "1", "WORLD_SIZE": "2"} | GROUP, {"TERM": "dumb"}])
def test_other_ranks_and_terminals_that_cannot_clear_a_line_show_lines_only(tmp_path: Path, variable: dict) -> None:
    code = f"import os; os.environ.update({variable!r})\n{WORK}"
    _, output = on_terminal([sys.executable, "-c", code], tmp_path, os.environ)
    assert screen(output) == ["begun", "done", ""] and "..." not in output and "━" not in output


def test_a_line_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Python buffers nothing, Ctrl-C's message or another rank's line could come before its end."""
    monkeypatch.setattr(sys, "stdout", Mock())
    terminal.print_line("a")
    assert sys.stdout.write.mock_calls == [call("a\n")]


def test_files_and_pipes_get_lines_only() -> None:
    done = interpreted(WORK)
    assert (done.stdout, done.stderr) == ("begun\ndone\n", "")
