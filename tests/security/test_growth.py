"""Small files that claim to be large: they cost one clear line, little memory and little time."""

import bz2
import gzip
import lzma
import os
import sqlite3
import tarfile
import time
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clipscale.cli.main import main
from clipscale.common.errors import UserError
from clipscale.data.shards import index, index_file, listing, scan
from clipscale.data.shards.counts import recorded_counts
from clipscale.data.shards.listing import expand
from clipscale.data.shards.reader import ReadProblem, read_shard
from clipscale.data.shards.store import Store
from clipscale.eval.sets.load import load_set
from tests.data.files import picture, sample, write_shards, write_tar
from tests.security.limits import bounded

# -- indexes ----------------------------------------------------------------------------------------------------------

RECURSIVE = (
    "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT '0.tar' AS name, n AS size, '' AS stamp, "
)
COLUMNS = "name TEXT PRIMARY KEY, size INT, stamp TEXT, samples INT, sha256 TEXT, totals TEXT, reason TEXT, detail TEXT, places BLOB"
SCHEMAS = {
    "view": f"CREATE VIEW shards AS {RECURSIVE} 1 AS samples, '' AS sha256, '{{}}' AS totals, '' AS reason, '' AS detail, "
    "'' AS places FROM r",
    "generated": f"CREATE TABLE shards ({COLUMNS}, more TEXT GENERATED ALWAYS AS (hex(zeroblob(500000000))))",
    "trigger": f"CREATE TABLE shards ({COLUMNS}); CREATE TRIGGER t AFTER INSERT ON shards BEGIN DELETE FROM shards; END",
    "index": f"CREATE TABLE shards ({COLUMNS}); CREATE INDEX i ON shards (hex(zeroblob(1000)))",
    "other": "CREATE TABLE others (a)",
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_an_index_with_another_schema_is_not_read(
    tmp_path: Path, schema: str, caplog: pytest.LogCaptureFixture
) -> None:
    (path,) = write_shards(tmp_path, [3], sized=False)
    with closing(sqlite3.connect(tmp_path / index.FILE)) as base:
        base.executescript(SCHEMAS[schema])
    with bounded():
        assert recorded_counts([str(path)]) == [None] and "cannot be read" in caplog.text
        assert scan.update_indexes([str(path)]).read == 1
    assert recorded_counts([str(path)]) == [3]
    with closing(sqlite3.connect(tmp_path / index.FILE)) as base:
        assert base.execute("SELECT type FROM sqlite_master WHERE sql NOT NULL").fetchall() == [("table",)]


def indexed(folder: Path) -> tuple[Path, Path]:
    (path,) = write_shards(folder, [3], sized=False)
    scan.update_indexes([str(path)])
    return path, folder / index.FILE


def changed(path: Path, column: str, value: Any) -> None:
    with closing(sqlite3.connect(path)) as base:
        base.execute(f"UPDATE shards SET {column} = ?", [value])
        base.commit()


BOMB = "zeros"
"""Stands for places that unpack to twice the bound."""


@pytest.mark.parametrize("places", [BOMB, b"x", b"", zlib.compress(b"\xff" * 400), "text", 5])
def test_offsets_of_an_index_take_what_the_shard_can_have(
    tmp_path: Path, places: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path, file = indexed(tmp_path)
    changed(file, "places", zlib.compress(bytes(1 << 27), 1) if places is BOMB else places)
    opened = Store().open(str(path))
    with opened.stream, bounded(grown=64 << 20):
        assert index.sample_offsets(str(path), opened) is None and "damaged" in caplog.text
    raws = list(read_shard(str(path), problem := ReadProblem(), offsets=index.sample_offsets))
    assert len(raws) == 3 and not problem.reason


def test_offsets_of_a_sparse_shard_are_bounded_too(tmp_path: Path) -> None:
    packed = zlib.compress(bytes(1 << 27))
    with bounded(), pytest.raises(ValueError, match="offsets"):
        index.unpack(packed, 1 << 50)


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(
    column=st.sampled_from(["name", "size", "stamp", "samples", "sha256", "totals", "reason", "detail"]),
    value=st.none()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.binary(max_size=9)
    | st.text(max_size=9)
    | st.sampled_from(["[" * 10**5, '{"a": [1]}', '{"a": [1, "x"]}', "[1]", '{"a": 3}', "9" * 5000]),
)
def test_entries_of_any_type_are_read_or_left_out(tmp_path: Path, column: str, value: Any) -> None:
    folder = tmp_path / str(time.monotonic_ns())
    path, file = indexed(folder)
    changed(file, column, value)
    for entry in index.known([str(path)]).get(str(path), []):
        assert isinstance(entry.samples, int) and entry.samples >= 0 and isinstance(entry.totals, dict)
    assert recorded_counts([str(path)])[0] in (3, None, value)
    assert scan.update_indexes([str(path)]).read + 1 >= 1


def test_questions_have_a_bound_on_values_on_rows_and_on_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, file = indexed(tmp_path)
    assert index_file.query(file, "SELECT hex(zeroblob(100000000))") == [] and "too big" in caplog.text
    endless = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT n FROM r"
    monkeypatch.setattr(index_file, "MOST_BYTES", 1 << 20)
    assert index_file.query(file, endless) == [] and "bytes of entries" in caplog.text
    monkeypatch.setattr(index_file, "MOST_S", 0.1)
    assert (
        index_file.query(file, endless.replace("SELECT n FROM", "SELECT max(n) FROM")) == []
        and "interrupted" in caplog.text
    )


def test_a_journal_that_came_with_an_index_is_never_followed(tmp_path: Path) -> None:
    """SQLite would roll it back, and delete the file that its last page names."""
    path, file = indexed(tmp_path)
    for name in (file.name, f".{file.name}.draft"):
        for suffix in ("-journal", "-wal"):
            (tmp_path / f"{name}{suffix}").write_bytes(b"\xd9\xd5\x05\xf9 \xa1c\xd7" + bytes(1 << 12))
    assert recorded_counts([str(path)]) == [3]
    assert scan.update_indexes([str(path)], force=True).read == 1
    assert not list(tmp_path.glob(".*draft*")) and recorded_counts([str(path)]) == [3]


# -- packed shards ----------------------------------------------------------------------------------------------------

PACKERS: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("packer", PACKERS)
def test_a_packed_shard_unpacks_in_proportion(tmp_path: Path, packer: str) -> None:
    header = tarfile.TarInfo("a.bin")
    header.size = 1 << 27
    head = header.tobuf()
    block = PACKERS[packer](bytes(1 << 24))
    path = tmp_path / f"x.tar.{packer}"
    path.write_bytes(PACKERS[packer](head) + block * 64)  # a gibibyte
    problem = ReadProblem()
    with bounded(seconds=20, grown=300 << 20):
        assert not list(read_shard(str(path), problem, want=lambda _: False))
    assert problem.reason and "times its size" in problem.detail, problem


@pytest.mark.parametrize("packer", PACKERS)
def test_shards_that_pack_well_are_read(tmp_path: Path, packer: str) -> None:
    path = write_tar(tmp_path / "x.tar", [(f"{i:06d}.cls", b"1") for i in range(3000)])
    path.write_bytes(PACKERS[packer](path.read_bytes()))
    assert len(list(read_shard(str(path), problem := ReadProblem()))) == 3000 and not problem.reason, problem


# -- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [b"filepath,title\n", b"", b'filepath,title\n"'])
def test_a_table_of_one_endless_line_is_one_message(tmp_path: Path, start: bytes) -> None:
    path = tmp_path / "t.csv"
    with path.open("wb") as out:
        out.write(start)
        out.seek(1 << 40)
        out.write(b"\n")  # takes no space on the disk
    with bounded(grown=256 << 20), pytest.raises(UserError, match=r"t\.csv.*cannot be read"):
        expand(str(path))


# -- lists, braces and counts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern",
    [
        "{0..9999999999}.tar",
        "{0..9999999999999999999999}.tar",
        "{-9999999999..0..2}.tar",
        "{{0..99999}{0..99999},x}.tar",
        "{0..9}" * 12,
        "{a,b}" * 40,
        "{a,{b,{c,{0..99999999}}}}",
        "{" * 5000 + "}" * 5000,
        "{0..99999}::{0..9999999}",
    ],
)
def test_braces_stand_for_a_bounded_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("list").write_text(f"{pattern}\n")
    for source in (pattern, f"https://host/{pattern}", "@list"):
        with bounded(), pytest.raises(UserError) as caught:
            expand(source)
        assert len(str(caught.value)) < 1000


@settings(max_examples=100)
@given(st.text("{}.,0123ab\\", max_size=24))
def test_the_bound_on_braces_holds(pattern: str) -> None:
    """For every pattern that is expanded at all."""
    try:
        expected = listing._expansions(pattern)
        if expected < 10**5:
            assert len(list(listing.braceexpand(pattern))) <= expected
    except ValueError:
        return


def test_a_list_in_a_list_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list").write_text(f"@{tmp_path}/list\n")
    with pytest.raises(UserError, match="a list in a list"):
        expand(f"@{tmp_path}/list")


@pytest.mark.parametrize("name", ["sizes.json", "00000_stats.json"])
@pytest.mark.parametrize(
    "content", ["[" * 10**6, '{"00000.tar": ' + "9" * 10**5 + "}", '{"00000.tar": [' + "[]," * 10**5, "null"]
)
def test_counts_beside_shards_are_read_or_left_out(tmp_path: Path, name: str, content: str) -> None:
    (path,) = write_shards(tmp_path, [3], sized=False)
    (tmp_path / name).write_text(content)
    with bounded():
        assert recorded_counts([str(path)]) == [None]


# -- what is no file ---------------------------------------------------------------------------------------------------


def unreadable(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path) if kind == "fifo" else path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["fifo", "device"])
@pytest.mark.parametrize("name", ["0.tar", "t.csv", "t.parquet", "list", "1.png", "1.txt", index.FILE, "sizes.json"])
def test_no_fifo_or_device_is_waited_for_where_shards_are(tmp_path: Path, kind: str, name: str) -> None:
    (tmp_path / "1.png").write_bytes(picture())
    unreadable(tmp_path / name, kind)
    source = {"list": f"@{tmp_path}/list", index.FILE: str(tmp_path / "1.tar"), "sizes.json": str(tmp_path / "1.tar")}
    if name in ("1.png", "1.txt"):
        given = str(tmp_path)
    else:
        write_tar(tmp_path / "1.tar", sample("a"))
        given = source.get(name, str(tmp_path / name))
    with bounded():
        try:
            urls = expand(given)
            recorded_counts(urls)
            found = [raw.damage for url in urls for raw in read_shard(url, ReadProblem())]
        except UserError:
            return
    assert found in ([], [""], ["refused_file"], ["unreadable_file"], ["missing_file"]), found


@pytest.mark.parametrize("kind", ["fifo", "device"])
@pytest.mark.parametrize("name", ["test/nshards.txt", "test/0.tar", "classnames.txt", "dataset_type.txt"])
def test_no_fifo_or_device_is_waited_for_in_an_evaluation_set(tmp_path: Path, kind: str, name: str) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test/nshards.txt").write_text("1\n")
    write_tar(tmp_path / "test/0.tar", [("a.png", picture()), ("a.cls", b"0")])
    (tmp_path / "classnames.txt").write_text("a\nb\n")
    unreadable(tmp_path / name, kind)
    with bounded():
        try:
            load_set(tmp_path)
        except UserError as error:
            assert "eval.sets" in str(error)


def test_a_sparse_text_in_an_evaluation_tar_is_not_unpacked(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test/nshards.txt").write_text("1\n")
    (tmp_path / "classnames.txt").write_text("a\nb\n")
    header = tarfile.TarInfo("a.cls")
    header.size = 1 << 40
    for kind in (tarfile.GNUTYPE_SPARSE, tarfile.REGTYPE):
        header.type = kind
        (tmp_path / "test/0.tar").write_bytes(header.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
        with bounded(grown=128 << 20), pytest.raises(UserError, match=r"eval\.sets"):
            load_set(tmp_path)


# -- configurations and checkpoints ------------------------------------------------------------------------------------

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{n}: &{n} [{', '.join(['*' + p] * 9)}]\n" for p, n in zip("abcdefgh", "bcdefghi")
)
MERGED = "a: &a {x: 1}\n" + "".join(
    f"{n}: &{n} {{<<: [{', '.join(['*' + p] * 9)}]}}\n" for p, n in zip("abcdefgh", "bcdefghi")
)
OPTIONS = "optim:\n  options:\n    a0: {}\n"


def laughs(first: str, then: str, levels: int = 40) -> str:
    """Settings each of which names the one before several times."""
    lines = (f"    a{n}: {then.replace('%', f'${{optim.options.a{n - 1}}}')}\n" for n in range(1, levels))
    return OPTIONS.format(first) + "".join(lines)


INTERPOLATIONS = {
    "text": laughs("xxxxxxxxxx", "'" + "%" * 10 + "'"),
    "empty": laughs("''", "'" + "%" * 10 + "'"),
    "tree": laughs("{x: 1}", "{x: '%', y: '%', z: '%'}"),
    "list": laughs("[1]", "['%', '%', '%']"),
    "long": laughs("x" * 500_000, "'" + "%" * 200 + "'", 2),
    "wide": OPTIONS.format("x") + "    a1: '" + "${optim.options.a0}" * 40_000 + "'\n",
    "own": OPTIONS.format("${optim.options.a0}${optim.options.a0}"),
    "pair": laughs("${optim.options.a2}", "%"),
    "decoded": laughs("'1'", "'${oc.decode:\"[%,%,%]\"}'"),
}
CONFIGURATIONS = [
    *INTERPOLATIONS.values(),
    BOMB,
    MERGED,
    "a: &a [*a]\n",
    "[" * 5000,
    "a: {b: " * 900,
    "x: [" + "1," * (1 << 20),
    "a: b: c",
    "\x00",
]


@pytest.mark.parametrize("text", CONFIGURATIONS)
def test_a_received_configuration_is_one_message(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/received.yaml").write_text("# @package _global_\n" + text)
    with bounded(seconds=20):
        assert main(["train", "--config-dir", str(tmp_path), "experiment=received", "data.train=/nowhere/0.tar"]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and errors.count("\n") == 1 and len(errors) < 2000, errors[:2000]


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_a_configuration_that_is_no_file_is_one_message(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiment").mkdir()
    unreadable(tmp_path / "experiment/received.yaml", kind)
    with bounded():
        assert main(["train", "--config-dir", str(tmp_path), "experiment=received", "data.train=/nowhere/0.tar"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
