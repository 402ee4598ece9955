"""Every kind of source becomes shards that training reads, byte for byte; what is broken is counted and left out."""

import csv
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest
from PIL import Image

from clipscale.cli.main import main
from clipscale.common.errors import UserError
from clipscale.data.sample import BrokenSampleError
from clipscale.data.shards.reader import ReadProblem, read_shard
from clipscale.eval.sets.load import load_set
from clipscale.tools.data import pack
from clipscale.tools.data.places import Place, read, resolved
from clipscale.tools.data.settings import PackSettings
from tests.eval.sets import COLOURS, NAMES, picture

Write = Callable[[Path], Path]


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder `in` with a picture of each colour in a folder below it, of several kinds."""
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    for number, name in enumerate(NAMES):
        kind = ("PNG", "JPEG", "WEBP")[number % 3]
        (folder / "deep" / f"{name}.{kind.lower()}").write_bytes(picture(name, kind, (24, 12)))
    return folder


def paths(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in sorted((folder / "deep").iterdir())]


def samples(folder: Path) -> list[dict[str, bytes]]:
    """The members of all samples, in the order of shards."""
    problem = ReadProblem()
    read = [s.members for shard in sorted(folder.glob("*.tar")) for s in read_shard(str(shard), problem)]
    assert problem.reason is None
    return read


def as_csv(folder: Path) -> Path:
    with (folder / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("image", "caption"), *((path, f"all, of {path}") for path in paths(folder))])
    return folder / "table.csv"


TEXTS = {
    "tabs": ("table.tsv", "filepath\ttitle\n", "{0}\tall, of {0}\n", "utf-8"),
    "excel": ("table.CSV", "Image Path ; Text\r\n", "{1};all, of {0}\r\n", "utf-16"),
    "flickr30k": ("table.txt", "image_name| comment_number| comment\n", "{0}| 0| all, of {0}\n", "utf-8-sig"),
    "json": ("table.json", '{{"id": 1}}\n', '{{"image": "{0}", "prompt": "all, of {0}"}}\n', "utf-8"),
    "list": ("table.json", '[{{"id": 1, "images": []}}', ',\n{{"image": "{0}", "captions": ["all, of {0}"]}}', "utf-8"),
    "lines": ("metadata.jsonl", "", '{{"file_name": "{0}", "text": "all, of {0}"}}\n', "utf-8"),
    "split": ("deep/metadata.csv", "file_name,prompt\n", '{2},"all, of {0}"\n', "utf-8"),
}
"""Of a table: its name, its header, a row and the encoding. In a row are a path, that with Windows' separators, and its
last part."""


def as_text(form: str, folder: Path) -> Path:
    name, head, row, encoding = TEXTS[form]
    rows = [row.format(path, path.replace("/", "\\"), Path(path).name) for path in paths(folder)]
    text = head.format() + "".join(rows) + ("]" if form == "list" else "")
    (folder / name).write_text(text, encoding=encoding)
    return folder if "metadata" in name else folder / name


def as_texts_beside(folder: Path) -> Path:
    for path in paths(folder):
        (folder / path).with_suffix(".txt").write_text(f"all, of {path}\n")
    return folder


def as_parquet(inside: bool, folder: Path) -> Path:
    """With pictures inside, or with their paths."""
    import pyarrow as pa
    from pyarrow import parquet

    cells = [{"bytes": (folder / path).read_bytes(), "path": path} for path in paths(folder)]
    table = {"image": cells if inside else paths(folder), "caption": [f"all, of {path}" for path in paths(folder)]}
    parquet.write_table(pa.table(table), folder / "table.parquet", row_group_size=4)
    return folder / "table.parquet" if inside else folder


def as_coco(folder: Path) -> Path:
    images = [{"id": number, "file_name": path} for number, path in enumerate(paths(folder))]
    annotations = [{"image_id": image["id"], "caption": f"all, of {image['file_name']}"} for image in images]
    (folder / "captions.json").write_text(json.dumps({"images": images, "annotations": annotations}))
    return folder / "captions.json"


KINDS = {"csv": as_csv, "texts": as_texts_beside, "coco": as_coco}
KINDS |= {"cells": partial(as_parquet, True), "paths": partial(as_parquet, False)}
KINDS |= {form: partial(as_text, form) for form in TEXTS}


@pytest.mark.parametrize("write", KINDS.values(), ids=KINDS)
def test_pictures_of_every_source_are_packed_byte_for_byte(pictures: Path, tmp_path: Path, write: Write) -> None:
    out = tmp_path / "out"
    assert main(["data", "pack", str(write(pictures)), f"out={out}"]) == 0
    packed = samples(out)
    assert len(packed) == len(NAMES)
    for path, members in zip(paths_of_pictures(pictures), packed):
        kind = Path(path).suffix[1:].replace("jpeg", "jpg")
        assert members[kind] == (pictures / path).read_bytes()
        assert members["txt"].decode() == f"all, of {path}"
        assert json.loads(members["json"])["width"] == 24
    assert json.loads((out / "sizes.json").read_text()) == {"00000.tar": len(NAMES)}
    assert main(["data", "check", str(out)]) == 0, "nothing is broken in it"


def paths_of_pictures(folder: Path) -> list[str]:
    return [path for path in paths(folder) if not path.endswith((".txt", ".csv"))]


def packed(source: Path, out: Path, *settings: str) -> tuple[dict[str, str], dict[str, int]]:
    """The captions of the packed pairs by the pictures' names, and how many were left out for each reason."""
    status = main(["data", "pack", str(source), f"out={out}", *settings])
    reasons = {
        reason: len(names)
        for note in sorted(out.glob("parts/*.json"))
        for reason, names in json.loads(note.read_text())["left_out"].items()
    }
    pairs = {json.loads(members["json"])["source"]: members["txt"].decode() for members in samples(out)}
    assert status == (0 if pairs else 2)
    return pairs, reasons


def test_what_cannot_be_used_is_counted_and_left_out(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (pictures / "torn.jpg").write_bytes(picture("red", "JPEG", (64, 64))[:200])
    rows = [("deep/red.png", "red"), ("torn.jpg", "torn"), ("gone.jpg", "gone"), ("deep/blue.webp", " "), ("/", "all")]
    rows += [("/dev/zero", "endless"), ("deep/red.png",), ("deep/red.png", "one", "two"), ("deep/red.png", "n\0l")]
    rows += [("deep/red.png", "red", ""), ("", "nothing"), (b"\xff.jpg".decode("utf-8", "surrogateescape"), "ff")]
    with (pictures / "table.csv").open("w", newline="", errors="surrogateescape") as file:
        csv.writer(file).writerows([("image", "caption"), *rows])
        file.write(f'deep/red.png,"never closed{"a" * 2_000_000}')
    pairs, reasons = packed(pictures / "table.csv", tmp_path / "out")
    assert pairs == {"deep/red.png": "red"} and len(samples(tmp_path / "out")) == 2
    assert reasons == {
        "unreadable_image": 1,
        "unreadable_file": 3,
        "no_caption": 1,
        "bad_row": 4,
        "no_image": 1,
        "name_not_utf8": 1,
    }
    assert (
        "2 pairs in 1 shards" in (said := capsys.readouterr().out) and "1 unreadable_image (such as torn.jpg)" in said
    )


def test_a_bad_line_of_json_is_one_pair(pictures: Path, tmp_path: Path) -> None:
    lines = ["{", "[]", "3", '{"image": "deep/\\ud83d.jpg", "caption": "a"}', '{"image": {"a": 1}, "caption": "a"}']
    lines += [
        '{"image": "deep/red.png", "caption": "\\udc00"}',
        '{"image": "deep/red.png", "caption": "red"}',
        "[" * 9999,
    ]
    (pictures / "table.jsonl").write_text("\n".join(lines))
    pairs, reasons = packed(pictures / "table.jsonl", tmp_path / "out")
    assert pairs == {"deep/red.png": "red"}
    assert reasons == {"bad_row": 2, "no_image": 3, "name_not_utf8": 1, "caption_not_utf8": 1}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1"])
def test_captions_are_decoded_or_left_out(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "in").mkdir()
    for name in ("one", "two"):
        (tmp_path / f"in/{name}.png").write_bytes(picture("red"))
        (tmp_path / f"in/{name}.TXT").write_bytes("a red café".encode(encoding if name == "two" else "utf-8"))
    pairs, reasons = packed(tmp_path / "in", tmp_path / "out")
    left_out = encoding == "latin-1"
    assert pairs == dict.fromkeys(["one.png"] if left_out else ["one.png", "two.png"], "a red café")
    assert reasons == ({"caption_not_utf8": 1} if left_out else {})


def test_other_files_are_counted_by_their_suffix_and_hidden_ones_are_nobodys(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / ".ipynb_checkpoints").mkdir(parents=True)
    (folder / "more").symlink_to(tmp_path)
    bad = b"\xff.jpg".decode("utf-8", "surrogateescape")
    names = ["a.jpg", bad, "a.TIF", "b.tif", "c.heic", "d.psd", "._a.jpg", ".ipynb_checkpoints/a.jpg", "README"]
    for name in names:
        (folder / name).write_bytes(picture("red", "JPEG"))
    for name in ("a.txt", "b.txt", "lonely.txt"):
        (folder / name).write_text("red")
    pairs, reasons = packed(folder, tmp_path / "out")
    assert pairs == {"a.jpg": "red"}
    assert reasons.pop("name_not_utf8") == 1
    assert reasons == {".tif": 2, ".heic": 1, ".psd": 1, ".txt": 1, "no_suffix": 1, "linked_folder": 1}


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


def test_a_folders_links_are_bounded_too(pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("password")
    (pictures / "deep/red.txt").symlink_to(tmp_path / "secret")
    (pictures / "deep/blue.txt").write_text("blue")
    pairs, reasons = packed(pictures, tmp_path / "out")
    assert pairs == {"deep/blue.webp": "blue"} and reasons["outside_root"] == 1


def test_a_root_of_addresses_is_read(pictures: Path, tmp_path: Path) -> None:
    """As by s3://, here of fsspec's memory. The pool's processes would not see it."""
    place = Place("memory://set/red.png", str(pictures), resolved("memory://set"))
    fsspec.filesystem("memory").pipe({"/set/red.png": b"red", "/settled/red.png": b"no", "/red.png": b"no"})
    assert read(place) == b"red"
    for name in ("memory://settled/red.png", "memory://set/../red.png", "memory://red.png"):
        with pytest.raises(BrokenSampleError, match="outside_root"):
            read(place._replace(name=name))


def test_paths_are_looked_for_below_the_root_too(pictures: Path, tmp_path: Path) -> None:
    """A table whose pictures lie in a folder beside it, as many sets are published."""
    (tmp_path / "captions.txt").write_text("image,caption\nred.png,red\nC:\\red.png,red\n")
    pairs, reasons = packed(tmp_path / "captions.txt", tmp_path / "out", f"root={pictures}/deep")
    assert pairs == {"red.png": "red"} and reasons == {"windows_path": 1}


def test_a_remedy_helps_where_the_mistake_was_made(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing was packed yet: the folder of shards is taken again, with other columns and another root."""
    (tmp_path / "shop").mkdir()
    shop = tmp_path / "shop/table.csv"
    shop.write_text(f"no,words,photo of it\n1,red,{pictures}/deep/red.png\n")
    (pictures / "shop.csv").write_text("place,words\ndeep/red.png,red\n")
    assert main(["data", "pack", str(pictures / "shop.csv"), f"out={tmp_path / 'first'}"]) == 2
    assert "give 'columns=[IMAGE,CAPTION]'" in capsys.readouterr().err
    assert packed(pictures / "shop.csv", tmp_path / "first", "columns=[place,words]")[0]
    columns = "columns=[photo of it,words]"
    assert packed(shop, tmp_path / "out", columns) == ({}, {"outside_root": 1})
    assert "root=DIR" in capsys.readouterr().err
    assert packed(shop, tmp_path / "out", columns, f"root={pictures}")[0]


@pytest.mark.parametrize("suffix", ["jpg", "JPG", "jfif", "jpe", "mpo"])
def test_a_phones_pictures_are_packed_as_jpeg(tmp_path: Path, suffix: str) -> None:
    """The name is that of the content, which readers take."""
    other = Image.new("RGB", (8, 8), "blue")
    Image.new("RGB", (8, 8), "red").save(tmp_path / "mpo", "MPO", save_all=True, append_images=[other])
    folder = tmp_path / "in"
    folder.mkdir()
    for name, data in (("one", (tmp_path / "mpo").read_bytes()), ("two", picture("red", "JPEG"))):
        (folder / f"{name}.{suffix}").write_bytes(data)
        (folder / f"{name}.txt").write_text(name)
    assert main(["data", "pack", str(folder), f"out={tmp_path / 'out'}"]) == 0
    assert [sorted(members) for members in samples(tmp_path / "out")] == [["jpg", "json", "txt"]] * 2
    assert main(["data", "check", str(tmp_path / "out")]) == 0, "all are usable"


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
    columns = "columns=[picture,short,long]"
    assert main(["data", "pack", str(pictures / "table.jsonl"), f"out={tmp_path / 'out'}", columns]) == 0
    (members,) = samples(tmp_path / "out")
    fields = json.loads(members["json"])
    assert fields["captions"] == ["red", "all red", "red all over"] and members["txt"] == b"red"
    assert fields["hard"] == ["blue"], "texts that are hard negatives"
    assert fields["score"] == 0.5 and fields["source"] == "deep/red.png" and "x" not in fields


def test_a_part_is_held_out_by_the_pictures_name(pictures: Path, tmp_path: Path) -> None:
    """Both captions of a picture are on one side, also where the source's order is another."""
    sides = []
    for order in (1, -1):
        rows = [{"image": path, "caption": f"{n} {path}"} for path in paths(pictures) for n in ("one", "two")][::order]
        (pictures / "table.jsonl").write_text("\n".join(map(json.dumps, rows)))
        out = tmp_path / f"out{order}"
        assert main(["data", "pack", str(pictures / "table.jsonl"), f"out={out}", "holdout=40%"]) == 0
        held = {json.loads(members["json"])["source"] for members in samples(out / "holdout")}
        kept = {json.loads(members["json"])["source"] for members in samples(out)}
        assert held and kept and not held & kept
        assert len(samples(out / "holdout")) == 2 * len(held)
        assert load_set(out / "holdout").kind == "pairs"
        sides.append(held)
    assert sides[0] == sides[1]


def test_large_pictures_are_resized_by_their_shorter_side(pictures: Path, tmp_path: Path) -> None:
    Image.new("RGB", (90, 60), COLOURS["red"]).save(pictures / "large.png")
    (pictures / "large.txt").write_text("large")
    (pictures / "deep" / "red.txt").write_text("small")
    assert main(["data", "pack", str(pictures), f"out={tmp_path / 'out'}", "resize=20"]) == 0
    small, large = sorted(samples(tmp_path / "out"), key=lambda members: "jpg" in members)
    assert small["png"] == (pictures / "deep/red.png").read_bytes(), "its bytes are copied"
    (tmp_path / "large.jpg").write_bytes(large["jpg"])
    assert Image.open(tmp_path / "large.jpg").size == (30, 20)


def test_a_stopped_command_goes_on(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that are complete are not made again, and one that was being made is. What a kill has left of it goes."""
    monkeypatch.setattr(pack, "SHARD_SAMPLES", 2)
    source, out = as_csv(pictures), tmp_path / "out"
    pack.main([str(source)], PackSettings(out=str(out)))
    expected = samples(out)
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    assert len(before) == 3
    (out / "parts/00001.json").unlink()
    (out / ".00001.tar-0123456789abcdef.tmp").write_bytes(b"half of it")
    pack.main([str(source)], PackSettings(out=str(out)))
    assert not [*out.rglob("*.tmp")]
    after = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    assert [name for name in before if before[name] != after[name]] == ["00001.tar"]
    assert samples(out) == expected
    with pytest.raises(UserError, match="packed of another source, or with other settings"):
        pack.main([str(source)], PackSettings(out=str(out), resize=9))
    os.utime(source, (1, 1))
    with pytest.raises(UserError, match="packed of another source, or with other settings"):
        pack.main([str(source)], PackSettings(out=str(out)))


def test_shards_may_lie_in_the_source(pictures: Path) -> None:
    first = packed(as_texts_beside(pictures), pictures / "out")
    assert len(first[0]) == len(NAMES) and packed(pictures, pictures / "out") == first


def test_shards_have_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "SHARD_BYTES", 250)

    def made() -> Iterator[dict[str, object]]:
        for number in range(5):
            yield {"__key__": f"{number}", "txt": b"x" * 100}

    assert pack.write_shards(tmp_path, "00000", made()) == {"00000.tar": 3, "00000_1.tar": 2}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{in}/none.csv"], "there is no such file"),
        (["{in}/deep/red.png"], "give a folder, a table"),
        (["{in}/table.csv", "columns=[photo,caption]"], "table.csv has no column 'photo'; it has image, caption"),
        (["{in}/table.csv", "holdout=1"], "holdout=1: give a share below 100%"),
        (["{in}/table.csv", "out={in}"], "was not written by this command"),
        (["{in}/empty"], "no pair could be packed: it is empty"),
        (["{in}/latin.csv"], "line 3 is not UTF-8, and no byte order mark says what it is; convert the table: iconv"),
        (["{in}/table.csv", "root={in}/none"], "is no folder"),
        ([], "give one source"),
    ],
)
def test_mistakes_are_one_line(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    as_csv(pictures)
    (pictures / "empty").mkdir()
    (pictures / "latin.csv").write_bytes(b"image,caption\na,b\na,\xe9\nb,\xe9\n")
    given = [f"out={tmp_path / 'out'}", *(word.format(**{"in": pictures}) for word in words)]
    if sum(word.startswith("out=") for word in given) > 1:
        given = given[1:]
    assert main(["data", "pack", *given]) == 2
    said = capsys.readouterr().err.strip()
    assert message in said and "\n" not in said


def test_the_trainer_does_not_need_pyarrow(pictures: Path, tmp_path: Path) -> None:
    source = as_parquet(False, pictures)
    code = "import sys; sys.modules['pyarrow.parquet'] = None; from clipscale.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "data", "pack", str(source), f"out={tmp_path / 'out'}"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2 and "pip install 'clipscale[parquet]'" in result.stderr


def test_addresses_are_fetched(pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handler = partial(SimpleHTTPRequestHandler, directory=str(pictures))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        (pictures / "table.csv").write_text(f"image,caption\n{address}/deep/red.png,red\n{address}/gone.png,gone\n")
        assert main(["data", "pack", str(pictures / "table.csv"), f"out={tmp_path / 'out'}"]) == 0
        server.shutdown()
    (members,) = samples(tmp_path / "out")
    assert members["png"] == (pictures / "deep/red.png").read_bytes()
    said = capsys.readouterr()
    assert "left out: 1 unreadable_file" in said.out + said.err
