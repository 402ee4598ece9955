"""CSV and TSV tables are read as shards, with exact order and resuming."""

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from clipscale.common.errors import UserError
from clipscale.data.loader.host_batch import sample_id
from clipscale.data.sample import RawSample
from clipscale.data.shards import tables
from clipscale.data.shards.counts import recorded_counts
from clipscale.data.shards.listing import expand
from clipscale.data.shards.reader import ReadProblem, read_shard
from tests.data.files import picture
from tests.data.streams import contents, flat, ids, open_stream

ROWS = 25
Config = tables.TableConfig


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROWS", 7)


def captions() -> list[str]:
    return [f'row {i}, "quoted" é\nsecond line' if i % 3 else f"row {i}" for i in range(ROWS)]


def pictures(folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(ROWS):
        (folder / f"{i}.png").write_bytes(picture(i))
    return [f"{folder.name}/{i}.png" for i in range(ROWS)]


def write_table(folder: Path, kind: str) -> Path:
    names, path = pictures(folder / "images"), folder / f"pairs.{kind}"
    with path.open("w", newline="", encoding="utf-8-sig") as out:
        writer = csv.writer(out, delimiter="\t" if kind == "tsv" else ",")
        writer.writerow(["filepath", "title", "score"])
        writer.writerows((name, caption, i / ROWS) for i, (name, caption) in enumerate(zip(names, captions())))
    return path


def samples(urls: list[str]) -> list[RawSample]:
    raws = []
    for url in urls:
        problem = ReadProblem()
        raws += list(read_shard(url, problem))
        assert problem.reason is None, problem
    return raws


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_a_table_is_cut_into_shards_of_rows(tmp_path: Path, kind: str) -> None:
    path = write_table(tmp_path, kind)
    urls = expand(str(path))
    assert recorded_counts(urls) == [7, 7, 7, 4]
    raws = samples(urls)
    assert [raw.members["txt"].decode() for raw in raws] == captions()
    assert [raw.key for raw in raws] == [f"images/{i}.png" for i in range(ROWS)]
    assert [raw.members["png"] for raw in raws] == [picture(i) for i in range(ROWS)]
    assert float(json.loads(raws[5].members["json"])["score"]) == 0.2


@pytest.mark.usefixtures("small_parts")
def test_epochs_over_a_table_are_exact_and_resume(tmp_path: Path) -> None:
    path = write_table(tmp_path, "csv")
    options: dict[str, Any] = {"batch": 5, "shard_streams": 5}
    stream = open_stream(path, **options)
    assert stream.samples_per_epoch == ROWS
    urls = expand(str(path))
    assert Counter(flat(ids(stream, 5))) == Counter(sample_id(url, raw.key) for url in urls for raw in samples([url]))
    resumed = open_stream(path, position=stream.position(), **options)
    assert contents(resumed, 7) == contents(stream, 7)


def test_a_picture_that_is_missing_costs_its_row(tmp_path: Path) -> None:
    path = write_table(tmp_path, "csv")
    (tmp_path / "images" / "3.png").unlink()
    url = expand(str(path))[0]
    assert not any(raw.damage for raw in read_shard(url, ReadProblem(), want=lambda i: i != 3))
    assert [raw.damage for raw in samples([url])][2:5] == ["", "missing_file", ""]
    stream = open_stream(path, batch=24, shard_streams=1)
    ids(stream, 2)
    assert set(stream.broken) == {"missing_file"}


def test_a_table_names_files_of_its_own_folder_alone(tmp_path: Path) -> None:
    """Nothing else is opened or run, not even with allow_pipe: the writer of a table must not choose."""
    outside = tmp_path / "secret.png"
    outside.write_bytes(picture())
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "link.png").symlink_to(outside)
    names = [f"pipe:touch {tmp_path}/ran", "https://host/0.png", str(outside), "../secret.png", "link.png"]
    path = tmp_path / "set" / "pairs.csv"
    path.write_text("filepath,title\n" + "".join(f"{name},a caption\n" for name in names))
    assert [raw.damage for raw in samples(expand(str(path), allow_pipe=True))] == ["refused_file"] * 5
    assert not (tmp_path / "ran").exists()
    allowed = samples(expand(str(path), table=Config(root=str(tmp_path))))
    assert [raw.damage for raw in allowed] == ["refused_file", "refused_file", "", "", ""]


def test_columns_are_named_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b\nx.png,hello\n")
    with pytest.raises(UserError, match=r"data\.table\.image=null: .*t\.csv has the columns a, b"):
        expand(str(path))
    with pytest.raises(UserError, match=r"data\.table\.caption=c:"):
        expand(str(path), table=Config(image="a", caption="c"))
    (part,) = [tables.part_of(url) for url in expand(str(path), table=Config(image="a", caption="b"))]
    assert (part.image, part.caption, part.first, part.last) == ("a", "b", 0, 1)
    part = tables.Part("/a b/c?d#e/ü.csv", "i m", "c&=", 3, 9, 120, "/r?")
    assert tables.part_of(part.url) == part
