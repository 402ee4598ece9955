"""What the loss asks of its machine: products that torch may lack, and the precision of float32 matmuls."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from clipscale.loss import machine
from clipscale.loss.machine import float32_matmuls

MATMUL = torch.backends.cuda.matmul


@pytest.mark.parametrize("addmm", ["has out_dtype", "has none", "forgets what was there"])
def test_a_half_precision_product_is_added_in_float32_with_or_without_addmm(
    addmm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU has neither operation, so both are stand-ins here, for tensors that are said to be on a GPU."""

    def stand_in(c: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        if addmm == "has none":
            raise RuntimeError("addmm: expected m1 and m2 to have the same dtype as self")
        return out.copy_(a.to(out_dtype) @ b.to(out_dtype) + (c if addmm == "has out_dtype" else 0))

    def mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype) -> Any:
        return torch.matmul(a.to(out_dtype), b.to(out_dtype))

    monkeypatch.setattr(torch, "addmm", stand_in)
    monkeypatch.setattr(torch, "mm", mm)
    a, b, before = torch.randn(5, 7).bfloat16(), torch.randn(7, 3).bfloat16(), torch.randn(5, 3)
    out = before.clone()
    machine._addmm_widens.cache_clear()
    if machine._addmm_widens(a.device, a.dtype):
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    else:
        out.add_(torch.mm(a, b, out_dtype=torch.float32))
    machine._addmm_widens.cache_clear()
    assert torch.allclose(out, before + a.float() @ b.float(), rtol=1e-6)


@pytest.fixture
def unchanged() -> Iterator[None]:
    before = MATMUL.fp32_precision
    yield
    MATMUL.allow_tf32 = before == "tf32"
    MATMUL.fp32_precision = before


@pytest.mark.parametrize("inside", ["ieee", "tf32"])
@pytest.mark.parametrize("value", [True, False])
def test_both_of_torchs_interfaces_can_be_read_inside_and_are_restored(
    inside: str, value: bool, unchanged: None
) -> None:
    MATMUL.allow_tf32 = value
    before = MATMUL.fp32_precision
    with pytest.raises(KeyError), float32_matmuls(inside):
        assert (MATMUL.fp32_precision, MATMUL.allow_tf32) == (inside, inside == "tf32")
        raise KeyError
    assert (MATMUL.fp32_precision, MATMUL.allow_tf32) == (before, value)
