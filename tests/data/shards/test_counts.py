"""Shards that cannot be read are counted as empty, with a warning, and end no start."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from clipscale.config.data import DataConfig
from clipscale.data.order import BatchShare, Epochs
from clipscale.data.shards import index
from clipscale.data.shards.counts import build_order, count_if_quick, count_samples
from clipscale.data.shards.subset import Subset
from tests.data.files import write_shards


def gone(shard: Path) -> None:
    """An interrupted copy, or git-annex, leaves such a link."""
    shard.symlink_to("nowhere")


@pytest.mark.parametrize("make", [gone, Path.mkdir, os.mkfifo])
def test_a_shard_that_cannot_be_read_leaves_the_count_to_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Path], None]
) -> None:
    (good,) = write_shards(tmp_path, [3])
    make(tmp_path / "bad.tar")
    urls = [str(good), str(tmp_path / "bad.tar")]
    assert count_if_quick(DataConfig(), urls[:1]) == 3
    assert count_if_quick(DataConfig(), urls) is None
    assert not caplog.messages, "the run says it"
    order = build_order(DataConfig(), urls, None, BatchShare(1, 0, 1), 0)
    assert isinstance(order, Epochs) and order.counts == (3, 0)
    assert f"1 of 2 shards are damaged (first: {urls[1]}, unreadable_shard" in caplog.text


@pytest.mark.parametrize("make", [gone, Path.mkdir, os.mkfifo])
def test_where_counts_cannot_be_remembered_an_unreadable_shard_is_counted_as_elsewhere(
    tmp_path: Path, user_cache: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Path], None]
) -> None:
    """A container's home is often read-only."""
    (good,) = write_shards(tmp_path / "set", [3])
    make(tmp_path / "set/bad.tar")
    (user_cache / "clipscale").write_text("no folder")
    assert count_samples([str(good), str(tmp_path / "set/bad.tar")]) == [3, 0]
    assert "counts are not remembered" in caplog.text and "1 of 2 shards are damaged" in caplog.text


def test_a_shard_that_another_process_has_counted_meanwhile_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs on the same new data start at once, and share the cache."""
    urls = [str(path) for path in write_shards(tmp_path, [3, 5])]
    read_entries = index.read_entries
    looks = []

    def look(urls: Sequence[str], subset: Subset | None = None) -> index.IndexedShards:
        looks.append(urls)
        known = read_entries(urls, subset)
        if len(looks) == 1:  # the other process writes its entry after this look
            count_samples([urls[1]])
        return known

    monkeypatch.setattr(index, "read_entries", look)
    order = build_order(DataConfig(), urls, None, BatchShare(1, 0, 1), 0)
    assert isinstance(order, Epochs) and order.counts == (3, 5)
