"""JSON is read in every form that people use; for nested rows, the printed command makes a table of them."""

import bz2
import gzip
import json
import lzma
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clipscale.cli.main import main
from clipscale.common.errors import UserError
from clipscale.tools.data.pack.pairs import pairs_of, tables_of
from clipscale.tools.data.pack.places import Place
from tests.conftest import Capture
from tests.eval.sets import picture

RED = {"a.png": ["red"], "b.png": ["blue"]}
FORMS = {
    "SBU": {"image_urls": ["a.png", "b.png"], "user_ids": ["1", "2"], "captions": ["red", "blue"]},
    "pandas": {"image": {"0": "a.png", "1": "b.png"}, "caption": {"0": "red", "1": "blue"}},
    "by picture": {"a.png": "red", "b.png": "blue"},
    "several by picture": RED,
    "kohya's": {"a.png": {"caption": "red", "tags": "x"}, "b.png": {"caption": "blue"}},
    "inside": {"info": {"year": 1}, "licenses": [], "data": [{"image": n, "caption": c[0]} for n, c in RED.items()]},
}


def read(file: Path) -> list[tuple[str, list[str]]]:
    """The picture's name and the captions of each pair."""
    pairs = pairs_of(file, tables_of(file, None), "")
    return [(pair.place.name if isinstance(pair.place, Place) else "", pair.captions) for pair in pairs]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_one_object_is_as_many_pairs_as_it_holds(tmp_path: Path, form: Any, indent: int | None) -> None:
    (tmp_path / "t.json").write_text(json.dumps(form, indent=indent))
    assert read(tmp_path / "t.json") == [("a.png", ["red"]), ("b.png", ["blue"])]


def test_one_object_may_be_one_row(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('{"image": "a.png", "caption": "red"}\n\n')
    assert read(tmp_path / "t.json") == [("a.png", ["red"])]


LLAVA = [
    {"id": "1"},
    {"image": "a.png", "conversations": [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "red"}]},
]
SWIFT = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "red"}], "images": ["a.png"]}
KARPATHY = {"filename": "a.png", "sentences": [{"tokens": ["red"], "raw": "red"}]}
CSV = b"image,caption\na.png,red\n"
XML = (
    "<rss xmlns:g='x'><channel><title>t</title><item><g:image>a.png</g:image><title>red</title></item></channel></rss>"
)
# Of a file that is not read: its name and bytes.
OTHERS = {
    "LLaVA": ("my llava.json", json.dumps(LLAVA).encode()),
    "LLaVA in lines": ("t.jsonl", "\n".join(map(json.dumps, LLAVA)).encode()),
    "ms-swift": ("it's.jsonl", json.dumps(SWIFT).encode()),
    "sentences": ("t.jsonl", json.dumps(KARPATHY).encode()),
    "gzip": ("t.csv.gz", gzip.compress(CSV)),
    "bzip2": ("t.csv.bz2", bz2.compress(CSV)),
    "xz": ("t.csv.xz", lzma.compress(CSV)),
    "gzip without its suffix": ("t.csv", gzip.compress(CSV)),
    "xml": ("t.xml", XML.encode()),
}


@pytest.mark.parametrize(("name", "data"), OTHERS.values(), ids=OTHERS)
def test_the_line_that_is_printed_makes_a_table(tmp_path: Path, name: str, data: bytes, monkeypatch: Any) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError) as error:
        tables_of(tmp_path / name, None)
    line = re.search(r"(gunzip|bunzip2|unxz|python3) .*", str(error.value))
    assert line, error.value
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path('/usr/bin')}:/bin")
    (tmp_path / "python3").symlink_to(sys.executable)
    subprocess.run(["sh", "-c", line[0]], check=True, cwd="/")
    (made,) = [path for path in tmp_path.iterdir() if path.name not in (name, "python3")]
    assert read(made) == [("a.png", ["red"])]


def test_the_line_for_texts_in_another_folder_brings_them_together(tmp_path: Path, capsys: Capture) -> None:
    source = tmp_path / "it's"
    for name in ("1", "2"):
        for folder, suffix in (("images", "png"), ("captions", "txt")):
            (source / folder / name).mkdir(parents=True)
            data = picture("red") if suffix == "png" else b"red"
            (source / folder / name / f"{name}.{suffix}").write_bytes(data)
    assert main(["data", "pack", str(source), f"out={tmp_path}/out"]) == 2
    line = re.search(r"cp -r .*(?=\))", capsys.readouterr().err)
    assert line
    subprocess.run(["sh", "-c", line[0]], check=True, cwd="/")
    assert main(["data", "pack", str(source), f"out={tmp_path}/out"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "read 4 files: 2 packed, 2 left out"


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("t.xlsx", b"PK\3\4", "save it as CSV UTF-8"),
        ("t.csv", b"PK\3\4", "save it as CSV UTF-8"),
        ("t.arrow", b"", "makes a Parquet table"),
        ("t.zip", b"PK\3\4", "unzip"),
        ("t.tsv.zst", b"", "zstd -d"),
        ("t.jsonl", b'{"image": "a", "caption": {"raw": "b"}}', "column 'caption' holds objects"),
    ],
)
def test_what_is_no_table_is_named(tmp_path: Path, name: str, data: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=re.escape(says)):
        tables_of(tmp_path / name, None)
