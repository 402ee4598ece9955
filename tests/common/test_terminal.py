"""Text of strangers is printed without obeying it: no control character, no line break, no markup reaches the terminal."""

import ast
import io
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from clipscale.cli.main import main
from clipscale.common import terminal
from clipscale.common.terminal import LONGEST, printable
from clipscale.common.units import parse_count, whole_number
from clipscale.config.presets import PACKAGE
from clipscale.report.table import TextTable

HOSTILE = "a\x1b]0;title\x07\x9b31m\nerror: [red]b[/red]\u202e\ud800\r"
ANY = st.text(st.characters(categories=None, codec=None))
OWN_OUTPUT = ("terminal.py", "cli/help.py", "cli/main.py", "doctor.py")
"""Files whose `print` writes our own text, such as help, scripts of a shell and records."""


@given(ANY)
def test_printable_text_has_no_control_characters_and_loses_nothing(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable() or not shown
    shown.encode()
    if text.isprintable():
        assert shown == text


def test_an_error_is_one_printable_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([HOSTILE]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].isprintable() and "[red]b[/red]" in lines[0]


def test_a_long_error_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["x" * 100_000]) == 2
    assert len(capsys.readouterr().err) < LONGEST + 10


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
    table.html().encode()


def test_only_files_with_our_own_text_use_print() -> None:
    """All others use `say`, which makes their text printable."""
    for file in sorted(PACKAGE.rglob("*.py")):
        name = str(file.relative_to(PACKAGE))
        if not name.startswith(OWN_OUTPUT):
            calls = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Call)]
            lines = [n.lineno for n in calls if isinstance(n.func, ast.Name) and n.func.id == "print"]
            assert not lines, f"{name}, lines {lines}: use clipscale.common.terminal.say"


def test_no_file_trusts_isdigit() -> None:
    for file in sorted(PACKAGE.rglob("*.py")):
        assert ".isdigit()" not in file.read_text(), f"{file}: use clipscale.common.units.whole_number"


@given(st.one_of(ANY, st.integers(min_value=0).map(str), st.text("0123456789²٣", min_size=1)))
def test_a_whole_number_is_read_or_refused(text: str) -> None:
    found = whole_number(text)
    assert found is None or str(found) == text.lstrip("0") or found == 0


@given(st.one_of(ANY, st.integers(min_value=0).map(str), st.just("9" * 5000)))
def test_a_count_is_read_or_refused(text: str) -> None:
    try:
        assert parse_count(text) >= 0
    except ValueError:
        return


def test_the_step_of_a_checkpoint_may_be_anything(tmp_path: Path) -> None:
    from clipscale.checkpoint import locate

    for which in ("²", "9" * 5000, "٣", "x"):
        assert locate(tmp_path, which) == Path(which)
