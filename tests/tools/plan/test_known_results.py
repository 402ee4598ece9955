"""A dry run computes a form once, and never another one than torch gives."""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from clipscale.tools.plan.known_results import KnownResults

ADD = torch.ops.aten.addmm.out


def multiply(known: KnownResults, out: Tensor) -> Tensor:
    result = known.run(ADD, (torch.empty(3, 5), torch.empty(3, 4), torch.empty(4, 5)), {"out": out})
    assert isinstance(result, Tensor)
    return result


def test_a_result_written_to_a_given_tensor_is_computed_once() -> None:
    with FakeTensorMode() as mode:
        known = KnownResults(mode)
        multiply(known, torch.empty(3, 5))
        assert len(known.known) == 1
        out = torch.empty(3, 5)
        assert multiply(known, out) is out and len(known.known) == 1


def test_a_given_tensor_that_changes_its_shape_is_computed_each_time() -> None:
    with FakeTensorMode() as mode:
        known = KnownResults(mode)
        for _ in range(2):
            assert multiply(known, torch.empty(0)).shape == (3, 5)
