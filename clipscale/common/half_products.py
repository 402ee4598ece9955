"""Matrix products of half precision on a GPU, added in float32."""

import torch
from torch import Tensor


def add_half_product(total: Tensor, a: Tensor, b: Tensor, factor: float = 1.0) -> None:
    """total (float32) += factor * a b, in one call of the GEMM library: the product is not rounded in between."""
    torch.addmm(total, a, b, out_dtype=torch.float32, alpha=factor, out=total)
