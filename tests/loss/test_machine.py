"""What the loss asks of its machine: products that torch may lack, and the precision of float32 matmuls."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from clipscale.loss import machine
from clipscale.loss.machine import add_half_product, float32_matmuls

MATMUL = torch.backends.cuda.matmul


@pytest.mark.parametrize("has_addmm", [True, False])
def test_a_half_precision_product_is_added_in_float32_with_or_without_addmm(
    has_addmm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU has neither operation, so both are stand-ins here."""

    def addmm(c: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        if not has_addmm:
            raise RuntimeError("addmm: expected m1 and m2 to have the same dtype as self")
        return out.copy_(c + a.to(out_dtype) @ b.to(out_dtype))

    def mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype) -> Any:
        return torch.matmul(a.to(out_dtype), b.to(out_dtype))

    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(torch, "mm", mm)
    machine._addmm_widens.cache_clear()
    a, b, before = torch.randn(5, 7).bfloat16(), torch.randn(7, 3).bfloat16(), torch.randn(5, 3)
    out = before.clone()
    add_half_product(out, a, b)
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


def test_a_caller_of_the_new_interface_alone_gets_its_setting_back(unchanged: None) -> None:
    MATMUL.fp32_precision = "tf32"
    with float32_matmuls("ieee"):
        assert (MATMUL.fp32_precision, MATMUL.allow_tf32) == ("ieee", False)
    assert MATMUL.fp32_precision == "tf32"
