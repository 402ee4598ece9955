"""The index: its content, its updates, its use by the reader; an entry never applies to a changed file."""

import os
import tracemalloc
from functools import partial
from operator import le
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipscale.common.errors import UserError
from clipscale.config.data import DataConfig
from clipscale.data.order import BatchShare, Epochs, Resampled
from clipscale.data.sample import size_limits_of
from clipscale.data.shards import index
from clipscale.data.shards.counts import build_order, count_if_quick, count_samples
from tests.data.files import sample, write_shards, write_tar
from tests.data.streams import open_stream, read


def make(paths: list[Path], **options: Any) -> str:
    """Index the shards; of each a letter: r(ead), u(nchanged) or f(ailed)."""
    letters = {index.IndexEntry: "r", type(None): "u", str: "f"}
    outcomes = dict(index.update_indexes([str(path) for path in paths], **options))
    return "".join(letters[type(outcomes[str(path)])] for path in paths)


names = ["a.png", "a.txt", "b.png", "c/d.x.json", "n", "__m__", "e.txt", "x" * 120 + ".txt"]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(names), st.binary(max_size=1200)), max_size=12))
def test_reading_by_offsets_gives_what_reading_on_gives(
    tmp_path_factory: pytest.TempPathFactory, members: list[tuple[str, bytes]]
) -> None:
    path = write_tar(tmp_path_factory.getbasetemp() / "offsets.tar", members)
    plain, _ = read(path)
    scanned = index.scan_shard(str(path))
    assert scanned.samples == len(plain)
    offsets = lambda *_: index.unpack(scanned.offsets or b"")  # noqa: E731
    for first in range(len(plain)):
        raws, _ = read(path, reads_content=partial(le, first), offsets=offsets)
        assert raws[first:] == plain[first:] and not any(raw.key for raw in raws[:first])
        assert [raw.num_bytes for raw in raws] == [raw.num_bytes for raw in plain]


def test_only_changed_shards_are_scanned_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_shards(tmp_path, [3, 5])
    monkeypatch.setattr(index, "MIN_PARALLEL_SHARDS", 2)
    assert make(paths, workers=2) == "rr"
    assert make([*paths, tmp_path / "none.tar"]) == "uuf"
    write_tar(paths[0], sample("a"))
    assert make([*paths, tmp_path / "none.tar"]) == "ruf"
    assert count_samples([*map(str, paths)], scan_at_most=0) == [1, 5]


def test_the_index_of_a_read_only_folder_is_in_the_cache(
    tmp_path: Path, user_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write_shards(tmp_path, [3])
    monkeypatch.setattr(index.os, "access", lambda *_: False)
    make(paths)
    assert not (tmp_path / index.INDEX_FILE).exists() and count_samples([str(paths[0])], scan_at_most=0) == [3]
    assert any(user_cache.rglob("*.sqlite"))


def test_a_damaged_index_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = write_shards(tmp_path, [3])
    (tmp_path / index.INDEX_FILE).write_bytes(b"SQLite format 3\0" + b"x" * 5000)
    assert count_samples([str(paths[0])], scan_at_most=0) == [None] and "cannot be read" in caplog.text
    with pytest.raises(UserError, match=f"{index.INDEX_FILE}: the index cannot be written .*remove it"):
        make(paths)


def test_a_stale_entry_is_named_and_does_not_hide_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a read-only folder with an outdated index, the cache holds the new update."""
    paths = write_shards(tmp_path, [3, 5])
    urls = [str(path) for path in paths]
    make(paths)
    write_tar(paths[0], [*sample("a"), *sample("b")])
    assert count_samples(urls, scan_at_most=0) == [None, 5]
    assert f"the index of 1 of 2 shards is out of date (first: {paths[0]})" in caplog.text
    assert [s.key for s in read(paths[0], offsets=index.sample_offsets)[0]] == ["a", "b"]
    monkeypatch.setattr(index.os, "access", lambda *_: False)
    assert count_samples(urls[:1]) == [2]
    assert count_samples(urls, scan_at_most=0) == [2, 5]
    assert not index.read_entries(urls).stale, "counted at every start"
    assert open_stream(tmp_path, batch=4).epoch_samples == 7


def test_shards_of_several_folders_are_known_by_their_numbers(tmp_path: Path) -> None:
    """A shard that is listed twice is, too."""
    paths = [*write_shards(tmp_path / "a", [3, 5, 7]), *write_shards(tmp_path / "b", [2, 4, 6])]
    make(paths)
    urls = [str(paths[number]) for number in (4, 0, 2, 3, 4, 1)]
    write_tar(paths[2], sample("x"))
    assert count_samples(urls, scan_at_most=0) == [4, 3, None, 2, 4, 5]
    assert index.read_entries(urls).stale == [str(paths[2])]


def test_a_few_shards_without_an_index_are_counted_among_any_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write_shards(tmp_path, [3, 5, 7])
    urls = [*map(str, paths)]
    monkeypatch.setattr("clipscale.data.shards.counts.SCAN_AT_MOST", 1)
    make(paths[:1])
    assert count_if_quick(DataConfig(), urls) is None
    assert isinstance(build_order(DataConfig(), urls, None, BatchShare(4, 0, 1), 0), Resampled)
    make(paths[:2])
    assert count_if_quick(DataConfig(), urls) == 15
    order = build_order(DataConfig(), urls, None, BatchShare(4, 0, 1), 0)
    assert isinstance(order, Epochs) and order.counts == (3, 5, 7)


def test_members_over_the_limit_are_not_read(tmp_path: Path) -> None:
    large = [("b.png", bytes(9 << 20)), ("b.txt", b"x"), ("c.txt", bytes(2 << 20))]
    path = write_tar(tmp_path / "x.tar", [*sample("a"), *large, *sample("d")])
    tracemalloc.start()
    sizes = size_limits_of(["png"], ["txt"]) | {"png": 1 << 20}
    raws, problem = read(path, offsets=index.sample_offsets, size_limits=sizes)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [raw.error for raw in raws] == ["", "too_large", "too_large", ""] and problem.reason is None
    assert not raws[1].members and peak < 1 << 20, f"{peak} bytes"


@pytest.mark.parametrize("cut", [100, 600, 3072], ids=["within a header", "within a picture", "between samples"])
def test_damage_found_by_counting_is_reported_at_every_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cut: int
) -> None:
    paths = write_shards(tmp_path, [5, 8, 5])
    paths[1].write_bytes(paths[1].read_bytes()[: 3072 + cut])
    paths[2].write_bytes(b"noise" * 999)
    pipe = tmp_path / "pipe.tar"
    os.mkfifo(pipe)  # it cannot be opened as a shard
    urls = [str(path) for path in (*paths, pipe)]
    for start in range(2):  # the second finds it in the index
        caplog.clear()
        build_order(DataConfig(train=urls), urls, None, BatchShare(1, 0, 1), 0)
        (message,) = [r.getMessage() for r in caplog.records if "damaged" in r.getMessage()]
        assert message.startswith(f"3 of 4 shards are damaged (first: {urls[1]}, truncated_shard: "), (start, message)
