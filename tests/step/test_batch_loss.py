"""The loss of a run's batch where a part of a feature has hardly any length."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clipscale.models.towers import unit_rows
from clipscale.step.batch_loss import MIN_LENGTH, BatchLoss

SCALE = torch.tensor(3.0)


def with_sizes() -> BatchLoss:
    model: Any = SimpleNamespace(logit_scale=SCALE, logit_bias=None)
    return BatchLoss(model, nullcontext, feature_sizes=(4, 2))


def rows(seed: int) -> Tensor:
    features = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))
    return F.normalize(features, dim=-1).requires_grad_()


@pytest.mark.parametrize("length", [0.0, 1e-30, 1e-6])
def test_a_part_without_length_has_a_bounded_gradient(length: float) -> None:
    """The bound, for either tower, is 1,000 times the gradient of a unit row, which is at most the scale."""
    u, v = rows(0), rows(1)
    with torch.no_grad():
        for features in (u, v):
            features[2, :4] = length / 2
            features[2] = F.normalize(features[2], dim=-1)
    with_sizes()(u, v).backward()
    for features in (u, v):
        assert features.grad is not None
        assert 0 < features.grad.norm(dim=-1).max() < 2 * 1000 * SCALE.exp(), features.grad.norm(dim=-1)


def test_a_feature_of_zeros_has_a_bounded_gradient() -> None:
    raw = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)) * torch.tensor([1, 1, 0, 1, 1, 1])[:, None]
    raw.requires_grad_()
    with_sizes()(unit_rows(raw), rows(1)).backward()
    assert raw.grad is not None and raw.grad.norm(dim=-1).max() < 1e6 * 3000 * SCALE.exp()


def test_ordinary_rows_are_as_before_bit_for_bit() -> None:
    features = torch.randn(1000, 4, generator=torch.Generator().manual_seed(2)) * torch.logspace(-2, 3, 1000)[:, None]
    features = features[features.norm(dim=-1) > MIN_LENGTH]
    assert torch.equal(unit_rows(features, MIN_LENGTH), F.normalize(features, dim=-1)) and len(features) > 900
