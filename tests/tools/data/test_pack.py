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

import pytest
from PIL import Image

from clipscale.cli.main import main
from clipscale.common.errors import UserError
from clipscale.data.shards.reader import ReadProblem, read_shard
from clipscale.eval.sets.load import load_set
from clipscale.tools.data import pack
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


def as_tsv(folder: Path) -> Path:
    rows = [f"{path}\tall, of {path}" for path in paths(folder)]
    (folder / "table.tsv").write_text("\n".join(["filepath\ttitle", *rows]) + "\n")
    return folder / "table.tsv"


def as_imagefolder(folder: Path) -> Path:
    rows = [json.dumps({"file_name": path, "text": f"all, of {path}"}) for path in paths(folder)]
    (folder / "metadata.jsonl").write_text("\n".join(rows) + "\n\n")
    return folder


def as_texts_beside(folder: Path) -> Path:
    for path in paths(folder):
        (folder / path).with_suffix(".txt").write_text(f"all, of {path}\n")
    return folder


def as_parquet_of_pictures(folder: Path) -> Path:
    import pyarrow as pa
    from pyarrow import parquet

    values = [{"bytes": (folder / path).read_bytes(), "path": path} for path in paths(folder)]
    table = pa.table({"image": values, "caption": [f"all, of {path}" for path in paths(folder)]})
    parquet.write_table(table, folder / "table.parquet", row_group_size=4)
    return folder / "table.parquet"


def as_parquet_of_paths(folder: Path) -> Path:
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.table({"image": paths(folder), "caption": [f"all, of {path}" for path in paths(folder)]})
    parquet.write_table(table, folder / "table.parquet")
    return folder


def as_coco(folder: Path) -> Path:
    images = [{"id": number, "file_name": path} for number, path in enumerate(paths(folder))]
    annotations = [{"image_id": image["id"], "caption": f"all, of {image['file_name']}"} for image in images]
    (folder / "captions.json").write_text(json.dumps({"images": images, "annotations": annotations}))
    return folder / "captions.json"


KINDS = [as_csv, as_tsv, as_imagefolder, as_texts_beside, as_parquet_of_pictures, as_parquet_of_paths, as_coco]


@pytest.mark.parametrize("write", KINDS, ids=lambda write: write.__name__)
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
    return [path for path in paths(folder) if not path.endswith(".txt")]


def test_what_cannot_be_used_is_counted_and_left_out(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (pictures / "torn.jpg").write_bytes(picture("red", "JPEG", (64, 64))[:200])
    rows = [("deep/red.png", "red"), ("torn.jpg", "torn"), ("gone.jpg", "gone"), ("deep/blue.webp", " "), ("/", "all")]
    rows += [("/dev/zero", "endless")]
    with (pictures / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("image", "caption"), *rows])
    assert main(["data", "pack", str(pictures / "table.csv"), f"out={tmp_path / 'out'}"]) == 0
    said = capsys.readouterr()
    for expected in (
        "1 pairs in 1 shards",
        "1 unreadable_image (such as torn.jpg)",
        "3 unreadable_file",
        "1 no_caption",
    ):
        assert expected in said.out + said.err


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
        (["{in}/latin.csv"], "cannot be read"),
        ([], "give one source"),
    ],
)
def test_mistakes_are_one_line(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    as_csv(pictures)
    (pictures / "empty").mkdir()
    (pictures / "latin.csv").write_bytes(b"image,caption\na,\xe9\n")
    given = [f"out={tmp_path / 'out'}", *(word.format(**{"in": pictures}) for word in words)]
    if sum(word.startswith("out=") for word in given) > 1:
        given = given[1:]
    assert main(["data", "pack", *given]) == 2
    said = capsys.readouterr().err.strip()
    assert message in said and "\n" not in said


def test_the_trainer_does_not_need_pyarrow(pictures: Path, tmp_path: Path) -> None:
    source = as_parquet_of_paths(pictures)
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
