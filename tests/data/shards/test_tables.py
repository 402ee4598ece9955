"""CSV, TSV and Parquet tables and folders of pictures are read as shards, with exact order and resuming."""

import csv
import io
import json
import random
import re
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from clipscale.cli.main import main
from clipscale.common.errors import UserError
from clipscale.data.loader.host_batch import sample_id
from clipscale.data.sample import RawSample
from clipscale.data.shards import remote, tables
from clipscale.data.shards.access import EVENT, Access
from clipscale.data.shards.counts import recorded_counts
from clipscale.data.shards.listing import expand
from clipscale.data.shards.reader import ReadProblem, read_shard
from clipscale.data.shards.store import Store
from tests.data.files import Letters, picture
from tests.data.shards.web import Web, finish
from tests.data.streams import contents, flat, ids, open_stream

ROWS = 25
Config = tables.TableConfig


def captions() -> list[str]:
    return [f'row {i}, "quoted" é\nsecond line' if i % 3 else f"row {i}" for i in range(ROWS)]


def pictures(folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(ROWS):
        (folder / f"{i}.png").write_bytes(picture(i))
    return [f"{folder.name}/{i}.png" for i in range(ROWS)]


def write_table(folder: Path, kind: str) -> Path:
    names, path = pictures(folder / "images"), folder / f"pairs.{kind}"
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        table = pyarrow.table({"filepath": names, "title": captions(), "score": [i / ROWS for i in range(ROWS)]})
        parquet.write_table(table, path, row_group_size=10)
        return path
    with path.open("w", newline="") as out:
        writer = csv.writer(out, delimiter="\t" if kind == "tsv" else ",")
        writer.writerow(["filepath", "title", "score"])
        writer.writerows((name, caption, i / ROWS) for i, (name, caption) in enumerate(zip(names, captions())))
    return path


def samples(urls: list[str]) -> list[RawSample]:
    found = []
    for url in urls:
        problem = ReadProblem()
        found += list(read_shard(url, problem))
        assert problem.reason is None, problem
    return found


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet"])
def test_a_table_is_cut_into_shards_of_rows(tmp_path: Path, kind: str) -> None:
    path = write_table(tmp_path, kind)
    urls = expand(str(path), table=Config(rows=7))
    sizes = [7, 3, 7, 3, 5] if kind == "parquet" else [7, 7, 7, 4]
    assert recorded_counts(urls) == sizes, "row groups are not read twice"
    found = samples(urls)
    assert [raw.members["txt"].decode() for raw in found] == captions()
    assert [raw.key for raw in found] == [f"images/{i}.png" for i in range(ROWS)]
    assert [raw.members["png"] for raw in found] == [picture(i) for i in range(ROWS)]
    assert float(json.loads(found[5].members["json"])["score"]) == 0.2
    assert expand(str(path), table=Config(rows=7)) == urls, "the second time, from the recorded cuts"


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_epochs_over_a_table_are_exact_and_resume(tmp_path: Path, kind: str) -> None:
    path = write_table(tmp_path, kind)
    options: dict[str, Any] = {"table": Config(rows=7), "batch": 5, "shard_streams": 5}
    stream = open_stream(path, **options)
    assert stream.samples_per_epoch == ROWS
    urls = expand(str(path), table=Config(rows=7))
    expected = Counter(sample_id(url, raw.key) for url in urls for raw in samples([url]))
    assert Counter(flat(ids(stream, 5))) == expected
    position = stream.position()
    resumed = open_stream(path, position=position, **options)
    assert contents(resumed, 7) == contents(stream, 7)


def test_rows_that_are_not_wanted_are_not_opened(tmp_path: Path) -> None:
    path = write_table(tmp_path, "csv")
    (tmp_path / "images" / "3.png").unlink()
    url = expand(str(path))[0]
    assert not any(raw.damage for raw in read_shard(url, ReadProblem(), want=lambda i: i != 3))
    lost = list(read_shard(url, ReadProblem()))[3]
    assert lost.damage == "missing_file"
    stream = open_stream(path, batch=24, shard_streams=1)
    ids(stream, 1)
    ids(stream, 1)
    assert set(stream.broken) == {"missing_file"}


def test_a_table_runs_no_command(tmp_path: Path) -> None:
    """Not even with allow_pipe: the permission is for the setting, not for the rows of a table."""
    names = [f"pipe:touch {tmp_path}/ran", f"PIPE:touch {tmp_path}/ran", "table:/x.csv?image=a&caption=b#0-1@0"]
    path = tmp_path / "pairs.csv"
    path.write_text("filepath,title\n" + "".join(f"{name},a caption\n" for name in names))
    found = samples(expand(str(path), allow_pipe=True))
    assert [raw.damage for raw in found] == ["refused_file"] * 3 and not (tmp_path / "ran").exists()


def test_pictures_may_lie_in_the_table_itself(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    as_bytes = pyarrow.table({"image": [picture(1)], "text": ["a"]})
    as_record = pyarrow.table({"image": [{"bytes": picture(2), "path": "x.webp"}], "text": ["b"]})
    for number, table in enumerate((as_bytes, as_record)):
        parquet.write_table(table, tmp_path / f"{number}.parquet")
    one, two = samples(expand(f"{tmp_path}/*.parquet"))
    assert one.members["jpg"] == picture(1) and one.members["txt"] == b"a"
    assert two.members["webp"] == picture(2) and two.key == "x.webp"


def test_columns_are_named_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b\nx.png,hello\n")
    with pytest.raises(UserError, match=r"data\.table\.image=null: .*t\.csv has the columns a, b"):
        expand(str(path))
    with pytest.raises(UserError, match=r"data\.table\.caption=c:"):
        expand(str(path), table=Config(image="a", caption="c"))
    (part,) = [tables.part_of(url) for url in expand(str(path), table=Config(image="a", caption="b"))]
    assert (part.image, part.caption, part.first, part.last) == ("a", "b", 0, 1)


def test_a_table_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for name, content in (("t.parquet", b"no parquet"), ("t.csv", b"filepath,title\n\xff\xff,x\n"), ("e.csv", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=name):
            expand(str(tmp_path / name))
    with pytest.raises(UserError, match="matches no shard"):
        expand(str(tmp_path / "none.csv"))


def test_tables_are_counted_and_not_fetched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_table(tmp_path, "csv")
    assert main(["data", "stats", str(path)]) == 0
    assert f"{ROWS} samples" in capsys.readouterr().out
    assert main(["data", "check", str(path), f"out={tmp_path}/out", "table.rows=10", "workers=1"]) == 0
    assert re.search(rf"samples +{ROWS} +in 3 shards", capsys.readouterr().out)


def test_an_address_of_rows_survives_any_path() -> None:
    part = tables.Part("/a b/c?d#e/ü.csv", "i m", "c&=", "", 3, 9, "120")
    assert tables.part_of(part.url) == part


@pytest.fixture
def tiny_blocks(small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_BLOCK", 512)
    monkeypatch.setattr(remote, "LARGEST_BLOCK", 1024)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.usefixtures("tiny_blocks")
def test_a_remote_table_is_read_like_a_local_one(tmp_path: Path, web: Web, kind: str, cached: bool) -> None:
    """Also over a bad network, with the pictures beside it."""
    path = write_table(tmp_path, kind)
    options: dict[str, Any] = {"table": Config(rows=7), "batch": 5, "shard_streams": 5}
    local = open_stream(path, **options)
    stream = open_stream(f"{web.url}/{path.name}", cache=str(tmp_path / "c") if cached else None, retries=20, **options)
    assert stream.samples_per_epoch == ROWS
    rng = random.Random(2)
    web.faults = lambda number, path: rng.choice(("503", "drop", "short")) if rng.random() < 0.2 else None
    assert [found[1:] for found in contents(stream, 10)] == [found[1:] for found in contents(local, 10)]
    assert not stream.broken and finish(stream) > 5
    assert {"/images/3.png", f"/{path.name}"} <= {path for path, _ in web.requests}
    assert "prefetch-" not in str(threading.enumerate())


@pytest.mark.usefixtures("tiny_blocks")
def test_faults_beyond_the_rows_that_are_read_are_counted(tmp_path: Path, web: Web) -> None:
    lines = [f"{i}.png,{'word ' * 2000}" for i in range(ROWS)]
    (tmp_path / "pairs.csv").write_text("\n".join(["filepath,title", *lines]))
    url = tables.table_shards(f"{web.url}/pairs.csv", Config(rows=2), "data.train")[0]
    web.faults = lambda number, _: "503" if int(web.requests[number][1][6:].split("-")[0]) >= 1 << 16 else None
    store, problem = Store(), ReadProblem()
    reader = read_shard(url, problem, want=lambda _: False, store=store)
    assert next(reader) and next(reader)
    while not web.done["503"]:
        time.sleep(0.002)
    time.sleep(0.05)
    assert not list(reader) and not problem.reason
    store.collect()
    assert store.counts == {EVENT + "http_503": 1} == {EVENT + "http_503": web.done["503"]}


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.usefixtures("tiny_blocks")
def test_a_table_that_stays_away_or_changes_costs_its_rows(tmp_path: Path, web: Web, kind: str) -> None:
    path = write_table(tmp_path, kind)
    url = expand(f"{web.url}/{path.name}")[0]
    web.faults = lambda number, path: "503"
    problem = ReadProblem()
    assert list(read_shard(url, problem, store=Store(Access(retries=1)))) == []
    assert problem.reason == "unreachable_shard"
    count = len(web.requests)

    def change(number: int, _: str) -> None:
        if number == count + 2:
            path.write_bytes(path.read_bytes())

    web.faults = change  # type: ignore[assignment]
    problem = ReadProblem()
    assert len(list(read_shard(url, problem))) < ROWS and problem.reason == "changed_shard"
    with pytest.raises(UserError, match=r"none\.csv.*cannot be read"):
        expand(f"{web.url}/none.csv")


def test_pictures_lie_beside_the_table_or_where_they_say() -> None:
    place = tables.place_of
    assert place("https://host/a/t.csv?key=1", "b/0 1.png") == "https://host/a/b/0%201.png"
    assert place("s3://bucket/a/t.csv", "b/0 1.png") == "s3://bucket/a/b/0 1.png"
    assert place("/a/t.csv", "https://host/0.png") == "https://host/0.png"


def test_a_folder_of_classes_captions_by_name_and_template(tmp_path: Path) -> None:
    for name in ("red_fox", "owl"):
        pictures(tmp_path / "set" / name)
    found = samples(expand(str(tmp_path / "set")))
    assert Counter(raw.members["txt"].decode() for raw in found) == {"red fox": ROWS, "owl": ROWS}
    first = [raw.members["txt"] for raw in found[:ROWS]]
    assert 5 < first.count(b"owl") < 20, "classes are mixed"
    stream = open_stream(tmp_path / "set", batch=10, templates=["{} !"], tokenizer=Letters())
    assert stream.samples_per_epoch == 2 * ROWS
    batch = stream.next_batch()
    texts = {"".join(map(chr, row)).strip() for row in batch.tokens(0, 10).tolist()}
    assert texts == {"red fox", "owl !"}  # Letters keeps eight


def test_a_caption_file_beside_the_picture_comes_first(tmp_path: Path) -> None:
    folder = tmp_path / "set" / "owl"
    pictures(folder)
    (folder / "4.txt").write_text("an owl at night")
    found = {Path(raw.key).name: raw.members["txt"] for raw in samples(expand(str(tmp_path / "set")))}
    assert found["4.png"] == b"an owl at night" and found["5.png"] == b"owl"


def test_a_run_keeps_its_list_of_a_folder_while_another_finds_more(tmp_path: Path) -> None:
    pictures(tmp_path / "set")
    urls = expand(str(tmp_path / "set"))
    before = [raw.key for raw in samples(urls)]
    (tmp_path / "set" / "new.png").write_bytes(picture(99))
    assert len(samples(expand(str(tmp_path / "set")))) == ROWS + 1
    assert [raw.key for raw in samples(urls)] == before


def test_pixels_from_a_table_are_those_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(3))
    (tmp_path / "t.csv").write_text("image,caption\na.png,hello\n")
    from clipscale.config.data import AugmentConfig

    stream = open_stream(tmp_path / "t.csv", batch=1, augment=AugmentConfig(scale=(1.0, 1.0), ratio=(1.0, 1.0)))
    expected = np.asarray(Image.open(io.BytesIO(picture(3)))).transpose(2, 0, 1)
    assert np.array_equal(stream.next_batch().pixels(0, 1)[0].numpy(), expected)
