"""A shard stream's windows: the same order from any start, bounded memory, and nothing that is read in vain."""

import gzip
import tracemalloc
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from clipscale.data.loader import shard_reader
from clipscale.data.loader.shard_reader import OrderedShards
from clipscale.data.order import Segment, WeightedSources
from clipscale.data.sample import RawSample, size_limits_of
from clipscale.data.shards import index
from tests.data.files import write_tar
from tests.data.streams import items_of


def pictures(folder: Path, sizes: list[int]) -> Path:
    """A shard of members of random bytes."""
    noise = np.random.default_rng(0)
    return write_tar(folder / "x.tar", [(f"{i:03d}.png", noise.bytes(size)) for i, size in enumerate(sizes)])


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("kind", ["plain", "indexed", "packed"])
def test_windows_closed_by_bytes_are_the_same_from_any_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, counted: bool
) -> None:
    path = pictures(tmp_path, [1000 * (1 + i * 7 % 13) for i in range(40)])
    count = 40 if counted else None

    def keys(start: int, stop: int | None) -> list[str]:
        items = items_of(Segment(0, 0, start, stop, count), str(path), window=16, size_limits=size_limits_of(["png"]))
        return [item.key for item in items if isinstance(item, RawSample) and item.members]

    ordinary = keys(0, count)
    monkeypatch.setattr(shard_reader, "WINDOW_BYTES", 50_000)
    plain = keys(0, count)
    assert sorted(plain) == sorted(ordinary) and plain != ordinary
    used = Mock(wraps=index.sample_offsets)
    monkeypatch.setattr(index, "sample_offsets", used)
    if kind == "indexed":
        dict(index.update_indexes([str(path)]))
    elif kind == "packed":
        path.write_bytes(gzip.compress(path.read_bytes()))
    for start in (0, 1, 3, 9, 17, 31, 39):
        assert keys(start, count) == plain[start:], f"from {start} on"
        if counted:
            assert [keys(start, stop) for stop in (start + 1, 40)] == [plain[start : start + 1], plain[start:]]
    assert used.called == (kind != "packed")


def test_a_stream_holds_about_one_window_of_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes bound what is in memory at once, not only the number of samples."""
    size = 200_000
    path = pictures(tmp_path, [size if i % 3 else 500 for i in range(90)])
    monkeypatch.setattr(shard_reader, "WINDOW_BYTES", 5 * size)
    tracemalloc.start()
    keys = []
    items_of(
        Segment(0, 0, 0, 90, 90),
        str(path),
        window=64,
        size_limits=size_limits_of(["png"]),
        use=lambda x: keys.append(x.key),
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(keys) == 90
    assert peak < 9 * size, f"{peak} bytes: both windows together have about {5 * size}, and two samples come and go"


def test_sources_share_the_window_by_their_weights() -> None:
    """Several sources hold no more samples than one would."""
    order = WeightedSources((1.0, 3.0, 0.0), (0, 1, 2), (9, 9, 9), 4, seed=1)
    assert [source.window for source in OrderedShards(("a", "b", "c"), order, 8).sources] == [2, 6, 1]


def test_a_shard_without_samples_is_counted_as_one(tmp_path: Path) -> None:
    """The shard's count is not known, so it is read to its end."""
    (item,) = items_of(Segment(0, 0, 0, None, None), str(write_tar(tmp_path / "x.tar", [])))
    assert (item.error, item.is_missing, item.url) == ("empty_shard", True, str(tmp_path / "x.tar"))
