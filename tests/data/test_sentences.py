"""Parts of long captions: what is drawn, and that ranks, workers and resumed runs draw alike."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipscale.config.conditions import parse_caption_sources
from clipscale.data.order import CounterRNG
from clipscale.data.sentences import draw_part, sentences
from tests.data.files import Words, picture, write_tar
from tests.data.streams import contents, open_stream
from tests.support.user_errors import refused

WORDS = st.lists(st.text("abcé", min_size=1, max_size=5), min_size=1, max_size=4).map(" ".join)
TEXT = "A cat. Is it on 3.5 mats? It is! 一只猫。两只狗。\nThe end"
SENTENCES = ["A cat.", "Is it on 3.5 mats?", "It is!", "一只猫。", "两只狗。", "The end"]


def test_sentences_end_where_readers_see_an_end() -> None:
    assert sentences(TEXT) == SENTENCES
    quoted = [
        'A sign says "Stop."',
        "A dog (brown.)",
        "Is it [so?!]",
        "\u201cYes.\u201d",
        "\u201c\u4e00\u3002\u201d",
        "b.c?d",
    ]
    assert sentences(" ".join(quoted)) == quoted, "a closing quote or bracket belongs to the sentence before it"
    assert sentences(" no end ") == ["no end"] and sentences(" \n ") == []


@given(st.lists(WORDS.map("{}.".format), min_size=1, max_size=9), st.integers(1, 60), st.integers(0, 99))
def test_a_span_is_as_long_as_fits_and_later_ones_leave_the_first_out(found: list[str], most: int, seed: int) -> None:
    text = " ".join(found)
    drawn = {
        part: draw_part(text, part, CounterRNG(seed), lambda text: len(text) <= most)
        for part in ("sentence", "span", "later")
    }
    assert drawn["sentence"] in found
    for part, usable in (("span", found), ("later", found[1:] or found)):
        begins = usable[CounterRNG(seed).integer(len(usable)) :]
        fitting = [n for n in range(1, len(begins) + 1) if n == 1 or len(" ".join(begins[:n])) <= most]
        assert drawn[part] == " ".join(begins[: fitting[-1]])


@pytest.mark.parametrize("part", ["sentence", "span", "later"])
def test_ranks_workers_and_resumed_runs_draw_the_same_parts(tmp_path: Path, part: str) -> None:
    members = [
        member
        for i in range(24)
        for member in ((f"{i:04d}.png", picture(i)), (f"{i:04d}.txt", f"a{i} x. b{i}. c{i}. d{i}.".encode()))
    ]
    write_tar(tmp_path / "0.tar", members)
    options = {"captions": [f"txt@{part}=0.5", "txt=0.5"], "shard_streams": 4}
    with open_stream(tmp_path, batch=8, **options) as stream:
        first = contents(stream, 2)
        position = stream.position()
        following = contents(stream, 7)  # into a third epoch
    texts = [
        tokens[i : i + len(tokens) // 8] for *_, tokens in following for i in range(0, len(tokens), len(tokens) // 8)
    ]
    assert len(set(texts)) > 24, "other parts in other epochs"
    with open_stream(tmp_path, batch=8, workers=2, **options) as stream:
        assert contents(stream, 2) == first
    with open_stream(tmp_path, batch=8, position=position, **options) as stream:
        assert contents(stream, 7) == following
    halves = [open_stream(tmp_path, batch=8, rank=rank, world_size=2, **options) for rank in (0, 1)]
    both = [contents(stream, 2) for stream in halves]
    assert [a[2] + b[2] for a, b in zip(*both, strict=True)] == [tokens for _, _, tokens in first]


@pytest.mark.parametrize("pad", [0, Words.END])
def test_a_span_is_no_longer_than_the_context_of_the_run(tmp_path: Path, pad: int) -> None:
    """A caption that fills the context but for an end token that is the padding does not fit."""
    members = [(f"{i:02d}.png", picture(i)) for i in range(24)]
    members += [(f"{i:02d}.txt", b"a b c d. " * 9) for i in range(24)]
    write_tar(tmp_path / "0.tar", sorted(members))
    with open_stream(tmp_path, batch=24, captions=["txt@span"], tokenizer=Words(20, pad)) as stream:
        words = {int(length) - 2 for length in stream.next_batch().lengths()}
    assert words == {4, 8, 12, 16}


def test_an_unknown_part_is_refused() -> None:
    assert parse_caption_sources(["json:alt@span=3", "json:@id"]) == (("json:alt", 3.0, "span"), ("json:@id", 1.0, ""))
    with refused("data.captions=txt@first: @first is none of @sentence, @span, @later"):
        parse_caption_sources(["txt@first"])
