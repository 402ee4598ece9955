"""A caption of any length and any letters takes a bounded time, in training, after resuming and in evaluation."""

import random
import string
import time
from pathlib import Path

import open_clip
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clipscale.config.sections import ModelConfig
from clipscale.data.loader.shard_stream import last_place
from clipscale.models.bounded import CHARS_PER_TOKEN, LONGEST_WORD, bounded, longest_word
from clipscale.models.towers import architecture, tokenizer
from tests.data.files import sample, write_tar
from tests.data.streams import contents, open_stream, positions

ANY = st.text(st.characters(categories=None, codec=None))
LETTERS = "".join(random.Random(0).choices(string.ascii_lowercase, k=80_000))
SIGNS = "".join(random.Random(0).choices("\U0001f600\U0001f4a9\u2603\u0416\u6f22", k=80_000))


@given(ANY, st.integers(1, 50), st.integers(4, 50))
def test_a_bounded_text_is_a_beginning(text: str, most: int, longest: int) -> None:
    found = bounded(text, most, longest)
    assert len(found) <= most and longest_word(found) <= longest
    if len(text) <= most and longest_word(text) <= longest:
        assert found == text.encode("utf-8", "replace").decode()


@pytest.fixture(scope="module")
def clip() -> object:
    config = ModelConfig("ViT-B-32")
    return tokenizer(config, architecture(config))


@pytest.mark.parametrize("text", [LETTERS, SIGNS, "a " + LETTERS, "\u0416" * 80_000, "&amp;" * 20_000, "\ud800" * 1000])
def test_a_hostile_caption_takes_a_bounded_time(text: str, clip: object) -> None:
    began = time.monotonic()
    tokens = clip([text])  # type: ignore[operator]
    assert tokens.shape == (1, 77) and time.monotonic() - began < 8


def test_the_tokens_of_long_captions_are_the_same(clip: object) -> None:
    words = random.Random(1)
    texts = [
        " ".join(words.choices(["a", "photograph", "of", "squares,", "and\n\n", "Kreise", "\u6f22\u5b57"], k=k))
        for k in (5, 900, 3000)
    ]
    texts += ["  " * 5000 + "a dog", "\U0001f602" * 200]
    assert torch.equal(clip(texts), open_clip.get_tokenizer("ViT-B-32")(texts))  # type: ignore[operator]
    assert last_place(clip, 77)  # type: ignore[arg-type]


def test_no_token_of_clip_stands_for_more_characters() -> None:
    inner = open_clip.get_tokenizer("ViT-B-32")
    assert max(map(len, inner.encoder)) <= CHARS_PER_TOKEN


def test_a_sample_with_a_long_word_is_counted_and_skipped_also_after_resuming(tmp_path: Path) -> None:
    members = []
    for number in range(16):
        found = sample(f"{number:04d}", seed=number)
        if number % 4 == 1:
            found[1] = (found[1][0], LETTERS.encode())
        members += found
    write_tar(tmp_path / "00000.tar", members)
    with open_stream(tmp_path, batch=4) as stream:
        first, second = contents(stream, 2), positions([stream])
        rest = contents(stream, 4)
        assert stream.record()["broken_by"]["long_word"] >= 4
    with open_stream(tmp_path, batch=4, position=second) as stream:
        assert contents(stream, 4) == rest
    assert first != rest and len(LETTERS) > LONGEST_WORD
