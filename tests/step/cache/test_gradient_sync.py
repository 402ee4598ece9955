"""How a chunk's pass learns whether gradients are summed after it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from clipscale import GradCache


class OwnSync(nn.Linear):
    """An encoder of a user, which sums gradients over the ranks in a way of its own."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.seen: list[bool] = []

    @contextmanager
    def gradient_sync(self, is_last_backward: bool) -> Iterator[None]:
        self.seen.append(is_last_backward)
        yield


def test_an_encoder_with_a_sync_of_its_own_is_told_of_every_chunk() -> None:
    """Only the step's last backward pass sums gradients."""
    encoder = OwnSync()

    def loss(x: Tensor) -> Tensor:
        return x.square().sum()

    GradCache([encoder], loss, chunks=2).step(torch.ones(6, 3))
    assert encoder.seen == [False] * 3 + [False, False, True]


class SumsByHooks(nn.Module):
    """A wrapper of another library: as DDP does, it decides in a forward pass whether the next backward pass sums."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(3, 2)
        self.sums = self.is_armed = True
        for parameter in self.module.parameters():
            parameter.register_post_accumulate_grad_hook(self.sum_over_two_equal_ranks)

    def forward(self, x: Tensor) -> Tensor:
        self.is_armed = self.sums
        return self.module(x)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.sums = False
        yield
        self.sums = True

    def sum_over_two_equal_ranks(self, parameter: Tensor) -> None:
        if self.is_armed and parameter.grad is not None:
            parameter.grad.mul_(2)


@pytest.mark.parametrize(("chunks", "kept"), [(2, 2), (4, 1), (6, 0)])
def test_a_wrapper_that_sums_by_hooks_sums_where_graphs_are_kept(chunks: int, kept: int) -> None:
    """Its last chunk runs again, because a graph of the first pass was built where nothing sums."""
    torch.manual_seed(0)
    x = torch.randn(6, 3)
    plain = nn.Linear(3, 2)
    wrapped = {budget: SumsByHooks() for budget in (0, math.inf)}
    for encoder in wrapped.values():
        encoder.module.load_state_dict(plain.state_dict())
    plain(x).square().sum().backward()
    assert plain.weight.grad is not None
    for budget, encoder in wrapped.items():
        cache = GradCache([encoder], lambda y: y.square().sum(), chunks=chunks, keep_bytes=budget)
        cache.step(x)
        gradient = encoder.module.weight.grad
        assert gradient is not None
        difference = (gradient - 2 * plain.weight.grad).norm() / plain.weight.grad.norm()
        assert difference < 1e-6, f"keep_bytes={budget}: the gradient differs by {difference:g}"
        assert cache.num_kept_graphs == [kept if budget else 0]
