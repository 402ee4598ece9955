"""A loss uses the runtime that is current where it is called."""

from datetime import timedelta

import pytest
import torch
from torch import Tensor

from clipscale import contrastive_loss
from clipscale.loss.runtime import LossRuntime, current_runtime, running_on


def test_a_runtime_holds_inside_and_the_one_before_comes_back() -> None:
    outer, inner = LossRuntime(), LossRuntime(timeout=timedelta(seconds=7))
    with running_on(outer):
        with pytest.raises(KeyError), running_on(inner):
            assert current_runtime() is inner
            raise KeyError
        assert current_runtime() is outer
    assert current_runtime() is not outer


def test_a_backward_pass_outside_has_the_runtime_of_its_call() -> None:
    asked = []

    class Noting(LossRuntime):
        def is_gpu(self, device: torch.device) -> bool:
            asked.append(device)
            return super().is_gpu(device)

    u, v = torch.randn(2, 4, 3).requires_grad_()
    with running_on(Noting()):
        value: Tensor = contrastive_loss(u, v, 2.0)
    before = len(asked)
    value.backward()
    assert 0 < before < len(asked)
