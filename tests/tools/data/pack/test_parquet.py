"""A Parquet table's pairs are read from every type that writers use, and one bad cell costs one pair."""

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from clipscale.data.sample import BrokenSampleError
from clipscale.tools.data.pack.pairs import pairs_of, tables_of
from clipscale.tools.data.pack.parts import captions_of
from clipscale.tools.data.pack.places import read
from tests.eval.sets import picture
from tests.support.user_errors import refused

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed (clipscale[parquet])")
parquet = pytest.importorskip("pyarrow.parquet")
RED = picture("red")
BLUE = picture("blue")
Made = Callable[[dict[str, Any]], Path]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Writes a table beside `red.png` and `blue.png`."""
    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "blue.png").write_bytes(BLUE)

    def write(columns: dict[str, Any]) -> Path:
        parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
        return tmp_path / "t.parquet"

    return write


def pairs(file: Path, columns: list[str] | None = None) -> list[tuple[bytes, list[str]] | str]:
    """The picture and captions of each pair, or why it is left out."""
    found: list[tuple[bytes, list[str]] | str] = []
    for pair in pairs_of(file, tables_of(file, columns), ""):
        try:
            captions = captions_of(pair)
            found.append((read(pair.place), captions))
        except BrokenSampleError as error:
            found.append(error.reason)
    return found


def broken_texts(*texts: bytes) -> Any:
    """A column of texts, unchecked."""
    column = pa.array(texts, pa.binary())
    return pa.StringArray.from_buffers(len(texts), *column.buffers()[1:])


STRUCT = pa.struct({"bytes": pa.binary(), "path": pa.string()})
IMAGES = {
    "bytes": lambda: pa.array([RED, BLUE]),
    "large": lambda: pa.array([RED, BLUE], pa.large_binary()),
    "view": lambda: pa.array([RED, BLUE], pa.binary_view()),
    "dictionary": lambda: pa.array([RED, BLUE]).dictionary_encode(),
    "struct": lambda: pa.array([{"bytes": RED, "path": "x.png"}, {"bytes": BLUE, "path": None}], STRUCT),
    "paths in a struct": lambda: pa.array([{"bytes": None, "path": "red.png"}, {"path": "blue.png"}], STRUCT),
    "paths": lambda: pa.array(["red.png", "blue.png"]),
    "paths as bytes": lambda: pa.array([b"red.png", b"blue.png"]),
    "paths in a dictionary": lambda: pa.array(["red.png", "blue.png"]).dictionary_encode(),
}
TEXTS = {
    "bytes": lambda: pa.array([b"caf\xc3\xa9", b"blue"]),
    "large bytes": lambda: pa.array(["café".encode(), b"blue"], pa.large_binary()),
    "dictionary": lambda: pa.array(["café", "blue"]).dictionary_encode(),
    "view": lambda: pa.array(["café", "blue"], pa.string_view()),
    "large": lambda: pa.array(["café", "blue"], pa.large_string()),
    "lists": lambda: pa.array([["café"], ["blue"]]),
    "large lists of bytes": lambda: pa.array([["café".encode()], [b"blue"]], pa.large_list(pa.binary())),
}


@pytest.mark.parametrize("image", IMAGES.values(), ids=IMAGES)
def test_pictures_of_every_type_are_read(made: Made, image: Callable[[], Any]) -> None:
    assert pairs(made({"image": image(), "caption": ["café", "blue"]})) == [(RED, ["café"]), (BLUE, ["blue"])]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_captions_of_every_type_are_read(made: Made, text: Callable[[], Any]) -> None:
    assert pairs(made({"image": ["red.png", "blue.png"], "caption": text()})) == [(RED, ["café"]), (BLUE, ["blue"])]


@pytest.mark.parametrize("image", [[RED, BLUE], ["red.png", "blue.png"]], ids=["bytes", "paths"])
def test_one_bad_cell_is_one_pair(made: Made, image: list[Any]) -> None:
    """The cell is a caption's. In other columns it costs nothing, and a date beyond the year 9999 is not read."""
    far = pa.array([2**61, 0], pa.int64()).cast(pa.timestamp("us"))
    zone = pa.array([datetime(2000, 1, 1)] * 2).cast(pa.timestamp("us", "Nowhere/Atlantis"))
    more = {"shop": broken_texts(b"caf\xe9", b"x"), "taken": far, "zone": zone, "score": [0.5, 1.5]}
    file = made({"image": image, "caption": broken_texts(b"red", b"caf\xe9"), **more})
    assert pairs(file) == [(RED, ["red"]), "caption_not_utf8"]
    (table,) = tables_of(file, None)
    assert table.remarks == ["not read: taken (timestamp[us])", "not read: zone (timestamp[us, tz=Nowhere/Atlantis])"]
    first, _ = pairs_of(file, [table], "")
    assert first.fields["score"] == 0.5


def test_a_path_in_a_cell_leads_to_no_file_outside(made: Made, tmp_path: Path) -> None:
    """The file lies below the table's folder, as in other tables, or it is counted with the reason."""
    outside = ["/etc/passwd", "../secret.png", "memory://red.png", "gone.png"]
    cells = pa.array([{"bytes": None, "path": path} for path in outside] + [{"bytes": None, "path": None}], STRUCT)
    (tmp_path.parent / "secret.png").write_bytes(RED)
    found = pairs(made({"image": cells, "caption": ["a"] * 5}))
    assert found == ["outside_root"] * 3 + ["unreadable_file", "no_image"]
    assert pairs(made({"image": [b"../secret.png"], "caption": ["a"]})) == ["outside_root"]


def test_a_column_that_cannot_be_read_is_one_line(made: Made) -> None:
    file = made({"image": [RED], "caption": [{"raw": "red"}], "messages": [[{"role": "user"}]]})
    with refused("column 'caption' holds struct<raw: string>, which is neither texts nor pictures"):
        tables_of(file, None)
    with refused("column 'messages' holds list"):
        tables_of(file, ["image", "messages"])


def test_of_a_column_that_is_given_twice_the_last_one_counts(tmp_path: Path) -> None:
    columns = [pa.array([BLUE]), pa.array([RED]), pa.array(["blue"]), pa.array(["red"])]
    names = ["image", "image", "caption", "caption"]
    parquet.write_table(pa.Table.from_arrays(columns, names=names), tmp_path / "t.parquet")
    (tmp_path / "t.csv").write_text("image,caption,caption\nx.png,blue,red\n")
    assert pairs(tmp_path / "t.parquet") == [(RED, ["red"])]
    for name in ("t.parquet", "t.csv"):
        (table,) = tables_of(tmp_path / name, None)
        assert "column 'caption' is given twice; the last one counts" in table.remarks


@pytest.mark.parametrize("column_type", [pa.null(), pa.string()], ids=str)
def test_a_table_without_rows_has_no_pairs(made: Made, column_type: Any) -> None:
    """pandas writes columns of nulls."""
    assert pairs(made({name: pa.array([], column_type) for name in ("image", "caption")})) == []
