"""How a chunk's pass learns whether gradients are summed after it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from clipscale import GradCache


class OwnSync(nn.Linear):
    """An encoder of a user, which sums gradients over the ranks in a way of its own."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.seen: list[bool] = []

    @contextmanager
    def gradient_sync(self, sync: bool) -> Iterator[None]:
        self.seen.append(sync)
        yield


def test_an_encoder_with_a_sync_of_its_own_is_told_of_every_chunk() -> None:
    """Only the step's last backward pass sums gradients."""
    encoder = OwnSync()

    def loss(x: Tensor) -> Tensor:
        return x.square().sum()

    GradCache([encoder], loss, chunks=2).step(torch.ones(6, 3))
    assert encoder.seen == [False] * 3 + [False, False, True]
