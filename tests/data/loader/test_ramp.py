"""A batch that grows: its sizes, and a stream that keeps its promises under it."""

from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clipscale.common.errors import UserError
from clipscale.config.sections import RampConfig
from clipscale.data.loader.ramp import BatchSizes
from clipscale.data.loader.stream import TrainStream, merge_positions
from tests.data.files import write_shards
from tests.data.streams import all_ids, flat, ids, open_stream

pytestmark = pytest.mark.timeout(60)


def ramped(batch: int, start: int, samples: int, rule: str = "linear") -> BatchSizes:
    return BatchSizes(batch, RampConfig(start, samples, rule))


def test_the_rules() -> None:
    linear, double = ramped(64, 16, 192), ramped(64, 16, 192, "double")
    assert [linear.at(step) for step in range(10)] == [16, 16, 16, 16, 32, 32, 48, 48, 64, 64]
    assert [double.at(step) for step in range(12)] == [16, 16, 16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    assert [BatchSizes(64).at(step) for step in range(3)] == [64, 64, 64]
    for start, samples, message in ((24, 100, r"start=24: batch=64 is no multiple"), (16, 0, r"give ramp\.samples=N")):
        with pytest.raises(UserError, match=message):
            ramped(64, start, samples)


@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(0, 5000),
    st.sampled_from(["linear", "double"]),
    st.integers(0, 9000),
)
def test_steps_and_samples_agree(start: int, factor: int, over: int, rule: str, samples: int) -> None:
    sizes = ramped(start * factor, start, over + 1, rule)
    taken = [sizes.at(step) for step in range(300)]
    assert taken == sorted(taken) and all(size % start == 0 for size in taken)
    assert [sizes.before(step) for step in range(301)] == [0, *accumulate(taken)]
    steps = sizes.steps(samples)
    assert sizes.before(steps) <= samples < sizes.before(steps + 1)
    assert sizes.at(10**6) == start * factor


def opened(shards: Path, sizes: BatchSizes, done: int = 0, world: int = 1, **options: Any) -> list[TrainStream]:
    options |= {"batch": sizes.batch, "sizes": lambda i: sizes.at(done + i), "world": world, "shard_streams": 8}
    return [open_stream(shards, rank=rank, **options) for rank in range(world)]


def read(streams: list[TrainStream], steps: int) -> list[list[int]]:
    parts = [ids(stream, steps) for stream in streams]
    return [flat(part[step] for part in parts) for step in range(steps)]


@pytest.mark.parametrize("rule", ["linear", "double"])
def test_every_sample_comes_once_an_epoch_while_the_batch_grows(tmp_path: Path, rule: str) -> None:
    counts = [40, 17, 71]
    paths = write_shards(tmp_path, counts)
    sizes = ramped(64, 16, 4 * 128, rule)
    batches = read(opened(tmp_path, sizes), 24)
    assert [len(batch) for batch in batches] == [sizes.at(step) for step in range(24)]
    ends = [sizes.before(step) for step in range(1, 25) if sizes.before(step) % 128 == 0]
    assert len(ends) > 3, "epochs that end with a batch"
    for end in ends:
        expected = dict.fromkeys(all_ids(paths, counts), end // 128)
        assert Counter(flat(batches)[:end]) == expected, f"after {end // 128} epochs"


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([(1, 1), (2, 2), (1, 4), (4, 2)]), st.integers(0, 16), st.sampled_from(["linear", "double"]))
def test_a_resumed_ramp_sees_what_an_uninterrupted_one_would(
    tmp_path_factory: pytest.TempPathFactory, worlds: tuple[int, int], stop: int, rule: str
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    write_shards(folder, [21, 13, 34])
    sizes = ramped(48, 8, 200, rule)
    whole = read(opened(folder, sizes), 18)
    streams = opened(folder, sizes, world=worlds[0])
    assert read(streams, stop) == whole[:stop]
    position = merge_positions([stream.position() for stream in streams])
    assert read(opened(folder, sizes, stop, worlds[1], position=position), 18 - stop) == whole[stop:]


def test_a_start_that_the_streams_do_not_divide_is_refused_with_a_number_that_they_do(tmp_path: Path) -> None:
    write_shards(tmp_path, [100, 100])
    message = r"ramp\.start, stages: batches of 12 to 24 .* the 8 shard streams .*; set data\.shard_streams=6"
    with pytest.raises(UserError, match=message):
        opened(tmp_path, ramped(24, 12, 100))
