"""The index: its content, its updates, its use by the reader; an entry never applies to a changed file."""

import gzip
import hashlib
import io
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipscale.data.sample import RawSample, limits
from clipscale.data.shards import index, scan
from clipscale.data.shards.access import Opened
from clipscale.data.shards.counts import recorded_counts, scan_counts
from clipscale.data.shards.reader import ReadProblem, read_shard
from clipscale.data.shards.store import Store
from tests.data.files import sample, write_shards, write_tar
from tests.data.streams import contents, open_stream


def make(paths: list[Path], **options: Any) -> scan.Update:
    return scan.update_indexes([str(path) for path in paths], **options)


def entry(path: Path) -> index.Entry:
    return index.known([str(path)])[str(path)][0]


def read(path: Path, **options: Any) -> tuple[list[RawSample], ReadProblem]:
    problem = ReadProblem()
    return list(read_shard(str(path), problem, offsets=index.sample_offsets, **options)), problem


class CountingStore(Store):
    """Counts reads and their bytes."""

    reads, read_bytes = 0, 0

    def open(self, url: str) -> Opened:
        opened = super().open(url)
        store, stream = self, opened.stream

        class Counting(io.RawIOBase):
            def read(self, size: int = -1) -> bytes:
                data: bytes = stream.read(size)
                store.reads, store.read_bytes = store.reads + 1, store.read_bytes + len(data)
                return data

            def seek(self, offset: int, whence: int = 0) -> int:
                return int(stream.seek(offset, whence))

            def seekable(self) -> bool:
                return True

        return opened._replace(stream=Counting())


def test_it_describes_the_shards(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [3, 5], sized=False)
    update = make(paths)
    assert (update.read, update.kept, update.failed) == (2, 0, {})
    for path, samples in zip(paths, [3, 5]):
        found = entry(path)
        data = path.read_bytes()
        assert (found.samples, found.size, found.reason) == (samples, len(data), None)
        assert found.sha256 == hashlib.sha256(data).hexdigest()
        members = [m for s in read(path)[0] for m in s.members.items()]
        assert found.totals == {
            kind: (samples, sum(len(d) for k, d in members if k == kind)) for kind in ("json", "png", "txt")
        }
    assert recorded_counts([str(path) for path in paths]) == [3, 5]


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a.png", "a.txt", "b.png", "c/d.x.json", "n", "__m__", "e.txt", "x" * 120 + ".txt"]),
            st.binary(max_size=1200),
        ),
        max_size=12,
    )
)
def test_reading_by_offsets_gives_what_reading_on_gives(
    tmp_path_factory: pytest.TempPathFactory, members: list[tuple[str, bytes]]
) -> None:
    path = write_tar(tmp_path_factory.getbasetemp() / "offsets.tar", members)
    plain = list(read_shard(str(path), ReadProblem()))
    found = scan.scan_shard(str(path))
    assert found.samples == len(plain)
    by_offsets = list(read_shard(str(path), ReadProblem(), offsets=lambda url, opened: found.offsets))
    assert by_offsets == plain
    assert found.offsets is None or len(found.offsets) == len(plain) + 1


def test_a_packed_shard_is_counted_but_has_no_offsets(tmp_path: Path) -> None:
    path = write_shards(tmp_path, [4], sized=False)[0]
    packed = tmp_path / "p.tar.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    make([packed])
    found = entry(packed)
    assert (found.samples, found.sha256) == (4, hashlib.sha256(packed.read_bytes()).hexdigest())
    assert [s.key for s in read(packed)[0]] == [s.key for s in read(path)[0]]


def test_a_damaged_shard_is_recorded_with_its_readable_samples(tmp_path: Path) -> None:
    path = write_shards(tmp_path, [10], sized=False)[0]
    path.write_bytes(path.read_bytes()[: 512 * 25 + 100])
    make([path])
    found = entry(path)
    assert found.reason == "truncated_shard" and 0 < found.samples < 10
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert [s.key for s in read(path)[0]] == [s.key for s in read_shard(str(path), ReadProblem())]


def test_offsets_take_a_few_bytes_a_sample(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    offsets = np.cumsum(rng.integers(20, 200, 10_001)) * 512
    packed = index.pack(offsets)
    assert np.array_equal(index.unpack(packed), offsets)
    assert len(packed) < 2 * len(offsets), f"{len(packed)} bytes for {len(offsets)} samples"


def test_only_changed_shards_are_scanned_again(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [3, 5], sized=False)
    make(paths)
    before = (tmp_path / index.FILE).stat().st_mtime_ns
    assert make(paths) == scan.Update(read=0, kept=2, failed={})
    assert (tmp_path / index.FILE).stat().st_mtime_ns == before, "nothing to do, but the file was written"
    write_tar(paths[0], sample("a"))
    assert make(paths) == scan.Update(read=1, kept=1, failed={})
    assert [entry(path).samples for path in paths] == [1, 5]
    assert make(paths, force=True).read == 2


def test_headers_alone_are_enough_until_a_checksum_is_asked_for(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [3], sized=False)
    make(paths, checksum=False)
    assert entry(paths[0]).sha256 is None
    assert make(paths, checksum=False).kept == 1
    assert make(paths).read == 1 and entry(paths[0]).sha256


def test_an_unreachable_shard_does_not_stop_the_others(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [3], sized=False)
    update = make([tmp_path / "none.tar", *paths])
    assert update.read == 1 and list(update.failed) == [str(tmp_path / "none.tar")]


def test_the_work_of_a_killed_run_is_kept(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [3, 5, 7], sized=False)

    def die(url: str, size: int, found: index.Entry | None) -> None:
        if url == str(paths[1]):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(paths, done=die)
    assert index.known([str(path) for path in paths]) == {}, "a half-made index was put in place"
    assert make(paths) == scan.Update(read=1, kept=2, failed={})
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [f".{index.FILE}.lock", *(p.name for p in paths), index.FILE]
    )


def test_several_processes_share_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "SERIAL_BYTES", 0)
    paths = write_shards(tmp_path, [3, 5, 7], sized=False)
    assert make(paths, workers=2).read == 3
    assert [entry(path).samples for path in paths] == [3, 5, 7]


def test_the_index_of_a_read_only_folder_is_in_the_cache(tmp_path: Path, user_cache: Path) -> None:
    paths = write_shards(tmp_path / "data", [3], sized=False)
    given = tmp_path / "given"
    scan.update_indexes([str(paths[0])], cache=str(given))
    assert not (tmp_path / "data" / index.FILE).exists()
    assert recorded_counts([str(paths[0])]) == [None] and recorded_counts([str(paths[0])], str(given)) == [3]
    remote = index.writable_path("s3://bucket/set", None)
    assert user_cache in remote.parents


def test_a_damaged_index_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = write_shards(tmp_path, [3], sized=False)
    (tmp_path / index.FILE).write_bytes(b"SQLite format 3\0" + b"x" * 5000)
    assert recorded_counts([str(paths[0])]) == [None] and "cannot be read" in caplog.text
    make(paths)
    assert "indexing anew" in caplog.text and entry(paths[0]).samples == 3


def test_a_stale_entry_is_named_and_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = write_shards(tmp_path, [3, 5], sized=False)
    make(paths)
    write_tar(paths[0], [*sample("a"), *sample("b")])
    assert recorded_counts([str(path) for path in paths]) == [None, 5]
    assert f"the index of 1 of 2 shards is out of date (first: {paths[0]})" in caplog.text
    assert [s.key for s in read(paths[0])[0]] == ["a", "b"]
    assert open_stream(tmp_path, batch=4).samples_per_epoch == 7


def test_a_stale_index_beside_the_shards_does_not_hide_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a read-only folder with an outdated index, the cache holds the new update."""
    paths = write_shards(tmp_path, [3, 5], sized=False)
    make(paths)
    write_tar(paths[0], [*sample("a"), *sample("b")])
    monkeypatch.setattr(index.os, "access", lambda *_: False)
    urls = [str(path) for path in paths]
    assert recorded_counts(urls) == [None, 5] and "out of date" in caplog.text
    assert scan_counts(urls[:1]) == [2]
    assert recorded_counts(urls) == [2, 5], "counted at every start"
    assert [len(index.known(urls)[url]) for url in urls] == [2, 1]
    assert index.current(urls) == ({url: index.known(urls)[url][-1] for url in urls}, [])
    assert read(paths[0])[0][1].key == "b"
    assert open_stream(tmp_path, batch=4).samples_per_epoch == 7


def test_a_read_begins_at_the_first_wanted_sample(tmp_path: Path) -> None:
    path = write_shards(tmp_path, [50], sized=False)[0]
    make([path])
    store = CountingStore()
    raws, _ = read(path, store=store, want=lambda i: i >= 48)
    assert [raw.key for raw in raws[48:]] == ["000000048", "000000049"] and not any(r.members for r in raws[:48])
    assert store.reads == 2, f"{store.reads} reads for two samples"
    assert store.read_bytes == int(np.diff(entry_offsets(path))[48:].sum())


def entry_offsets(path: Path) -> np.ndarray:
    with Store().open(str(path)).stream:
        found = index.sample_offsets(str(path), Store().open(str(path)))
    assert found is not None
    return found


def test_damage_costs_only_its_sample(tmp_path: Path) -> None:
    path = write_shards(tmp_path, [10], sized=False)[0]
    make([path])
    about, offsets = path.stat(), entry_offsets(path)
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


@pytest.mark.parametrize("order", ["epochs", "resampled"])
def test_the_stream_is_the_same_with_and_without(tmp_path: Path, order: str) -> None:
    paths = write_shards(tmp_path, [30, 21, 47])
    plain = open_stream(tmp_path, batch=16, order=order)
    before = contents(plain, 9)
    make(paths)
    indexed = open_stream(tmp_path, batch=16, order=order)
    assert contents(indexed, 9) == before
    assert indexed.position() == plain.position()
    position = indexed.position()
    resumed = open_stream(tmp_path, batch=16, order=order, position=position)
    assert contents(resumed, 3) == contents(indexed, 3)


@pytest.mark.parametrize("indexed", [False, True])
def test_members_over_the_limit_are_not_read(tmp_path: Path, indexed: bool) -> None:
    large = ("b.png", bytes(9 << 20))
    path = write_tar(
        tmp_path / "x.tar", [*sample("a"), large, ("b.txt", b"x"), ("c.txt", bytes(2 << 20)), *sample("d")]
    )
    if indexed:
        make([path])
    store = CountingStore()
    raws, problem = read(path, store=store, kinds=limits(["png"], ["txt"], 8 << 20))
    assert [(raw.key, raw.damage) for raw in raws] == [("a", ""), ("b", "too_large"), ("c", "too_large"), ("d", "")]
    assert not raws[1].members and problem.reason is None and raws[1].detail == f"b.png: {9 << 20} bytes"
    assert store.read_bytes < 3 << 20, store.read_bytes
