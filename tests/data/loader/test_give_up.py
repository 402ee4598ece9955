"""When a shard stream leaves a shard, and when it gives up."""

from pathlib import Path

import pytest

from clipscale.config.data import DataConfig
from clipscale.data.filters import parse_selection
from clipscale.data.loader import give_up
from clipscale.data.loader.give_up import GiveUpRule
from clipscale.data.order import Segment
from clipscale.data.sample import BrokenSampleError, RawSample
from clipscale.data.shards.store import Store
from tests.support.user_errors import refused

URL = str(Path(__file__).parent / "no-shard.tar")
SAMPLE = RawSample(URL, "a", 0, {})
DAMAGED = BrokenSampleError("unreadable_picture")
UNREACHABLE = BrokenSampleError("unreachable_shard", "no answer")
SILENT_SHARD = RawSample.missing(URL, "unreachable_shard", "no answer")


@pytest.fixture
def rule(monkeypatch: pytest.MonkeyPatch) -> GiveUpRule:
    monkeypatch.setattr(give_up, "MAX_BROKEN_IN_SHARD", 2)
    monkeypatch.setattr(give_up, "MAX_BROKEN", 4)
    monkeypatch.setattr(give_up, "MAX_UNUSABLE_SEGMENTS", 5)
    return GiveUpRule(parse_selection(DataConfig(train=[URL])), Store())


def segment(shard: int) -> Segment:
    return Segment(shard, shuffle_key=0, start=0, stop=None, count=None)


def test_a_shard_is_left_after_more_than_its_limit_of_broken_samples_in_a_row(rule: GiveUpRule) -> None:
    leaves = [rule.count_broken(DAMAGED, segment(0), SAMPLE) for _ in range(3)]
    assert leaves == [False, False, True]
    assert not rule.count_broken(DAMAGED, segment(1), SAMPLE), "another shard's samples are counted by themselves"


def test_a_usable_sample_begins_all_counts_again(rule: GiveUpRule) -> None:
    for shard in range(12):
        for _ in range(2):
            assert not rule.count_broken(DAMAGED, segment(shard), SAMPLE)
        for silent in (12, 13):
            assert not rule.count_broken(UNREACHABLE, segment(silent), SILENT_SHARD)
        rule.count_usable()


def test_a_stream_gives_up_after_more_than_its_limit_of_broken_samples(rule: GiveUpRule) -> None:
    rule.count_broken(BrokenSampleError("huge_image"), segment(0), SAMPLE)
    rule.count_usable()  # the message counts the broken samples since then
    for shard in (0, 0, 1, 1):
        rule.count_broken(DAMAGED, segment(shard), SAMPLE)
    with refused(r"no usable sample among the last 5 of one shard stream \(unreadable_picture 5;"):
        rule.count_broken(DAMAGED, segment(2), SAMPLE)


def test_segments_count_even_if_none_of_their_samples_is_read(rule: GiveUpRule) -> None:
    fruitless = RawSample.missing(URL, "fruitless_shard", "")
    for shard in range(5):
        rule.count_broken(BrokenSampleError("fruitless_shard"), segment(shard), fruitless)
    rule.count_broken(BrokenSampleError("fruitless_shard"), segment(4), fruitless)  # the same one again
    with refused("no usable sample among the last 7"):
        rule.count_broken(BrokenSampleError("fruitless_shard"), segment(5), fruitless)


def test_a_stream_gives_up_at_the_third_unreachable_shard_in_a_row(rule: GiveUpRule) -> None:
    """A sample that is read between them shows that the storage is there, even if it is broken."""
    for shard in (0, 0, 1):
        rule.count_broken(UNREACHABLE, segment(shard), SILENT_SHARD)
    rule.count_broken(DAMAGED, segment(2), SAMPLE)
    rule.count_usable()
    for shard in (0, 1):
        rule.count_broken(UNREACHABLE, segment(shard), SILENT_SHARD)
    rule.count_broken(DAMAGED, segment(2), SAMPLE)
    rule.count_broken(UNREACHABLE, segment(3), SILENT_SHARD)
    rule.count_usable()
    for shard in (0, 1):
        rule.count_broken(UNREACHABLE, segment(shard), SILENT_SHARD)
    with refused("3 shards in a row cannot be reached"):
        rule.count_broken(UNREACHABLE, segment(2), SILENT_SHARD)
