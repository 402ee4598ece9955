"""A step's loss and its terms, by the kind of its encoders."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clipscale.step.batch_encoder import PairBatchEncoder, TowerBatchEncoder
from tests.support.checkpoints import ONE_RANK

VALUE = torch.tensor(2.0)


def pairs(chunk_loss: torch.Tensor | None, tokens: int = 4) -> PairBatchEncoder:
    """An encoder of pairs whose caption loss has a weight of 3, after a replay of `tokens` tokens."""
    parts: Any = SimpleNamespace(chunk_loss=chunk_loss)
    return PairBatchEncoder(parts, parts, ONE_RANK, parts, torch.no_grad, caption_weight=3.0, num_labels=tokens)


def test_the_loss_of_two_towers_has_one_term() -> None:
    parts: Any = SimpleNamespace()
    encoder = TowerBatchEncoder(parts, parts)
    assert encoder.losses(VALUE) == [VALUE] and encoder.total([2.0]) == (2.0, {})


def test_a_captioners_loss_adds_the_mean_over_all_tokens() -> None:
    encoder = pairs(torch.tensor(10.0))
    losses = [float(loss) for loss in encoder.losses(VALUE)]
    assert losses == [2.0, 2.5]
    assert encoder.total(losses) == (2.0 + 3 * 2.5, {"contrastive_loss": 2.0, "caption_loss": 2.5})
    assert encoder.chunk_loss_weight == pytest.approx(3 / 4)


def test_a_captioner_of_which_nothing_trains_has_no_caption_loss() -> None:
    encoder = pairs(None)
    assert encoder.losses(VALUE) == [VALUE] and encoder.total([2.0]) == (2.0, {})


def test_the_features_of_pairs_are_images_and_captions_side_by_side() -> None:
    features_N2D = torch.randn(5, 2, 3)
    images, texts = pairs(None).images_and_texts([features_N2D])
    assert torch.equal(images, features_N2D[:, 0]) and torch.equal(texts, features_N2D[:, 1])
