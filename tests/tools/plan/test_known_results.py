"""A dry run computes a form once, and never another one than torch gives."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from clipscale.tools.plan.known_results import KnownResults

MULTIPLY = torch.ops.aten.mm.default


def test_a_result_is_computed_once_for_each_form_of_its_arguments() -> None:
    with FakeTensorMode() as mode:
        known = KnownResults(mode)
        for rows in (3, 3, 7):
            result = known.run(MULTIPLY, (torch.empty(rows, 4), torch.empty(4, 5)), {})
            assert result.shape == (rows, 5)
    assert len(known.known) == 2


def test_what_writes_is_computed_until_its_output_has_the_form() -> None:
    with FakeTensorMode() as mode:
        known = KnownResults(mode)
        arguments = (torch.empty(3, 4), torch.empty(4, 5))
        out = torch.empty(0)
        known.run(torch.ops.aten.mm.out, arguments, {"out": out})
        assert out.shape == (3, 5) and not known.known
        for other in (out, torch.empty(3, 5)):
            assert known.run(torch.ops.aten.mm.out, arguments, {"out": other}) is other
    assert len(known.known) == 1
