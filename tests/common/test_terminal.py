"""Text of strangers is printed without obeying it: no control character, line break or markup reaches the terminal."""

import io
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from clipscale.cli.main import main
from clipscale.common import terminal
from clipscale.common.terminal import LONGEST, printable
from clipscale.log.table import TextTable

HOSTILE = "a\x1b]0;title\x07\x9b31m\nerror: [red]b[/red]\u202e\ud800\r"


@given(st.text(st.characters(categories=None, codec=None)))
def test_printable_text_has_no_control_characters_and_loses_nothing(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable() or not shown
    shown.encode()
    if text.isprintable():
        assert shown == text


@pytest.mark.parametrize("text", [HOSTILE, "x" * 100_000])
def test_an_error_is_one_printable_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([text]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable() and len(line) <= LONGEST


def test_a_warning_is_one_printable_line(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.prepare()
    record = logging.LogRecord("clipscale", logging.WARNING, "", 1, "shard %s", (HOSTILE,), None)
    assert logging.lastResort is not None
    logging.lastResort.handle(record)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()


def test_a_table_shows_text_as_it_is() -> None:
    out = io.StringIO()
    table = TextTable((HOSTILE, "b"), [[(HOSTILE, "[bold]1[/bold]")]], title=HOSTILE)
    Console(file=out, width=400).print(table)
    shown = out.getvalue()
    assert "[bold]1[/bold]" in shown and "[red]b[/red]" in shown
    assert all(line.isprintable() for line in shown.split("\n"))
