"""Which shards a setting names, how many samples they hold, and what a shard gives when parts of it are damaged."""

import gzip
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipscale.data import shards
from clipscale.data.shards import (
    RawSample,
    ReadProblem,
    count_samples,
    expand,
    noted_counts,
    read_shard,
    scanned_counts,
)
from clipscale.errors import UserError
from tests.data.files import sample, write_shards, write_tar


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def read(path: Path | str) -> tuple[list[RawSample], ReadProblem]:
    problem = ReadProblem()
    return list(read_shard(str(path), problem)), problem


# -- which shards ------------------------------------------------------------------------------------------------------


def test_braces_globs_folders_and_lists_name_the_same_shards(tmp_path: Path) -> None:
    paths = [str(path) for path in write_shards(tmp_path / "set", [1, 1, 1])]
    (tmp_path / "list").write_text(f"# three shards\n{paths[0]}\n\n{tmp_path}/set/{{00001..00002}}.tar\n")
    folder = tmp_path / "set"
    for source in (
        f"{folder}/{{00000..00002}}.tar",
        f"{folder}/*.tar",
        str(folder),
        f"@{tmp_path}/list",
        f"file:{folder}/*.tar",
    ):
        assert expand(source) == paths, source


def test_gaps_in_a_brace_list_are_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = write_shards(tmp_path, [1, 1, 1])
    paths[1].unlink()
    assert expand(f"{tmp_path}/{{00000..00002}}.tar") == [str(paths[0]), str(paths[2])]
    assert "1 of 3 shards do not exist" in caplog.text


@pytest.mark.parametrize(
    "pattern", ["{folder}/none-{{0..3}}.tar", "{folder}/*.tar", "{folder}", "@{folder}/none", "@{folder}/empty"]
)
def test_a_source_without_shards_is_named(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "empty").write_text("\n")
    source = pattern.format(folder=tmp_path)
    with pytest.raises(UserError, match=r"data\.train=") as error:
        expand(source)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_addresses_are_expanded_but_not_looked_up() -> None:
    assert expand("https://host/{0..2}.tar") == [f"https://host/{i}.tar" for i in range(3)]
    assert expand("s3://a/0.tar::s3://b/1.tar") == ["s3://a/0.tar", "s3://b/1.tar"]


@pytest.mark.parametrize("source", ["pipe:cat x.tar", "https://host/0.tar::pipe:cat x.tar"])
def test_pipes_run_only_when_allowed(source: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="allow_pipe"):
        expand(source)
    (tmp_path / "list").write_text(f"{source}\n")
    with pytest.raises(UserError, match="allow_pipe"):
        expand(f"@{tmp_path}/list")
    assert "pipe:cat x.tar" in expand(source, allow_pipe=True)


# -- how many samples --------------------------------------------------------------------------------------------------


def test_counts_are_found_beside_the_shards(tmp_path: Path) -> None:
    paths = [str(path) for path in write_shards(tmp_path, [3, 2, 4], sized=False)]
    assert noted_counts(paths) == [None, None, None]
    (tmp_path / "00001_stats.json").write_text(json.dumps({"count": 9, "successes": 2}))
    assert noted_counts(paths) == [None, 2, None]
    (tmp_path / "sizes.json").write_text(json.dumps({"00000.tar": 3, "00002.tar": 4}))
    assert noted_counts(paths) == [3, 2, 4]
    assert noted_counts(["https://host/00000.tar"]) == [None]


def test_a_damaged_note_counts_as_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = [str(path) for path in write_shards(tmp_path, [3], sized=False)]
    (tmp_path / "sizes.json").write_text("{")
    assert noted_counts(paths) == [None]
    assert "sizes.json cannot be read" in caplog.text


def test_scanned_counts_are_remembered_until_the_shard_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_shards(tmp_path, [5], sized=False)[0]
    assert scanned_counts([str(path)]) == [5]
    with monkeypatch.context() as patch:
        patch.setattr(shards, "count_samples", lambda _: pytest.fail("scanned again"))
        assert scanned_counts([str(path)]) == [5]
    write_tar(path, sample("a") + sample("b"))
    assert scanned_counts([str(path)]) == [2]


def test_counting_works_without_a_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_shards(tmp_path, [5], sized=False)[0]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert scanned_counts([str(path)]) == [5]


def test_scanning_counts_what_reading_groups(tmp_path: Path) -> None:
    members = [
        *sample("a"),
        ("b.txt", b"no picture"),
        ("../../etc/c.png", b"x"),
        ("../../etc/c.txt", b"y"),
        ("no-extension", b"z"),
        ("__meta__/d.txt", b"skipped"),
        ("D/e.PNG", b"x"),
        ("D/e.TXT", b"y"),
        *sample("a"),
    ]
    path = write_tar(tmp_path / "x.tar", members)
    samples, problem = read(path)
    assert [s.key for s in samples] == ["a", "b", "../../etc/c", "D/e", "a"]
    assert sorted(samples[3].members) == ["png", "txt"]
    assert count_samples(str(path)) == 5
    assert problem.reason is None


# -- what is inside ----------------------------------------------------------------------------------------------------


def test_a_gzipped_shard_is_read(tmp_path: Path) -> None:
    path = write_shards(tmp_path, [3])[0]
    packed = tmp_path / "x.tar.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert len(read(packed)[0]) == count_samples(str(packed)) == 3


def test_a_truncated_shard_gives_what_comes_before_the_damage(tmp_path: Path) -> None:
    path = write_shards(tmp_path, [10])[0]
    whole = read(path)[0]
    path.write_bytes(path.read_bytes()[: 512 * 25 + 100])
    got, problem = read(path)
    assert 0 < len(got) < 10
    assert [s.key for s in got] == [s.key for s in whole[: len(got)]]
    assert problem.reason == "truncated_shard" and str(path) in problem.detail


@pytest.mark.parametrize("content", [b"", b"not a tar" * 1000, None])
def test_an_unreadable_shard_says_so(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "x.tar"
    if content is not None:
        path.write_bytes(content)
        assert count_samples(str(path)) == 0
    got, problem = read(path)
    assert got == [] and problem.reason == "unreadable_shard"


def test_a_repeated_member_is_ignored(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [*sample("a"), ("a.txt", b"second"), *sample("b")])
    samples, problem = read(path)
    assert [s.key for s in samples] == ["a", "b"] and problem.reason is None
    assert samples[0].members["txt"] == b"caption a"


def test_nothing_is_written_by_member_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "a" / "b"
    work.mkdir(parents=True)
    path = write_tar(tmp_path / "x.tar", [("../up.txt", b"x"), ("/tmp/abs.txt", b"x"), ("down/../../side.txt", b"x")])
    monkeypatch.chdir(work)
    before = sorted(os.walk(tmp_path))
    assert len(read(path)[0]) == 3
    assert sorted(os.walk(tmp_path)) == before


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=12), st.floats(0, 1))
def test_damaged_bytes_end_a_shard_but_not_the_reader(
    tmp_path_factory: pytest.TempPathFactory, hits: list[tuple[float, int]], cut: float
) -> None:
    folder = tmp_path_factory.getbasetemp() / "fuzz"
    if not folder.exists():
        write_shards(folder, [6])
    data = bytearray((folder / "00000.tar").read_bytes())
    for where, value in hits:
        data[int(where * (len(data) - 1))] = value
    path = folder / "damaged.tar"
    path.write_bytes(data[: int(len(data) * (1 - cut * cut))])
    samples, problem = read(path)
    assert len(samples) <= 40
    assert problem.reason in (None, "truncated_shard", "unreadable_shard")
    count_samples(str(path))
