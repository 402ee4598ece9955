"""Which sample comes when: the order is a pure function, and an epoch holds every sample exactly once."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipscale.data.order import (
    CounterRNG,
    Epochs,
    Resampled,
    WeightedSources,
    default_streams,
    fingerprint,
    permutation,
    rng_key,
)


@st.composite
def epoch_orders(draw: st.DrawFn) -> Epochs:
    counts = tuple(draw(st.lists(st.integers(0, 40), min_size=1, max_size=12)))
    batch = draw(st.integers(1, 200))
    streams = draw(st.integers(1, batch))
    return Epochs(counts, batch, streams, draw(st.integers(0, 2**63)))


@given(epoch_orders(), st.integers(0, 5))
def test_an_epoch_holds_every_place_of_every_shard_once(order: Epochs, epoch: int) -> None:
    places = Counter()
    for stream in range(order.num_streams):
        for segment in order.segments(stream, epoch):
            assert segment.stop is not None and segment.stop <= order.counts[segment.shard]
            places.update((segment.shard, i) for i in range(segment.start, segment.stop))
    assert places == Counter((shard, i) for shard, count in enumerate(order.counts) for i in range(count))


@given(epoch_orders(), st.integers(0, 3), st.data())
def test_skipping_goes_on_where_reading_stopped(order: Epochs, epoch: int, data: st.DataObject) -> None:
    def places(stream: int, skip: int) -> list[tuple[int, int]]:
        return [(s.shard, i) for s in order.segments(stream, epoch, skip) for i in range(s.start, s.stop or 0)]

    stream = data.draw(st.integers(0, order.num_streams - 1))
    whole = places(stream, 0)
    skip = data.draw(st.integers(0, len(whole)))
    assert places(stream, skip) == whole[skip:]


def test_the_order_is_pinned_down() -> None:
    """A change here breaks the resumption of every run that was begun before it."""
    assert permutation(8, 1, 2, 3).tolist() == [1, 3, 7, 2, 4, 0, 6, 5]
    assert rng_key(1, 2, 3) == 10587385839274598474
    assert CounterRNG(7).uniform() == 0.5283941012539481
    assert fingerprint(Epochs((3, 4), 8, 4, seed=1), ["a", "b"], 16) == "19c747a15204a4c3"
    assert fingerprint(Resampled((0, 1), (3, 4), 4, seed=1), ["a", "b"], 16) == "5a97f7fdebd76ef0"
    assert fingerprint(WeightedSources((1.0, 3.0), (0, 1), (3, None), 4, seed=1), ["a", "b"], 16) == "22291f7aacfc9939"


SOME_WEIGHTS = st.lists(st.sampled_from([0.0, 0.001, 0.1, 1.0, 3.0, 10.0]), min_size=1, max_size=6).filter(any)


@given(SOME_WEIGHTS, st.integers(0, 2**32))
def test_every_stretch_of_a_stream_has_each_source_by_its_weight(weights: list[float], seed: int) -> None:
    order = WeightedSources(tuple(weights), tuple(range(len(weights))), (None,) * len(weights), 4, seed)
    drawn = np.array([order.source(1, place) for place in range(64 * 50)])
    for source, weight in enumerate(weights):
        share = weight / sum(weights)
        of_blocks = (drawn.reshape(50, 64) == source).sum(1)
        assert of_blocks.min() >= np.floor(64 * share) and of_blocks.max() <= np.ceil(64 * share + 1e-9)
        assert abs((drawn == source).sum() - 64 * 50 * share) < 4


def test_a_sources_samples_come_equally_often_whatever_its_shards_hold() -> None:
    order = WeightedSources((1.0, 1.0), (0, 0, 1), (200, 20, 5), 4, seed=3).within(0)
    drawn = Counter(next(order.segments(stream, epoch)).shard for stream in range(4) for epoch in range(1000))
    assert set(drawn) == {0, 1} and drawn[0] / 4000 == pytest.approx(0.5, abs=0.03)


def test_a_shard_is_read_from_its_first_sample_unless_some_are_skipped() -> None:
    drawn = Resampled((0,), (10,), 4, seed=3)
    whole = Epochs((10,), 2, 2, seed=3)
    assert [(s.start, s.stop) for s in drawn.segments(0, 5)] == [(0, 10)]
    assert [(s.start, s.stop) for s in drawn.segments(0, 5, 4)] == [(4, 10)]
    assert [(s.start, s.stop) for s in whole.segments(0, 5)] == [(0, 5)]


def test_a_shard_drawn_twice_is_shuffled_twice() -> None:
    """Two streams draw it at the same number, or one stream draws it at two numbers."""
    order = Resampled((0,), (1000,), 4, seed=3)
    keys = [next(order.segments(stream, epoch)).shuffle_key for stream in range(4) for epoch in range(4)]
    assert len({*keys}) == 16


def test_a_shard_without_samples_is_never_drawn() -> None:
    """A shard of unknown count may have samples, so it may be drawn."""
    order = WeightedSources((1.0,), (0, 0, 0), (0, 5, None), 4, seed=3)
    assert {next(order.within(0).segments(stream, epoch)).shard for stream in range(4) for epoch in range(50)} == {1, 2}


@pytest.mark.parametrize(
    ("batch", "world_size", "samples", "streams"),
    [
        (4096, 1, None, 64), (4096, 8, None, 64), (4096, 16, None, 128), (4096, 3, None, 192), (40, 1, None, 32),
        (12, 4, None, 8), (63, 3, None, 48), (9, 9, None, 9), (64, 1, 64, 64), (64, 1, 63, 32), (64, 1, 10, 8),
        (64, 2, 1, 2), (64, 1, 1, 1),
    ],
)  # fmt: skip
def test_the_usual_number_of_streams_is_pinned_down(
    batch: int, world_size: int, samples: int | None, streams: int
) -> None:
    """The order depends on it. It is as large as batch and samples allow, and the same for 1, 2, 4 and 8 ranks."""
    assert default_streams(batch, world_size, samples) == streams
