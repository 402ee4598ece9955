"""The index: its content, its updates, its use by the reader; an entry never applies to a changed file."""

import os
import re
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipscale.common.errors import UserError
from clipscale.data.sample import RawSample, limits
from clipscale.data.shards import index
from clipscale.data.shards.counts import count_samples
from clipscale.data.shards.reader import ReadProblem, read_shard
from clipscale.data.shards.store import Store
from tests.data.files import sample, write_shards, write_tar
from tests.data.streams import contents, open_stream


def make(paths: list[Path], **options: Any) -> str:
    """Index the shards; of each a letter: r(ead), u(nchanged) or f(ailed)."""
    letters = {index.Entry: "r", type(None): "u", str: "f"}
    outcomes = dict(index.update_indexes([str(path) for path in paths], **options))
    return "".join(letters[type(outcomes[str(path)])] for path in paths)


def read(path: Path, **options: Any) -> tuple[list[RawSample], ReadProblem]:
    problem = ReadProblem()
    return list(read_shard(str(path), problem, indexed=True, **options)), problem


names = ["a.png", "a.txt", "b.png", "c/d.x.json", "n", "__m__", "e.txt", "x" * 120 + ".txt"]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(names), st.binary(max_size=1200)), max_size=12))
def test_reading_by_offsets_gives_what_reading_on_gives(
    tmp_path_factory: pytest.TempPathFactory, members: list[tuple[str, bytes]]
) -> None:
    path = write_tar(tmp_path_factory.getbasetemp() / "offsets.tar", members)
    plain = list(read_shard(str(path), ReadProblem()))
    scanned = index.scan_shard(str(path))
    assert scanned.samples == len(plain)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "sample_offsets", lambda *_: scanned.offsets)
        assert read(path)[0] == plain
    assert scanned.offsets is None or len(scanned.offsets) == len(plain) + 1


def test_only_changed_shards_are_scanned_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_shards(tmp_path, [3, 5])
    monkeypatch.setattr(index, "FEW", 2)
    assert make(paths, workers=2) == "rr"
    assert make([*paths, tmp_path / "none.tar"]) == "uuf"
    write_tar(paths[0], sample("a"))
    assert make([*paths, tmp_path / "none.tar"]) == "ruf"
    assert index.current(list(map(str, paths))).samples.tolist() == [1, 5]


def test_the_index_of_a_read_only_folder_is_in_the_cache(
    tmp_path: Path, user_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write_shards(tmp_path, [3])
    monkeypatch.setattr(index.os, "access", lambda *_: False)
    make(paths)
    assert not (tmp_path / index.FILE).exists() and count_samples([str(paths[0])], scan=False) == [3]
    assert user_cache in index.writable_path(str(tmp_path)).parents


def test_a_damaged_index_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = write_shards(tmp_path, [3])
    (tmp_path / index.FILE).write_bytes(b"SQLite format 3\0" + b"x" * 5000)
    assert count_samples([str(paths[0])], scan=False) == [None] and "cannot be read" in caplog.text
    with pytest.raises(UserError, match=f"{index.FILE}: the index cannot be written .*remove it"):
        make(paths)


def test_a_stale_entry_is_named_and_does_not_hide_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a read-only folder with an outdated index, the cache holds the new update."""
    paths = write_shards(tmp_path, [3, 5])
    urls = [str(path) for path in paths]
    make(paths)
    write_tar(paths[0], [*sample("a"), *sample("b")])
    assert count_samples(urls, scan=False) == [None, 5]
    assert f"the index of 1 of 2 shards is out of date (first: {paths[0]})" in caplog.text
    assert [s.key for s in read(paths[0])[0]] == ["a", "b"]
    monkeypatch.setattr(index.os, "access", lambda *_: False)
    assert count_samples(urls[:1]) == [2]
    assert count_samples(urls, scan=False) == [2, 5] and not index.current(urls).stale, "counted at every start"
    assert open_stream(tmp_path, batch=4).samples_per_epoch == 7


class Case(NamedTuple):
    """A shard, its entries in the index beside it and in the cache (None: none), and its size now."""

    folder: str
    name: str
    entries: tuple[int | None, int | None]
    size: int


cases = st.builds(
    Case,
    st.sampled_from(["a", "a/b", "c"]),
    st.sampled_from(["0.tar", "1.tar", "2.tar"]),
    st.tuples(*[st.sampled_from([None, 1, 2])] * 2),
    st.sampled_from([1, 2]),
)


@given(st.lists(cases, max_size=8, unique_by=lambda case: case[:2]), st.integers(0, 2), st.booleans())
def test_what_is_known_of_shards_is_the_first_entry_of_each_that_holds(
    shards: list[Case], repeated: int, remote: bool
) -> None:
    """Rows of folders are read in blocks; an entry of another size than the shard's is out of date."""
    root = "https://host/set" if remote else "/set"
    entries = {
        (index.index_paths(f"{root}/{case.folder}")[place % (2 - remote)], case.name): size
        for case in shards
        for place, size in enumerate(case.entries)
        if size is not None and place < 2 - remote
    }
    sizes = {f"{root}/{case.folder}/{case.name}": case.size for case in shards}
    urls = [*sizes, *list(sizes)[:repeated]]

    def rows(path: Path, *_: Any) -> Iterator[Any]:
        names = [(name, size) for (of, name), size in entries.items() if of == path]
        return iter([(name, size, "v", 10 * size, "cut" if size == 2 else None, "") for name, size in names])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "query", rows)
        patch.setattr(index, "ROWS", 2)
        patch.setattr(index, "local_state", lambda url: (sizes[url], "v"))
        known = index.current(urls)
    for number, url in enumerate(urls):
        folder, _, name = url.rpartition("/")
        recorded = [entries[path, name] for path in index.index_paths(folder) if (path, name) in entries]
        holding = [size for size in recorded if remote or size == sizes[url]]
        assert known.samples[number] == (10 * holding[0] if holding else -1), url
        assert (url in known.stale) == (bool(recorded) and not holding)
        if url not in urls[:number]:
            assert (number in known.damaged) == (holding[:1] == [2])


def test_counts_are_read_without_the_offsets_between_them(tmp_path: Path) -> None:
    offsets = np.random.default_rng(0).integers(0, 1 << 30, 10_000)
    entries = [index.Entry(f"{i}.tar", 1, "v", 10_000, None, "", offsets) for i in range(200)]
    with index._writing(tmp_path / index.FILE) as base:
        base.executemany("INSERT INTO shards VALUES (?, ?, ?, ?, ?, ?, ?)", [entry.row() for entry in entries])

    def bytes_read() -> int:
        return int(re.findall(r"rchar: (\d+)", Path("/proc/self/io").read_text())[0])

    before = bytes_read()
    known = index.current([str(tmp_path / entry.name) for entry in entries])
    size = (tmp_path / index.FILE).stat().st_size
    assert len(known.stale) == 200 and size > 4_000_000
    assert bytes_read() - before < size / 20, f"{bytes_read() - before} of {size} bytes"


def test_damage_costs_only_its_sample(tmp_path: Path) -> None:
    path = write_shards(tmp_path, [10])[0]
    make([path])
    about = path.stat()
    offsets = index.sample_offsets(str(path), Store().state(str(path)))
    assert offsets is not None
    data = bytearray(path.read_bytes())
    data[offsets[4] + 10] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))  # bit rot does not change the time
    raws, problem = read(path)
    assert problem.reason is None and [raw.index for raw in raws if raw.damage] == [4]
    assert raws[4].damage == "damaged_sample" and "checksum" in raws[4].detail
    stream = open_stream(tmp_path, batch=9)
    contents(stream, 1)
    assert stream.samples_per_epoch == 10 and stream.broken <= Counter(damaged_sample=1)


@pytest.mark.parametrize("indexed", [False, True])
def test_members_over_the_limit_are_not_read(tmp_path: Path, indexed: bool) -> None:
    large = [("b.png", bytes(9 << 20)), ("b.txt", b"x"), ("c.txt", bytes(2 << 20))]
    path = write_tar(tmp_path / "x.tar", [*sample("a"), *large, *sample("d")])
    if indexed:
        make([path])
    tracemalloc.start()
    raws, problem = read(path, kinds=limits(["png"], ["txt"], 1 << 20))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [raw.damage for raw in raws] == ["", "too_large", "too_large", ""] and problem.reason is None
    assert not raws[1].members and peak < 1 << 20, f"{peak} bytes"
