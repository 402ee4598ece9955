"""Class embeddings and accuracies on matrices small enough to check by hand. n: images, C: classes, D: feature width."""

import math

import pytest
import torch
import torch.nn.functional as F

from clipscale.eval.zero_shot import accuracy_counts, accuracy_metrics, class_embeddings, target_ranks


def test_rank_counts_the_classes_above_the_right_one() -> None:
    scores = torch.tensor([[0.9, 0.5, 0.1], [0.9, 0.5, 0.1], [0.9, 0.5, 0.1]])
    assert target_ranks(scores, torch.tensor([0, 1, 2])).tolist() == [0, 1, 2]


def test_ties_count_against_the_model() -> None:
    scores = torch.tensor([[0.5, 0.5, 0.1], [0.3, 0.3, 0.3]])
    assert target_ranks(scores, torch.tensor([0, 1])).tolist() == [1, 2]


def test_scores_that_are_not_numbers_are_never_hits() -> None:
    nan = math.nan
    ranks = target_ranks(torch.tensor([[nan, 0.1], [0.9, nan], [nan, nan]]), torch.tensor([0, 0, 0]))
    assert ranks.min() >= 1, ranks


def test_accuracies_of_a_hand_made_case() -> None:
    # Class 0: four images, three hits; class 1: one image, missed; class 2: none, and so not part of the mean recall.
    ranks, targets = torch.tensor([0, 0, 0, 2, 7]), torch.tensor([0, 0, 0, 0, 1])
    metrics = accuracy_metrics(accuracy_counts(ranks, targets, 3))
    assert metrics == {"top1": 3 / 5, "top5": 4 / 5, "mean_per_class_recall": pytest.approx((3 / 4 + 0) / 2)}


def test_counts_add_up_over_chunks() -> None:
    generator = torch.Generator().manual_seed(0)
    ranks = torch.randint(0, 8, (37,), generator=generator)
    targets = torch.randint(0, 5, (37,), generator=generator)
    whole = accuracy_counts(ranks, targets, 5)
    parts = sum(accuracy_counts(r, t, 5) for r, t in zip(ranks.split(10), targets.split(10)))
    assert torch.equal(whole, parts)


def test_accuracy_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="zero images"):
        accuracy_metrics(torch.zeros(3, 4, dtype=torch.int64))


TEMPLATES = ["a photo of a {c}.", "a {c}", "the {c} of many words"]
NAMES = ["cat", "dog", "red fox", "owl"]


def hashed_tokens(texts: list[str]) -> torch.Tensor:
    return torch.tensor([[sum(map(ord, text)), len(text)] for text in texts])


def encode(tokens: torch.Tensor) -> torch.Tensor:
    """Features of very different lengths, so that a mean without normalisation would be another direction."""
    return torch.stack([tokens[:, 0] % 17 + 1.0, (tokens[:, 0] % 5 + 1.0) ** 4, tokens[:, 1] - 9.5], dim=1)


@pytest.mark.parametrize("batch", [1, 2, 5, 12, 100])
def test_class_embedding_is_the_normalised_mean_of_normalised_prompts(batch: int) -> None:
    found = class_embeddings(encode, hashed_tokens, NAMES, TEMPLATES, batch=batch)
    for name, row in zip(NAMES, found):
        prompts = F.normalize(encode(hashed_tokens([t.replace("{c}", name) for t in TEMPLATES])), dim=-1)
        wanted = F.normalize(prompts.mean(0), dim=-1)
        assert torch.allclose(row, wanted, atol=1e-6), f"{name}, batch {batch}: {row} instead of {wanted}"


def test_class_embeddings_need_classes_and_templates() -> None:
    with pytest.raises(ValueError, match="0 and 3"):
        class_embeddings(encode, hashed_tokens, [], TEMPLATES)
