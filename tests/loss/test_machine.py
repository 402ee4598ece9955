"""What the loss asks of its machine: products that torch may lack, and the precision of float32 matmuls."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from clipscale.loss import machine
from clipscale.loss.machine import float32_matmuls

MATMUL = torch.backends.cuda.matmul


@pytest.mark.parametrize(("addmm", "suits"), [("adds", True), ("refuses", False), ("forgets what was there", False)])
def test_a_wide_addmm_is_used_where_torch_has_it_and_it_adds_up(
    addmm: str, suits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU has no such operation, so it is a stand-in here."""

    def stand_in(c: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        if addmm == "refuses":
            raise RuntimeError("addmm: expected m1 and m2 to have the same dtype as self")
        return out.copy_(a.to(out_dtype) @ b.to(out_dtype) + (c if addmm == "adds" else 0))

    monkeypatch.setattr(torch, "addmm", stand_in)
    machine._addmm_widens.cache_clear()
    assert machine._addmm_widens(torch.device("cpu"), torch.bfloat16) == suits
    machine._addmm_widens.cache_clear()


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
