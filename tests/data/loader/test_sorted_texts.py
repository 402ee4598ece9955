"""Captions are sorted by length, cut into chunks of equal tokens, and trimmed; nothing of them is lost."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from clipscale.data.loader.sorted_texts import WIDTH_MULTIPLE, SortedTexts, widths_of
from clipscale.data.tokenizer import Padding

CPU = torch.device("cpu")
PAD = 0
END = 99
CONTEXT = 44


def captions(words: list[int]) -> Tensor:
    """Captions of that many words, each with its number, then the end, then padding; one with a word that looks like
    padding."""
    tokens = torch.full((len(words), CONTEXT), PAD, dtype=torch.int32)
    for row, count in enumerate(words):
        tokens[row, :count] = row + 1
        tokens[row, max(0, count - 1)] = PAD
        tokens[row, count] = END
    return tokens


def sorted_texts(tokens: Tensor) -> SortedTexts:
    sizes = lambda: Padding(PAD).lengths(tokens.numpy())  # noqa: E731
    return SortedTexts(lambda a, b: tokens[a:b], sizes, len(tokens), CONTEXT, CPU, stays_on_device=False)


def test_lengths_go_in_steps_of_eight_up_to_the_context() -> None:
    words = [0, 6, 7, 8, 15, 16, 39, 40, 43]
    sizes = Padding(PAD).lengths(captions(words).numpy())
    assert sizes.tolist() == [count + 1 for count in words]
    assert widths_of(sizes, CONTEXT).tolist() == [8, 8, 8, 16, 16, 24, 40, 44, 44]
    assert widths_of(Padding(PAD).lengths(np.full((1, CONTEXT), PAD)), CONTEXT).tolist() == [WIDTH_MULTIPLE]


def test_chunks_hold_every_caption_once_in_full_within_the_budget() -> None:
    draw = random.Random(0)
    tokens = captions([min(int(draw.lognormvariate(2.6, 0.6)), CONTEXT - 1) for _ in range(300)])
    size = 16
    inputs = sorted_texts(tokens)
    spans = inputs.spans(size)
    seen = torch.cat([inputs.rows(*span) for span in spans])
    assert seen.sort().values.tolist() == list(range(300))
    for span in spans:
        chunk = inputs.chunk(*span)
        whole = tokens[inputs.rows(*span)]
        width = chunk.shape[1]
        assert chunk.numel() <= size * CONTEXT
        assert width == CONTEXT or width % WIDTH_MULTIPLE == 0
        assert torch.equal(chunk, whole[:, :width]) and not whole[:, width:].any()
    computed = sum(width * count for width, count in inputs.widths().items())
    assert computed == sum(inputs.chunk(*span).numel() for span in spans) < 0.7 * tokens.numel()
    assert len(spans) < 300 // size, "short captions come in larger chunks"


def test_equal_lengths_keep_the_batchs_order() -> None:
    inputs = sorted_texts(captions([3, 20, 5, 20, 4]))
    inputs.spans(5)
    assert inputs.rows(0, 5).tolist() == [1, 3, 0, 2, 4]


@pytest.mark.parametrize("short", [1, 3, 5])
def test_ranks_make_equally_many_chunks(short: int) -> None:
    """A rank with fewer chunks than another halves its largest."""
    inputs = sorted_texts(captions([5] * short + [30] * (7 - short)))
    inputs.make_chunks(7)
    inputs.split(max(inputs.num_chunks, 5))
    spans = inputs.spans(7)
    assert len(spans) == 5 and spans[-1][1] == 7
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
