"""Class embeddings and accuracies on matrices small enough to check by hand. n: images, C: classes, D: width."""

import math

import pytest
import torch

from clipscale.eval.zero_shot import accuracy_metrics, target_ranks


def test_of_equal_scores_the_lower_class_comes_first_as_in_argmax() -> None:
    scores = torch.tensor([[0.5, 0.5, 0.1], [0.5, 0.5, 0.1], [0.3, 0.3, 0.3]])
    assert target_ranks(scores, torch.tensor([0, 1, 2])).tolist() == [0, 1, 2]
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 4, (50, 6), generator=generator).float()
    targets = torch.randint(0, 6, (50,), generator=generator)
    assert torch.equal(target_ranks(scores, targets) == 0, scores.argmax(1) == targets)


def test_scores_that_are_not_numbers_are_never_hits() -> None:
    nan = math.nan
    ranks = target_ranks(torch.tensor([[nan, 0.1], [0.9, nan], [nan, nan]]), torch.tensor([0, 0, 0]))
    assert ranks.min() >= 1, ranks


def test_accuracies_of_a_hand_made_case() -> None:
    # Class 0: four images, three hits; class 2: one image, missed; class 1: none, and so not part of the mean recall.
    ranks = torch.tensor([0, 0, 0, 2, 7])
    targets = torch.tensor([0, 0, 0, 0, 2])
    metrics = accuracy_metrics(ranks, targets)
    assert metrics == {"top1": 3 / 5, "top5": 4 / 5, "mean_per_class_recall": pytest.approx((3 / 4 + 0) / 2)}
