"""Tables of text, and of evaluation results."""

import os
import sys
from pathlib import Path

import pytest

from clipscale.log.table import TextTable, result_tables, show, with_start
from tests.conftest import Capture
from tests.support.terminals import on_terminal


def test_tables_group_sets_by_their_metrics() -> None:
    retrieval = {"image_to_text_r1": 0.25, "text_to_image_r1": 0.5, "images": 1500, "captions": 7500, "broken": 0}
    classes = {"top1": 0.8123, "images": 10, "broken": 2}
    first, second = result_tables({"a": classes, "coco": retrieval, "b": classes | {"broken": 0}}, "run")
    assert (first.title, second.title) == ("run", "")
    assert first.heads == ["set", "images", "left out", "top-1 %"]
    assert first.rows == [["a", "10", "2", "81.2"], ["b", "10", "0", "81.2"]]
    assert second.rows == [["coco", "1,500", "7,500", "25.0", "50.0"]]


def test_a_set_that_a_run_began_with_has_its_start_its_end_and_the_difference() -> None:
    start = {"a": {"top1": 0.5, "loss": 1.25001}, "b": {"top1": 0.1}}
    (table,) = result_tables(with_start({"a": {"top1": 0.3, "loss": 1.25}}, start))
    assert table.rows[:2] == [["a, start", "50.0", "1.2500"], ["a, end", "30.0", "1.2500"]]
    assert table.rows[2:] == [["a, difference", "-20.0", "0.0000"]], "no -0.0000"
    other = {"b": {"top1": 0.1, "top5": 0.5}, "c": {"top1": 0.1}}
    assert with_start(other, start) == other, "of other metrics, and of another set"


def test_nine_columns_fit_a_plain_terminal_and_markup_is_printed_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    shares = {f"{direction}_r{k}": 1.0 for direction in ("image_to_text", "text_to_image") for k in (1, 5, 10)}
    for name, value in {"FORCE_COLOR": "1", "TERM": "dumb"}.items():  # to rich a terminal of 80 columns
        monkeypatch.setenv(name, value)
    show(*result_tables({"flickr30k-test": shares | {"images": 31000, "captions": 155000, "broken": 0}}))
    text = capsys.readouterr().out
    assert "flickr30k-test" in text and "155,000" in text and text.count("100.0") == 6, text
    show(TextTable(["name", "count"], [("[bold]x[/bold]", "1"), ("short row",)], title="a [title]"))
    text = capsys.readouterr().out
    assert "a [title]" in text and "[bold]x[/bold]      1" in text


def test_a_pipe_gets_whole_lines_without_blanks_at_their_ends(capsys: Capture) -> None:
    versions = ", ".join(f"package{number} 1.{number}" for number in range(40))
    show(TextTable(("", ""), [("ok", versions), ("note", "short")]), TextTable(("set", "top-1 %"), [("a", "1.0")]))
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"ok   {versions}", "note short"]
    assert [line for line in lines if line != line.rstrip()] == []


@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}])
def test_bold_is_left_out_where_the_user_wants_no_colours(tmp_path: Path, variables: dict[str, str]) -> None:
    code = "from clipscale.log.table import TextTable, show; show(TextTable(('set', 'top-1 %'), [('a', '1.0')]))"
    _, output = on_terminal([sys.executable, "-c", code], tmp_path, {**os.environ, **variables})
    assert ("\x1b[1m" in output) == (not variables)
    assert not output.rstrip("\r\n").endswith("\x1b[K") and output.count("\x1b[K") <= 1
