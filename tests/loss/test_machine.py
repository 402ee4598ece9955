"""The precision of float32 matmuls within the loss, by both of torch's interfaces."""

import pytest
import torch

from clipscale.loss.machine import float32_matmuls

MATMUL = torch.backends.cuda.matmul


@pytest.mark.parametrize("inside", ["ieee", "tf32"])
@pytest.mark.parametrize("value", [True, False])
def test_both_interfaces_can_be_read_inside_and_are_restored(inside: str, value: bool) -> None:
    first = MATMUL.allow_tf32
    MATMUL.allow_tf32 = value
    before = MATMUL.fp32_precision
    with pytest.raises(KeyError), float32_matmuls(inside):
        assert (MATMUL.fp32_precision, MATMUL.allow_tf32) == (inside, inside == "tf32")
        raise KeyError
    assert (MATMUL.fp32_precision, MATMUL.allow_tf32) == (before, value)
    MATMUL.allow_tf32 = first
