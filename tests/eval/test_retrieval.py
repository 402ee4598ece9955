"""Recall at k against hand-made cases and a direct definition. N: images, M: captions, D: feature width."""

import math

import pytest
import torch
import torch.nn.functional as F

from clipscale.eval import retrieval
from clipscale.eval.encode import MISSED
from clipscale.eval.retrieval import first_right_ranks


def ranks_of(images: torch.Tensor, captions: torch.Tensor, owner: torch.Tensor) -> tuple[list[int], list[int]]:
    numbers = torch.arange(len(images))
    by_image = first_right_ranks(images, captions, numbers, owner)
    return by_image.tolist(), first_right_ranks(captions, images, owner, numbers).tolist()


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
    N, M, D = 23, 61, 8
    images = F.normalize(torch.randn(N, D, generator=generator, dtype=torch.float64), dim=-1)
    captions = F.normalize(torch.randn(M, D, generator=generator, dtype=torch.float64), dim=-1)
    owner = torch.cat([torch.arange(N), torch.randint(0, N, (M - N,), generator=generator)])
    image_ranks, caption_ranks = ranks_of(images, captions, owner)
    scores = images @ captions.T
    owners = owner[scores.argsort(dim=1, descending=True)]
    assert image_ranks == (owners == torch.arange(N)[:, None]).int().argmax(1).tolist()
    assert caption_ranks == (scores.argsort(dim=0, descending=True) == owner).int().argmax(0).tolist()
