"""Rows in quotes are read as they were written, and a quote that nothing closes costs at most its own row."""

import csv
import io
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipscale.common import files
from clipscale.tools.data.pack.separated import Separated
from clipscale.tools.data.pack.tables import open_table
from tests.conftest import Capture

CASES = files.read_yaml(Path(__file__).with_name("quotes.yaml"))
CAPTIONS = st.lists(st.sampled_from(["a dog", '"', '""', ", ", "\n", "\r\n", "\t", ";", "5'", " "]), max_size=8)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_quote_is_a_letter_where_its_line_alone_is_a_row(tmp_path: Path, case: dict) -> None:
    """The cases have captions by row; null is a row that cannot be read."""
    file = tmp_path / case.get("name", "t.csv")
    file.write_text(case["table"], newline="")
    table = open_table(file, None)
    rows = [row and (row[table.columns[0]], row[table.columns[1]]) for _, row in table.rows()]
    assert rows == [row and tuple(row) for row in case["rows"]]


@pytest.mark.parametrize(
    ("rows", "escaped_at"),
    [
        (["a.jpg,red", r'b.jpg,"a 5\" screen"', r'c.jpg,"a \"c\""'], 3),
        ([r'a.jpg,"a 5\", and more"'], 2),
        ([r'a.jpg,"a 5\""'], 2),
        ([r'a.jpg,"C:\"', r'b.jpg,"a \"" b"', r"c.jpg,5\" wide", 'd.jpg,"a 5" screen"'], 0),
        ([r'a.jpg,"he ""x\"",', 'more"'], 0),
    ],
)
def test_a_line_warns_of_quotes_that_a_backslash_escapes(
    tmp_path: Path, capsys: Capture, rows: list[str], escaped_at: int
) -> None:
    """Spark and MySQL write them. Backslashes of a correct table are letters."""
    (tmp_path / "t.csv").write_text("\n".join(["image,caption", *rows, ""]))
    assert [*open_table(tmp_path / "t.csv", None).rows()]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == bool(escaped_at), said
    for line in said:
        assert f"t.csv: row {escaped_at} has a quote" in line and 'write such quotes doubled, ""' in line


@pytest.mark.parametrize("at", [[2], [0], [2, 4000], [4999], range(0, 5000, 3)], ids=str)
@pytest.mark.parametrize(("name", "row"), [("t.tsv", "img/{0}.jpg\t{1}"), ("t.csv", "{1},img/{0}.jpg")])
def test_no_row_of_a_large_table_is_lost_to_a_quote(tmp_path: Path, name: str, row: str, at: list[int]) -> None:
    """The table has more bytes than one value may have."""
    head = row.format("", "caption").replace("img/.jpg", "image")
    captions = ['"' * (n in at) + f"{n} " + "a red square " * 20 for n in range(5000)]
    (tmp_path / name).write_text("\n".join([head, *(row.format(n, c) for n, c in enumerate(captions))]) + "\n")
    rows = [row for _, row in open_table(tmp_path / name, None).rows()]
    assert [row and row["caption"] for row in rows] == [caption.strip() for caption in captions]


@settings(max_examples=80, deadline=None)
@given(captions=st.lists(CAPTIONS.map("".join), min_size=1, max_size=4), mark=st.sampled_from(",;\t"))
def test_what_a_program_has_quoted_is_read_as_it_was(captions: list[str], mark: str) -> None:
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=mark).writerows((f"{n}.jpg", caption) for n, caption in enumerate(captions))
    rows = [*Separated(mark, ["image", "caption"], "image").rows(io.StringIO(text.getvalue(), newline=""))]
    assert [row for _, row in rows] == [
        {"image": f"{n}.jpg", "caption": caption.strip()} for n, caption in enumerate(captions)
    ]


def test_lines_that_open_quotes_take_time_by_their_number() -> None:
    """Each of them seems to begin a value that goes on for ever."""
    began = time.process_time()
    rows = [*Separated(",", ["image", "caption"], "image").rows(['x","red\n'] * 3000)]
    assert [number for number, _ in rows] == [*range(1, 3001)]
    assert time.process_time() - began < 10
