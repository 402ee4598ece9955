"""Recall at k against hand-made cases and a direct, unchunked definition. N: images, M: captions, D: feature width."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from clipscale.distributed.world import World
from clipscale.eval.retrieval import UNREACHABLE, retrieval_metrics, retrieval_ranks
from tests.support.ranks import run_ranks


def test_hand_made_case_with_several_captions_an_image() -> None:
    images = torch.eye(3)
    # Image 0 owns captions 0 and 1, image 1 owns 2, image 2 owns 3.
    captions = torch.tensor([[0.1, 0.9, 0.0], [0.8, 0.1, 0.0], [0.0, 0.7, 0.2], [0.0, 0.6, 0.5]])
    image_ranks, caption_ranks = retrieval_ranks(images, captions, torch.tensor([0, 0, 1, 2]))
    # Image 0: its caption 1 (0.8) is first. Image 1: caption 0 (0.9) stands before its 0.7. Image 2: its 0.5 is first.
    assert image_ranks.tolist() == [0, 1, 0]
    # Caption 0 prefers image 1; captions 1 and 2 find theirs; caption 3 prefers image 1.
    assert caption_ranks.tolist() == [1, 0, 0, 1]
    metrics = retrieval_metrics(image_ranks, caption_ranks)
    assert metrics["image_to_text_r1"] == pytest.approx(2 / 3)
    assert metrics["text_to_image_r1"] == pytest.approx(2 / 4)
    assert metrics["image_to_text_r5"] == metrics["text_to_image_r10"] == 1.0


def test_ties_count_against_the_model() -> None:
    image_ranks, caption_ranks = retrieval_ranks(torch.ones(4, 2), torch.ones(8, 2), torch.arange(8) // 2)
    assert image_ranks.tolist() == [6] * 4, "a collapsed model finds its own caption only after the six others"
    assert caption_ranks.tolist() == [3] * 8


def test_features_that_are_not_numbers_find_nothing() -> None:
    images, captions = torch.full((3, 2), math.nan), torch.ones(3, 2)
    image_ranks, caption_ranks = retrieval_ranks(images, captions, torch.arange(3))
    assert (image_ranks == UNREACHABLE).all() and (caption_ranks == UNREACHABLE).all()
    metrics = retrieval_metrics(image_ranks, caption_ranks)
    assert {metrics.pop(name) for name in list(metrics) if "_rank_" in name} == {4.0}, "after all three candidates"
    assert set(metrics.values()) == {0.0}


@pytest.mark.parametrize("tile", [1, 7, 23, 4096])
def test_tiles_do_not_change_the_ranks(tile: int) -> None:
    generator = torch.Generator().manual_seed(1)
    N, M, D = 23, 61, 8
    images = F.normalize(torch.randn(N, D, generator=generator, dtype=torch.float64), dim=-1)
    captions = F.normalize(torch.randn(M, D, generator=generator, dtype=torch.float64), dim=-1)
    owner = torch.cat([torch.arange(N), torch.randint(0, N, (M - N,), generator=generator)])
    image_ranks, caption_ranks = retrieval_ranks(images, captions, owner, tile=tile)

    scores = images @ captions.T
    for i in range(N):
        order = scores[i].argsort(descending=True)
        wanted = next(place for place, caption in enumerate(order) if owner[caption] == i)
        assert image_ranks[i] == wanted, f"image {i}: {image_ranks[i]} instead of {wanted}"
    for m in range(M):
        wanted = int((scores[:, m].argsort(descending=True) == owner[m]).nonzero())
        assert caption_ranks[m] == wanted, f"caption {m}: {caption_ranks[m]} instead of {wanted}"

    metrics = retrieval_metrics(image_ranks, caption_ranks)
    assert metrics["text_to_image_rank_mean"] == pytest.approx(1 + np.mean(caption_ranks.numpy()))
    assert metrics["image_to_text_rank_median"] == 1 + math.floor(np.median(image_ranks.numpy()))


def rank_on_rank(rank: int, world: int, *features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return retrieval_ranks(*features, tile=5, world=World(rank, world, torch.device("cpu")))


def test_ranks_of_a_group_share_the_tiles() -> None:
    generator = torch.Generator().manual_seed(2)
    images, captions = (F.normalize(torch.randn(n, 4, generator=generator), dim=-1) for n in (23, 46))
    images[3] = captions[7] = math.nan
    captions[20] = captions[21]  # a tie
    owner = (torch.arange(46) * 7) % 23
    alone = retrieval_ranks(images, captions, owner, tile=5)
    for answer in run_ranks(rank_on_rank, 3, images, captions, owner):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(answer, alone)), f"{answer} instead of {alone}"


class LargestTensor(TorchDispatchMode):
    """Notes the elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **kwargs or {})
        self.elements = max(self.elements, out.numel() if isinstance(out, torch.Tensor) else 0)
        return out


@pytest.mark.parametrize("count", [500, 1500])
def test_ranking_holds_one_tile_whatever_the_size_of_the_set(count: int) -> None:
    images, captions = torch.randn(count, 4), torch.randn(2 * count, 4)
    owner = torch.arange(2 * count) // 2
    tile = 2 * count // 30
    with LargestTensor() as largest:
        retrieval_ranks(images, captions, owner, tile=tile)
    assert largest.elements <= max(tile * tile, 2 * count), f"{largest.elements} elements for {count} images"
