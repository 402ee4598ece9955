"""Every kind of source becomes shards that training reads, byte for byte; what is broken is counted and left out."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from PIL import Image

from clipscale.cli.main import main
from clipscale.common import files
from clipscale.data.sample import BrokenSampleError
from clipscale.tools.data.pack import parts, verb
from clipscale.tools.data.pack.places import Cell, Place, read, resolved_root
from clipscale.tools.data.settings import PackSettings
from tests.conftest import Capture
from tests.data.shards.web import Web, serving
from tests.eval.sets import COLOURS, NAMES, picture
from tests.support.user_errors import refused
from tests.tools.data.pack.packing import (
    KINDS,
    as_coco,
    as_csv,
    as_parquet,
    as_texts_beside,
    pack_to,
    packed,
    paths,
    read_all,
    samples,
)

Write = Callable[[Path], Path]
SOURCES = files.read_yaml(Path(__file__).with_name("sources.yaml"))
MISTAKES = files.read_yaml(Path(__file__).with_name("mistakes.yaml"))


@pytest.mark.parametrize("write", KINDS.values(), ids=KINDS)
def test_pictures_of_every_source_are_packed_byte_for_byte(pictures: Path, tmp_path: Path, write: Write) -> None:
    names = paths(pictures)
    out = tmp_path / "out"
    assert pack_to(out, write(pictures)) == 0
    for path, members in zip(names, samples(out), strict=True):
        kind = {".png": "png", ".webp": "webp"}.get(Path(path).suffix, "jpg")
        assert members[kind] == (pictures / path).read_bytes()
        assert members["txt"].decode() == f"all, of {path}"
        assert json.loads(members["json"])["width"] == 24
    assert json.loads((out / "sizes.json").read_text()) == {"00000.tar": len(NAMES)}
    if write in (as_csv, KINDS["cells"]):
        assert main(["data", "check", str(out)]) == 0, "nothing is broken in it"


@pytest.mark.parametrize("case", SOURCES.values(), ids=SOURCES)
def test_what_can_be_used_is_packed_and_the_rest_is_counted(
    pictures: Path, tmp_path: Path, capsys: Capture, case: dict
) -> None:
    contents = {"JPEG": picture("red", "JPEG", (64, 64)), "TORN": picture("red", "JPEG", (64, 64))[:200]}
    for name, text in case["files"].items():
        whole = text.replace("LONG", "a" * 2_000_000).replace("NESTED", "[" * 9999)
        whole = whole.replace("DEEP", "[" * 700 + "]" * 700)
        (pictures / name).parent.mkdir(parents=True, exist_ok=True)
        (pictures / name).write_bytes(contents.get(text, whole.encode("utf-8", "surrogateescape")))
    for name, target in case.get("links", {}).items():
        (pictures / name).symlink_to(target)
    words = [word.replace("TMP", str(tmp_path)) for word in case.get("settings", [])]
    assert packed(pictures / case["source"], tmp_path / "out", *words) == (case["pairs"], case["left_out"])
    last = capsys.readouterr().out.splitlines()[-1]
    ((read, kept, left_out),) = re.findall(r"read (\d+) \w+: (\d+) packed, (\d+) left out", last)
    assert int(read) == int(kept) + int(left_out), last


def test_captions_are_decoded_or_left_out(tmp_path: Path, short_folder: Path) -> None:
    encodings = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1"]
    for name in encodings:
        (tmp_path / f"{name}.png").write_bytes(picture("red"))
        (tmp_path / f"{name}.TXT").write_bytes("a red café".encode(name))
    pairs, reasons = packed(tmp_path, short_folder / "out")
    assert pairs == dict.fromkeys([f"{name}.png" for name in sorted(encodings) if name != "latin-1"], "a red café")
    assert reasons == {"caption_not_utf8": 1}


def test_a_table_names_no_file_outside_of_its_root(pictures: Path, tmp_path: Path) -> None:
    """Links are followed first; addresses other than the web's, and those inside of others, lie outside."""
    (tmp_path / "secret.png").write_bytes(picture("blue"))
    (pictures / "link.png").symlink_to(tmp_path / "secret.png")
    (pictures / "linked").symlink_to(tmp_path)
    outside = ["../secret.png", f"{tmp_path}/secret.png", f"file://{tmp_path}/secret.png", "..\\secret.png", "link.png"]
    outside += ["linked/secret.png", "deep/../../secret.png", f"http://x.png::file://{tmp_path}/secret.png"]
    outside += [f"local://{tmp_path}/secret.png", "memory://secret.png", "s3://bucket/secret.png", "data://x"]
    rows = [
        {"image": name, "caption": "a"} for name in [*outside, "deep/red.png", f"{pictures}/deep/../deep/blue.webp"]
    ]
    (pictures / "table.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pairs, reasons = packed(pictures / "table.jsonl", tmp_path / "out")
    assert len(pairs) == 2 and reasons == {"outside_root": len(outside)}
    pairs, reasons = packed(pictures / "table.jsonl", tmp_path / "more", f"root={tmp_path}")
    assert len(pairs) == 9 and reasons == {"outside_root": 5}


def test_a_root_of_addresses_is_read(pictures: Path, tmp_path: Path) -> None:
    """fsspec's memory stands for a store as s3://. The pool's processes would not see it."""
    place = Place("memory://set/red.png", str(pictures), resolved_root("memory://set"))
    fsspec.filesystem("memory").pipe({"/set/red.png": b"red", "/settled/red.png": b"no", "/red.png": b"no"})
    assert read(place) == b"red"
    for name in ("memory://settled/red.png", "memory://set/../red.png", "memory://red.png"):
        with pytest.raises(BrokenSampleError, match="outside_root"):
            read(place._replace(name=name))


def test_folders_named_after_classes_are_said_to_be_an_evaluation_set(tmp_path: Path, capsys: Capture) -> None:
    for name in ("red", "blue"):
        (tmp_path / "shop" / name).mkdir(parents=True)
        (tmp_path / "shop" / name / "0.png").write_bytes(picture(name))
    assert pack_to(tmp_path / "out", tmp_path / "shop") == 2
    assert (
        f"evaluated as they are, eval.sets={tmp_path}/shop, and are trained on with a text" in capsys.readouterr().err
    )


def test_a_remedy_helps_where_the_mistake_was_made(pictures: Path, tmp_path: Path, capsys: Capture) -> None:
    """Nothing was packed yet: the folder of shards is taken again, with other columns and another root."""
    (tmp_path / "shop").mkdir()
    shop = tmp_path / "shop/table.csv"
    shop.write_text(f"no,words,photo of it\n1,red,{pictures}/deep/red.png\n")
    (pictures / "shop.csv").write_text("place,words\ndeep/red.png,red\n")
    assert pack_to(tmp_path / "first", pictures / "shop.csv") == 2
    assert "give 'columns=[IMAGE,CAPTION]'" in capsys.readouterr().err
    assert packed(pictures / "shop.csv", tmp_path / "first", "columns=[place,words]")[0]
    columns = "columns=[photo of it,words]"
    assert packed(shop, tmp_path / "out", columns) == ({}, {"outside_root": 1})
    assert "root=DIR" in capsys.readouterr().err
    assert packed(shop, tmp_path / "out", columns, f"root={pictures}")[0]
    (tmp_path / "files/deep").mkdir(parents=True)
    (tmp_path / "files/deep/red.png").write_bytes(picture("red"))
    assert packed(tmp_path / "files", tmp_path / "third") == ({}, {"no_caption": 1})
    (tmp_path / "files/deep/red.txt").write_text("red")
    repaired = packed(tmp_path / "files", tmp_path / "third")
    assert repaired == ({"deep/red.png": "red"}, {}), "the source's folder is as old as it was"


def test_where_two_folders_have_the_images_a_copy_of_the_caption_file_decides(
    pictures: Path, tmp_path: Path, capsys: Capture
) -> None:
    file = as_coco(pictures)
    for name in ("a", "b b"):
        shutil.copytree(pictures / "deep", pictures / name / "deep")
    shutil.rmtree(pictures / "deep")
    assert pack_to(tmp_path / "out", file) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "eval.sets" not in line and f"are in {pictures}/a and in {pictures}/b b; put all into one folder" in line
    command = line.partition("those you mean: ")[2]
    assert shlex.split(command) == ["cp", str(file), f"{pictures}/a/"], line
    subprocess.run(command, shell=True, check=True)
    pairs, reasons = packed(pictures / "a" / file.name, tmp_path / "out")
    assert len(pairs) == 6 and not reasons


@pytest.mark.parametrize("table", ["metadata.csv", "deep/metadata.csv"])
def test_the_last_line_counts_pictures_without_a_row(
    pictures: Path, tmp_path: Path, capsys: Capture, table: str
) -> None:
    above = "" if "/" in table else "deep/"
    names = [f"{above}{Path(path).name}" for path in paths(pictures)]
    (pictures / table).write_text(
        f"file_name,text\n{above}red.png,red\n./{above}green.jfif ,green\n{above}gone.png,gone\n"
    )
    assert pack_to(tmp_path / "out", pictures) == 0
    expected = "read 3 rows: 2 packed, 1 left out; 4 pictures of the folder without a row (such as deep/blue.webp)"
    assert capsys.readouterr().out.splitlines()[-1] == expected
    (pictures / table).write_text("file_name,text\n" + "".join(f"{name},all\n" for name in names))
    assert pack_to(tmp_path / "all", pictures) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "read 6 rows: 6 packed, 0 left out"


def test_several_captions_and_other_columns_are_kept(pictures: Path, tmp_path: Path) -> None:
    (pictures / "table.jsonl").write_text(
        json.dumps(
            {
                "picture": "deep/red.png",
                "short": "red",
                "long": ["all red", "red all over"],
                "score": 0.5,
                "x": {},
                "hard": ["blue"],
            }
        )
    )
    assert pack_to(tmp_path / "out", pictures / "table.jsonl", "columns=[picture,short,long]") == 0
    (members,) = samples(tmp_path / "out")
    fields = json.loads(members["json"])
    assert fields["captions"] == ["red", "all red", "red all over"] and members["txt"] == b"red"
    assert fields["hard"] == ["blue"], "texts that are hard negatives"
    assert fields["score"] == 0.5 and fields["source"] == "deep/red.png" and "x" not in fields


def test_a_tables_own_columns_keep_their_values(pictures: Path, tmp_path: Path, capsys: Capture) -> None:
    """The program has fields of three of these names. A line tells of the column that may be lost."""
    own = {"source": "flickr", "width": 9000, "height": None, "captions": ["one", "two"]}
    (pictures / "table.jsonl").write_text(json.dumps({"image": "deep/red.png", "caption": "red"} | own))
    assert pack_to(tmp_path / "one", pictures / "table.jsonl") == 0
    assert "column 'captions' is lost where a pair has several captions" in capsys.readouterr().out
    (members,) = samples(tmp_path / "one")
    assert json.loads(members["json"]) == {"source": "flickr", "width": 9000, "height": 12, "captions": ["one", "two"]}


def test_a_few_bytes_of_parquet_do_not_fill_the_memory(tmp_path: Path) -> None:
    """A group of equal pictures takes 200 MB; its cells are asked in any order."""
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (clipscale[parquet])")
    from pyarrow import parquet

    cells = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0, 1] * 2000), pyarrow.array([b"a" * 10**5, b"b"]))
    parquet.write_table(pyarrow.table({"image": cells}), tmp_path / "t.parquet", store_schema=False)
    before = pyarrow.total_allocated_bytes()
    for row in (100, 2, 1998):
        assert len(read(Cell(str(tmp_path / "t.parquet"), 0, row, "image"))) == 10**5
        assert pyarrow.total_allocated_bytes() - before < 3e7


def test_after_a_damaged_page_no_cell_is_anothers(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed (clipscale[parquet])")
    cells = [b"%05d" % i * 200 for i in range(400)]
    file = tmp_path / "t.parquet"
    layout = {"data_page_size": 9999, "write_batch_size": 8, "compression": "none", "use_dictionary": False}
    parquet.write_table(sys.modules["pyarrow"].table({"image": cells}), file, **layout)
    data = file.read_bytes()
    file.write_bytes(data.replace(data[150_000:180_000], b"\xff" * 30_000))
    assert read(Cell(str(file), 0, 99, "image")) == cells[99]
    for row in range(128, 400):
        with pytest.raises(BrokenSampleError, match="unreadable_file"):
            read(Cell(str(file), 0, row, "image"))


def test_large_pictures_are_resized_by_their_shorter_side(pictures: Path, tmp_path: Path) -> None:
    Image.new("RGB", (90, 60), COLOURS["red"]).save(pictures / "large.png")
    (pictures / "large.txt").write_text("large")
    (pictures / "deep" / "red.txt").write_text("small")
    assert pack_to(tmp_path / "out", pictures, "resize=20") == 0
    small, large = sorted(samples(tmp_path / "out"), key=lambda members: "jpg" in members)
    assert small["png"] == (pictures / "deep/red.png").read_bytes(), "its bytes are copied"
    (tmp_path / "large.jpg").write_bytes(large["jpg"])
    assert Image.open(tmp_path / "large.jpg").size == (30, 20)


@pytest.mark.parametrize(
    ("size", "words", "kept"),
    [
        ((9600, 9600), [], None),
        ((9600, 9600), ["resize=30"], (30, 30)),
        pytest.param((9600, 9600), ["resize=9600"], None, marks=pytest.mark.slow),
        ((80_000, 11), ["resize=10"], None),
    ],
)
def test_a_picture_of_more_pixels_than_training_takes_is_made_smaller_or_left_out(
    tmp_path: Path, capsys: Capture, size: tuple[int, int], words: list[str], kept: tuple[int, int] | None
) -> None:
    """Its bytes would be packed, and left out in every epoch. A JPEG has at most 65,500 columns."""
    for name, of in (("large", size), ("small", (10, 10))):
        (tmp_path / "in").mkdir(exist_ok=True)
        Image.new("1", of).save(tmp_path / f"in/{name}.png")
        (tmp_path / f"in/{name}.txt").write_text(name)
    left_out = packed(tmp_path / "in", tmp_path / "out", *words)[1]
    sizes = {m["source"]: (m["width"], m["height"]) for m in (json.loads(m["json"]) for m in samples(tmp_path / "out"))}
    assert sizes == {"small.png": (10, 10)} | ({"large.png": kept} if kept else {})
    assert left_out == ({} if kept else {"huge_image": 1})
    assert kept or "(such as large.png; resize=512 " in capsys.readouterr().out
    assert main(["data", "check", str(tmp_path / "out")]) == 0, "training takes what is packed"


def test_a_stopped_command_goes_on(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that are complete are not made again, and one that was being made is. What a kill has left of it goes."""
    monkeypatch.setattr(parts, "SHARD_SAMPLES", 2)
    source = as_csv(pictures)
    out = tmp_path / "out"
    verb.main([str(source)], PackSettings(out=str(out)))
    expected = samples(out)
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    assert len(before) == 3
    (out / "parts/00001.json").unlink()
    (out / ".00001.tar-0123456789abcdef.tmp").write_bytes(b"half of it")
    verb.main([str(source)], PackSettings(out=str(out)))
    assert not [*out.rglob("*.tmp")]
    after = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    assert [name for name in before if before[name] != after[name]] == ["00001.tar"]
    assert samples(out) == expected
    with refused(r"or with other settings \(resize\);"):
        verb.main([str(source)], PackSettings(out=str(out), resize=9))
    os.utime(source, (1, 1))
    with refused(r"packed of another source, or with other settings \(the source's date\);"):
        verb.main([str(source)], PackSettings(out=str(out)))


def test_shards_may_lie_in_the_source(pictures: Path) -> None:
    first = packed(as_texts_beside(pictures), pictures / "out")
    assert len(first[0]) == len(NAMES) and packed(pictures, pictures / "out") == first


def test_shards_have_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "SHARD_BYTES", 250)
    with parts.Shards(tmp_path, "00000") as shards:
        for number in range(5):
            shards.write({"__key__": f"{number}", "txt": b"x" * 100})
    assert shards.sizes == {"00000.tar": 3, "00000_1.tar": 2}
    assert [len(read_all(tmp_path / name)) for name in shards.sizes] == [3, 2]


@pytest.mark.parametrize(("words", "message"), MISTAKES.items())
def test_mistakes_are_one_line(pictures: Path, tmp_path: Path, capsys: Capture, words: str, message: str) -> None:
    as_csv(pictures)
    (pictures / "empty").mkdir()
    (pictures / "00000.tar").touch()
    (pictures / "heads.csv").write_text("image,caption\n")
    (pictures / "latin.csv").write_bytes(b"image,caption\na,b\na,\xe9\nb,\xe9\n")
    words = words.replace("IN", str(pictures)).replace("OUT", str(tmp_path / "out"))
    assert main(["data", "pack", *words.split()]) == 2
    said = capsys.readouterr().err.strip()
    assert message in said and "\n" not in said


def test_a_folder_with_coco_captions_is_answered_with_the_command_that_packs_them(
    pictures: Path, tmp_path: Path, capsys: Capture
) -> None:
    """The refusal leaves no empty folder."""
    (pictures / "annotations").mkdir()
    file = as_coco(pictures).rename(pictures / "annotations/captions_val2017.json")
    out = tmp_path / "out"
    assert pack_to(out, pictures) == 2
    said = capsys.readouterr().err
    assert f"its pictures are there: clipscale data pack {file})" in said
    assert [path for path in out.rglob("*") if path.is_dir()] == [out / "parts"]
    assert pack_to(out, file) == 0
    as_csv(pictures).write_text("image,caption\n")
    assert pack_to(tmp_path / "none", pictures / "table.csv") == 2 and not (tmp_path / "none").exists()


def test_without_pyarrow_one_line_names_the_extra(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    source = as_parquet(False, pictures)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert pack_to(tmp_path / "out", source) == 2
    assert "pip install 'clipscale[parquet]'" in capsys.readouterr().err


def test_pictures_at_http_addresses_are_fetched(pictures: Path, tmp_path: Path, capsys: Capture) -> None:
    """They are fetched whole from a server that sends them in pieces."""
    with serving(Web(pictures)) as web:
        web.faults = lambda number, path: "drip"
        (pictures / "table.csv").write_text(f"image,caption\n{web.url}/deep/red.png,red\n{web.url}/gone.png,gone\n")
        assert pack_to(tmp_path / "out", pictures / "table.csv") == 0
    (members,) = samples(tmp_path / "out")
    assert members["png"] == (pictures / "deep/red.png").read_bytes()
    said = capsys.readouterr()
    assert "left out: 1 unreadable_file (such as http" in said.out
    assert "gone.png; an address that could not be fetched: check it, and the network)" in said.out
