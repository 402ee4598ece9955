"""The index: its content, its updates, its use by the reader; an entry never applies to a changed file."""

import os
import subprocess
import sys
import tarfile
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

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


@pytest.mark.slow
def test_a_million_members_take_seconds_and_little_memory(tmp_path: Path) -> None:
    """Each is a sample, fifty times as many as in a usual shard."""
    path = tmp_path / "0.tar"
    members = tarfile.TarInfo("a.txt").tobuf() + tarfile.TarInfo("b.txt").tobuf()
    path.write_bytes(500_000 * members + bytes(1024))
    code = f"""
import resource, time
from clipscale.data.sample import limits
from clipscale.data.shards import index
from clipscale.data.shards.reader import ReadProblem, read_shard
before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
entry = index.scan_shard({str(path)!r})
count = sum(1 for raw in read_shard({str(path)!r}, ReadProblem(), kinds=limits(["jpg"], ["txt"])))
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
print(entry.samples, count, entry.reason, len(entry.row()[-1]), grown, time.process_time() - begun)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    indexed, read, reason, packed, grown, seconds = done.stdout.split()
    assert (indexed, read, reason) == ("1000000", "1000000", "None")
    assert int(packed) < 1 << 16 and int(grown) < 64 and float(seconds) < 60, done.stdout


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
    assert index.current(list(map(str, paths))).samples == [1, 5]


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


def test_shards_of_several_folders_are_known_by_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is listed twice, too. The rows of a folder are read in blocks."""
    monkeypatch.setattr(index, "ROWS", 2)
    paths = [*write_shards(tmp_path / "a", [3, 5, 7]), *write_shards(tmp_path / "b", [2, 4, 6])]
    make(paths)
    chosen = [4, 0, 2, 3, 4, 1]
    write_tar(paths[2], sample("x"))
    known = index.current([str(paths[number]) for number in chosen])
    assert known.samples == [4, 3, None, 2, 4, 5] and known.stale == [str(paths[2])]
    assert known.size == sum(paths[number].stat().st_size for number in (0, 1, 3, 4))


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
