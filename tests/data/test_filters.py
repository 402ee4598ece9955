"""Each filter drops samples under its own reason; captions are drawn by weight with the sample's own random numbers."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clipscale.common import files
from clipscale.common.batch import TextLayout
from clipscale.config.data import DataConfig
from clipscale.data.filters import Selection, parse_selection
from clipscale.data.order import CounterRNG
from clipscale.data.sample import BrokenSampleError, RawSample
from tests.data.files import picture
from tests.data.test_sample import SAMPLES

TABLES = files.read_yaml(Path(__file__).with_name("filters.yaml"))


def chosen(*conditions: str, captions: Sequence[str] = ("txt",)) -> Selection:
    return parse_selection(DataConfig(captions=list(captions), filter=list(conditions)))


def raw(size: tuple[int, int] = (8, 6), text: str = "a caption", **fields: Any) -> RawSample:
    members = {"png": picture(size=size), "txt": text.encode(), "json": json.dumps(fields).encode()}
    return RawSample("/data/00000.tar", "a", 0, members)


def reason_for(selected: Selection, sample: RawSample) -> str | None:
    try:
        selected.check(sample, [text for text, _ in selected.draw(sample.members, CounterRNG(1))])
    except BrokenSampleError as error:
        return error.reason
    return None


@pytest.mark.parametrize(("condition", "bad", "reason"), SAMPLES["filters"])
def test_each_condition_has_a_reason_of_its_own(condition: str, bad: dict, reason: str) -> None:
    good = raw(similarity=0.3, punsafe="0.1", LANGUAGE="EN", status="ok")
    assert reason_for(chosen(condition), raw(**bad)) == f"filter_{reason}"
    assert reason_for(chosen(condition), good) is None


def test_what_costs_least_is_looked_at_first() -> None:
    """The picture is opened only for samples that all else lets through, and fields are read only where they count."""
    sample = raw(size=(8, 5), text="ab")
    assert reason_for(chosen("side>=6", "similarity>=0.3", "caption>=3"), sample) == "filter_caption"
    assert reason_for(chosen("side>=6", "similarity>=0.3"), sample) == "filter_no_similarity"
    assert [chosen(condition).extensions_to_read() for condition in ("side>=6", "similarity>=0.3")] == [
        {"txt"},
        {"txt", "json"},
    ]


@pytest.mark.parametrize(
    ("captions", "fields", "shares"),
    TABLES["shares"],
)
def test_sources_are_drawn_by_weight_and_a_list_shares_it(
    captions: list[str], fields: dict, shares: dict[str, float]
) -> None:
    selected = chosen(captions=captions)
    sample = raw(text="t", **fields)
    drawn = [Counter(selected.draw(sample.members, CounterRNG(5, i))[0][0] for i in range(4000)) for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert {text: count / 4000 for text, count in drawn[0].items()} == pytest.approx(shares, abs=0.03)


def test_a_source_without_text_gives_way_to_the_others() -> None:
    selected = chosen(captions=["json:alt=9", "txt=1"])
    assert {selected.draw(raw(text="t").members, CounterRNG(i))[0][0] for i in range(50)} == {"t"}
    with pytest.raises(BrokenSampleError, match="no_caption"):
        selected.draw(raw(text=" ").members, CounterRNG(0))


def test_captions_are_drawn_without_replacement_and_then_again() -> None:
    selected = chosen(captions=["txt=2", "json:alts=1"])
    sample = raw(text="t", alts=["a", "b", " ", 3])
    for i in range(50):
        drawn = [text for text, _ in replace(selected, text_layout=TextLayout(7)).draw(sample.members, CounterRNG(i))]
        assert sorted(drawn[:3]) == sorted(drawn[3:6]) == ["a", "b", "t"] and drawn[6] in "abt"
        assert [drawn[0]] == [text for text, _ in selected.draw(sample.members, CounterRNG(i))], "whatever their number"


def test_negatives_are_drawn_as_captions_and_a_sample_without_one_is_broken() -> None:
    selected = parse_selection(DataConfig(negatives="json:hard", negatives_per_step=3))
    assert sorted(selected.draw_negatives(raw(hard=["a", " ", "b"]).members, CounterRNG(0))[:2]) == ["a", "b"]
    assert selected.draw_negatives(raw(hard="a").members, CounterRNG(0)) == ["a", "a", "a"]
    for sample in (raw(), raw(hard=[])):
        with pytest.raises(BrokenSampleError, match="no_negative"):
            selected.draw_negatives(sample.members, CounterRNG(0))


@pytest.mark.parametrize(("same", "one", "other", "equal"), SAMPLES["keys"])
def test_samples_with_the_same_value_have_the_same_key(same: str, one: dict, other: dict, equal: bool) -> None:
    selected = parse_selection(DataConfig(same=same))

    def key(fields: dict, own: str) -> int:
        sample = raw(**fields)
        return selected.sameness_key(sample, sample.members["txt"].decode(), own)

    keys = [key(one, "0 0"), key(other, "0 1")]
    assert (keys[0] == keys[1]) == equal
    assert keys[0] == key(one, "0 0"), "the same sample twice in a batch"
    assert all(-(2**63) <= key < 2**63 for key in keys)
