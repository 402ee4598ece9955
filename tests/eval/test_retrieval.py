"""Recall at k against hand-made cases and a direct definition. N: images, M: captions, D: feature width."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from clipscale.eval import retrieval
from clipscale.eval.encode import MISSED
from clipscale.eval.retrieval import Relevance, first_right_ranks, retrieval_metrics


def ranks_of(images: torch.Tensor, captions: torch.Tensor, owner: torch.Tensor) -> tuple[list[int], list[int]]:
    of = Relevance.for_distinct_captions(owner)
    by_image = first_right_ranks(images, captions, of.image_id, of.caption_id, of.pairs)
    return by_image.tolist(), first_right_ranks(captions, images, of.caption_id, of.image_id, of.pairs.flip(1)).tolist()


def test_ties_count_against_the_model() -> None:
    image_ranks, caption_ranks = ranks_of(torch.ones(4, 2), torch.ones(8, 2), torch.arange(8) // 2)
    assert image_ranks == [6] * 4, "a collapsed model finds its own caption only after the six others"
    assert caption_ranks == [3] * 8


def test_features_that_are_not_numbers_find_nothing() -> None:
    assert ranks_of(torch.full((3, 2), math.nan), torch.ones(3, 2), torch.arange(3)) == ([MISSED] * 3, [MISSED] * 3)


@pytest.mark.parametrize("block", [1, 7, 23, 4096])
def test_ranks_are_those_of_sorting_whatever_the_block(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "BLOCK", block)
    generator = torch.Generator().manual_seed(1)
    N = 23
    M = 61
    D = 8
    images = F.normalize(torch.randn(N, D, generator=generator, dtype=torch.float64), dim=-1)
    captions = F.normalize(torch.randn(M, D, generator=generator, dtype=torch.float64), dim=-1)
    owner = torch.cat([torch.arange(N), torch.randint(0, N, (M - N,), generator=generator)])
    image_ranks, caption_ranks = ranks_of(images, captions, owner)
    scores = images @ captions.T
    owners = owner[scores.argsort(dim=1, descending=True)]
    assert image_ranks == (owners == torch.arange(N)[:, None]).int().argmax(1).tolist()
    assert caption_ranks == (scores.argsort(dim=0, descending=True) == owner).int().argmax(0).tolist()


# ---- captions and pictures that repeat ----


def test_where_captions_repeat_a_perfect_model_is_perfect_and_another_is_not() -> None:
    """The set is a shop's: 1,936 photographs of 64 titles."""
    title = torch.randint(0, 64, (1936,), generator=torch.Generator().manual_seed(0))
    of = Relevance(torch.arange(1936), torch.arange(1936), title.unique(return_inverse=True)[1])
    perfect = torch.eye(64)[title]
    assert set(retrieval_metrics(perfect, perfect, of).values()) == {1.0}
    untrained = [F.normalize(torch.randn(1936, 64, generator=torch.Generator().manual_seed(n)), dim=-1) for n in (1, 2)]
    assert retrieval_metrics(untrained[0], untrained[1], of)["image_to_text_r1"] < 0.05
    assert set(retrieval_metrics(perfect, perfect.roll(1, 1), of).values()) == {0.0}, "each finds the next title"


def recall(scores: np.ndarray, right: np.ndarray, k: int) -> float:
    """Recall at k by sorting. Of equally similar answers the wrong ones come first."""
    hits = 0
    for row, answers in zip(scores, right):
        order = sorted(range(len(row)), key=lambda i: (-row[i], answers[i]))
        hits += bool(answers[order[:k]].any())
    return hits / len(scores)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_equal_captions_and_pictures_are_right_by_a_direct_definition(data: st.DataObject) -> None:
    """The definition goes over every pair of an image and a caption, in float64. There are ties."""
    owner = sorted(data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=14)))
    owner = [sorted(set(owner)).index(image) for image in owner]
    N = owner[-1] + 1
    M = len(owner)
    picture = data.draw(st.lists(st.integers(0, 3), min_size=N, max_size=N))
    caption = data.draw(st.lists(st.integers(0, 4), min_size=M, max_size=M))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    levels = data.draw(st.sampled_from([2, 1000]))
    images = rng.integers(-levels, levels, (N, 3)).astype(float)
    captions = rng.integers(-levels, levels, (M, 3)).astype(float)
    right = np.zeros((N, M), bool)
    for i in range(N):
        for c in range(M):
            right[i, c] = any(caption[d] == caption[c] and picture[owner[d]] == picture[i] for d in range(M))
    _, picture_numbers = torch.tensor(picture).unique(return_inverse=True)
    _, caption_numbers = torch.tensor(caption).unique(return_inverse=True)
    relevance = Relevance(torch.tensor(owner), picture_numbers, caption_numbers)
    metrics = retrieval_metrics(torch.tensor(images), torch.tensor(captions), relevance)
    scores = images @ captions.T
    for k in (1, 5, 10):
        assert metrics[f"image_to_text_r{k}"] == recall(scores, right, k)
        assert metrics[f"text_to_image_r{k}"] == recall(scores.T, right.T, k)
