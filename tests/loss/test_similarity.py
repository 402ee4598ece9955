"""The dot product's gradients where a GPU rounds the scores' gradients to the features' type."""

import pytest
import torch
from torch import Tensor

from clipscale.loss import similarity
from clipscale.loss.block import Block, BlockSide, LossParameters
from clipscale.loss.similarity import DotProduct, matmul_into


def on_a_gpu(a: Tensor, b: Tensor, out: Tensor, alpha: float, beta: float = 0.0) -> Tensor:
    """`product` with its rounding on CUDA: both operands to the narrower type."""
    half = min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)
    return matmul_into(a.to(half), b.to(half), out, alpha, beta)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_one_in_a_billion_reach_the_features(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """float16 has no such numbers, and the loss scaler's factor comes later."""
    monkeypatch.setattr(similarity, "matmul_into", on_a_gpu)
    generator = torch.Generator().manual_seed(0)
    u, v = torch.randn(2, 6, 5, generator=generator).to(dtype)
    g = 1e-9 * torch.rand(6, 6, generator=generator)
    rows, cols = (BlockSide(features, grad=torch.zeros(6, 5)) for features in (u, v))
    tile = Block(rows, cols, LossParameters(torch.tensor(10.0), torch.tensor(0.0)), 0)
    _, accumulate = DotProduct().vjp(tile, torch.empty(6, 6))
    accumulate(g.clone())
    for side, expected in ((rows, 10 * g @ v.float()), (cols, 10 * g.T @ u.float())):
        torch.testing.assert_close(side.grad, expected, rtol=0.02, atol=1e-10)
