"""Sample counts of shards, and the order that they allow."""

from pathlib import Path

import pytest

from clipscale.config.data import DataConfig
from clipscale.data.order import BatchShare
from clipscale.data.shards.counts import build_order
from tests.data.files import write_shards


@pytest.mark.parametrize("cut", [100, 600, 3072], ids=["within a header", "within a picture", "between samples"])
def test_damage_found_by_counting_is_reported_at_every_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cut: int
) -> None:
    paths = write_shards(tmp_path, [5, 8, 5])
    paths[1].write_bytes(paths[1].read_bytes()[: 3072 + cut])
    paths[2].write_bytes(b"noise" * 999)
    urls = [str(path) for path in paths]
    for start in range(2):  # the second finds it in the index
        caplog.clear()
        build_order(DataConfig(train=urls), urls, None, BatchShare(1), 0)
        (message,) = [r.getMessage() for r in caplog.records if "damaged" in r.getMessage()]
        assert message.startswith(f"2 of 3 shards are damaged (first: {urls[1]}, truncated_shard)"), (start, message)
