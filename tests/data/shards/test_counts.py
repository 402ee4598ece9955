"""Sample counts of shards, and the order that they allow."""

import json
from pathlib import Path

import pytest

from clipscale.config.data import DataConfig
from clipscale.data.shards import index
from clipscale.data.shards.counts import build_order, recorded_counts, scan_counts
from tests.data.files import sample, write_shards, write_tar


def test_counts_are_found_beside_the_shards(tmp_path: Path) -> None:
    paths = [str(path) for path in write_shards(tmp_path, [3, 2, 4], sized=False)]
    assert recorded_counts(paths) == [None, None, None]
    (tmp_path / "00001_stats.json").write_text(json.dumps({"count": 9, "successes": 2}))
    assert recorded_counts(paths) == [None, 2, None]
    (tmp_path / "sizes.json").write_text(json.dumps({"00000.tar": 3, "00002.tar": 4}))
    assert recorded_counts(paths) == [3, 2, 4]
    assert recorded_counts(["https://host/00000.tar"]) == [None]


def test_scanned_counts_are_remembered_until_the_shard_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_shards(tmp_path, [5], sized=False)[0]
    assert scan_counts([str(path)]) == [5]
    with monkeypatch.context() as patch:
        patch.setattr(index, "scan_shard", lambda *_: pytest.fail("scanned again"))
        assert scan_counts([str(path)]) == [5]
    write_tar(path, sample("a") + sample("b"))
    assert scan_counts([str(path)]) == [2]


@pytest.mark.parametrize("cut", [100, 600, 3072], ids=["within a header", "within a picture", "between samples"])
def test_damage_found_by_counting_is_reported_at_every_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cut: int
) -> None:
    paths = write_shards(tmp_path, [5, 8, 5], sized=False)
    paths[1].write_bytes(paths[1].read_bytes()[: 3072 + cut])
    paths[2].write_bytes(b"noise" * 999)
    urls = [str(path) for path in paths]
    for start in range(2):  # the second finds it in the index
        caplog.clear()
        build_order(DataConfig(train=urls), urls, None, 1, 1, 0, None)
        (message,) = [r.getMessage() for r in caplog.records if "damaged" in r.getMessage()]
        assert message.startswith(f"2 of 3 shards are damaged (first: {urls[1]}, truncated_shard)"), (start, message)
