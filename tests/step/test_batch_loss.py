"""The loss of a run's batch: its weights, and truncated features of almost no length."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clipscale.loss.reference import dense_contrastive_loss
from clipscale.models.towers import ClipModel, l2_normalize
from clipscale.step import batch_loss
from clipscale.step.batch_loss import MIN_LENGTH, BatchLoss
from tests.loss.dense_distillation import dense_distillation_loss
from tests.support.towers import small_model

SCALE = torch.tensor(3.0)


def model_of_scale(init_bias: float | None = None) -> ClipModel:
    """A model whose logit scale is SCALE."""
    model = small_model(init_bias=init_bias)
    model.logit_scale.data.copy_(SCALE)
    return model


def with_sizes() -> BatchLoss:
    return BatchLoss(model_of_scale(), nullcontext, feature_sizes=(4, 2))


def rows(seed: int) -> Tensor:
    features = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))
    return F.normalize(features, dim=-1).requires_grad_()


@pytest.mark.parametrize("length", [0.0, 1e-30, 1e-6])
def test_a_part_without_length_has_a_bounded_gradient(length: float) -> None:
    """The bound, for either tower, is 1,000 times the gradient of a unit row, which is at most the scale."""
    u = rows(0)
    v = rows(1)
    with torch.no_grad():
        for features in (u, v):
            features[2, :4] = length / 2
            features[2] = F.normalize(features[2], dim=-1)
    with_sizes()(u, v).backward()
    for features in (u, v):
        assert features.grad is not None
        assert 0 < features.grad.norm(dim=-1).max() < 2 * 1000 * SCALE.exp(), features.grad.norm(dim=-1)


def test_a_feature_of_zeros_has_the_gradient_of_its_unit_row_a_million_times() -> None:
    """A row is divided by at least 1e-6, and each of the two parts of its unit row by at least 1e-3."""
    raw = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)) * torch.tensor([1, 1, 0, 1, 1, 1])[:, None]
    raw.requires_grad_()
    unit = l2_normalize(raw)
    unit.retain_grad()
    with_sizes()(unit, rows(1)).backward()
    assert raw.grad is not None and unit.grad is not None
    assert 0 < unit.grad[2].norm() < (1 + 2 * 1000) * SCALE.exp()
    torch.testing.assert_close(raw.grad[2], 1e6 * unit.grad[2])


def test_ordinary_rows_are_as_before_bit_for_bit() -> None:
    features = torch.randn(1000, 4, generator=torch.Generator().manual_seed(2)) * torch.logspace(-2, 3, 1000)[:, None]
    features = features[features.norm(dim=-1) > MIN_LENGTH]
    assert torch.equal(l2_normalize(features, MIN_LENGTH), F.normalize(features, dim=-1)) and len(features) > 900


@pytest.mark.parametrize("objective", ["softmax", "softmax_image", "sigmoid"])
@pytest.mark.parametrize("weights", [(0.0, 1.3), (0.7, 1.3), (0.7, 0.0)])
def test_the_contrast_and_the_teachers_have_their_weights(objective: str, weights: tuple[float, float]) -> None:
    bias = -1.5 if objective == "sigmoid" else None
    model = model_of_scale(init_bias=bias).double()
    loss = BatchLoss(model, nullcontext, objective, teacher_scales=(8.0,), distill_weights=weights)
    u = rows(0).double().detach().requires_grad_()
    v = rows(1).double().detach().requires_grad_()
    taught = torch.stack([rows(2), rows(3)], 1).double().detach()
    scale = model.logit_scale.exp()
    contrast = dense_contrastive_loss(u, v, scale, logit_bias=bias or 0.0, objective=objective)
    imitation = dense_distillation_loss(u, v, scale, [(taught[:, 0], taught[:, 1], 8.0)])
    expected = weights[0] * contrast + weights[1] * imitation
    value = loss(u, v, teacher_features=[taught])
    torch.testing.assert_close(value, expected)
    theirs = torch.autograd.grad(expected, (u, v))
    torch.testing.assert_close(torch.autograd.grad(value, (u, v)), theirs)


def test_a_softmax_has_the_contrast_in_the_targets_of_the_distillation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The student's scores are then computed once for both."""
    monkeypatch.setattr(batch_loss, "contrastive_loss", None)
    loss = BatchLoss(model_of_scale(), nullcontext, teacher_scales=(8.0,), distill_weights=(0.7, 1.3))
    assert loss(rows(0), rows(1), teacher_features=[torch.stack([rows(2), rows(3)], 1).detach()]).isfinite()
