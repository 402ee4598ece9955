"""After a resume the same samples follow, for any readers and any place of interruption, and little is read twice."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clipscale.common.errors import UserError
from clipscale.data.loader.position import merge_positions
from clipscale.data.loader.stream import TrainStream
from clipscale.data.train_transform import TrainTransform
from tests.data.files import sample, write_shards, write_tar
from tests.data.streams import contents, flat, ids, inline_workers, open_stream, positions

# Ranks, and workers of each. Of the ranks, 3, 6, 12 and 24 cannot share the 8 shard streams evenly.
SPREADS = [(1, 0), (1, 3), (2, 2), (2, 3), (3, 0), (3, 2), (4, 1), (6, 1), (8, 1), (12, 2), (24, 1)]


@pytest.fixture(scope="module")
def dirty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five shards, one of them with broken samples, and one with no other."""
    folder = tmp_path_factory.mktemp("dirty")
    members = [m for i in range(30) for m in ([(f"{i}.txt", b"x")] if i % 6 == 0 else sample(str(i), i % 7))]
    write_shards(folder, [21, 13, 34])
    write_tar(folder / "dirty.tar", members)
    write_tar(folder / "dirty2.tar", [(f"{i}.txt", b"x") for i in range(60)])
    return folder


@pytest.mark.long
@settings(max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["epochs", "resampled", "weights"]),
    st.sampled_from(SPREADS),
    st.sampled_from(SPREADS),
    st.integers(0, 14),
    st.integers(0, 2**32),
)
def test_a_resumed_run_sees_what_an_uninterrupted_one_would(
    dirty: Path, order: str, before: tuple[int, int], after: tuple[int, int], stop: int, seed: int
) -> None:
    """It has other ranks and other numbers of workers, which get on at different speeds. A shard is left where it has
    nothing but broken samples."""

    def opened(world_size: int, workers: int, position: Any = None) -> list[TrainStream]:
        options = {"workers": workers, "position": position, "shard_streams": 8}
        options |= {"captions": ["txt", "json:alt"], "captions_per_step": 2, "same": "alt"}
        sources = {"train": [f"{dirty}/0000*.tar", f"{dirty}/dirty*.tar"], "weights": [1.0, 2.0]}
        options |= sources if order == "weights" else {"order": order}
        return [open_stream(dirty, batch=24, rank=r, world_size=world_size, **options) for r in range(world_size)]

    def read(streams: list[TrainStream], steps: int) -> list[Any]:
        parts = [contents(stream, steps) for stream in streams]
        of_steps = [zip(*of_ranks) for of_ranks in zip(*parts)]
        return [(*flat(keys), b"".join(pixels), b"".join(tokens)) for keys, pixels, tokens in of_steps]

    with inline_workers(seed), mock.patch("clipscale.data.loader.give_up.MAX_BROKEN_IN_SHARD", 8):
        alone = opened(1, 0)
        whole = read(alone, stop + 5)
        assert alone[0].broken["fruitless_shard"] or order == "resampled"
        first = opened(*before)
        assert read(first, stop) == whole[:stop]
        assert read(opened(*after, positions(first)), 5) == whole[stop:]


def test_resuming_seeks_without_decoding(tmp_path: Path) -> None:
    write_shards(tmp_path, [60, 60])
    stream = open_stream(tmp_path, batch=8)
    ids(stream, 10)
    position = positions([stream])
    expected = ids(stream, 2)
    with mock.patch.object(TrainTransform, "__call__", autospec=True, side_effect=TrainTransform.__call__) as decode:
        assert ids(open_stream(tmp_path, batch=8, position=position), 2) == expected
    assert decode.call_count == 16


def test_other_data_starts_from_its_beginning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_shards(tmp_path / "a", [20, 20])
    write_shards(tmp_path / "b", [20, 21])
    stream = open_stream(tmp_path / "a", batch=8)
    ids(stream, 2)
    position = positions([stream])
    assert ids(open_stream(tmp_path / "b", batch=8, position=position), 2) == ids(
        open_stream(tmp_path / "b", batch=8), 2
    )
    assert "from its first sample" in caplog.text
    following, moved = ids(stream, 2), tmp_path / "elsewhere"
    (tmp_path / "a").rename(moved)
    assert ids(open_stream(moved, batch=8, position=position), 2) == following, "the folder's name does not matter"
    assert open_stream(moved, batch=8, position=position).position() == position


def test_positions_of_different_shards_do_not_merge(tmp_path: Path) -> None:
    write_shards(tmp_path / "a", [20])
    write_shards(tmp_path / "b", [21])
    records = [open_stream(tmp_path / name, batch=8, rank=r, world_size=2).position() for r, name in enumerate("ab")]
    with pytest.raises(UserError, match="different shards"):
        merge_positions(records)
