"""The doctor reports no problem on a working machine, and each kind of broken one."""

from collections.abc import Callable

import pytest
import torch

from clipscale.tools import doctor
from clipscale.tools.doctor import main
from tests.conftest import Cap
from tests.support.checkpoints import ALONE


@pytest.mark.slow
def test_a_machine_that_works_has_no_problems(capsys: Cap) -> None:
    assert main() == 0
    out = capsys.readouterr().out
    for words in ("torch", "of host memory are free", "processes, ", "differs from float64's"):
        assert words in out, out


def test_a_wrong_gradient_and_a_check_that_fails_are_problems_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: Cap
) -> None:
    right = doctor.contrastive_loss

    def broken() -> None:
        raise RuntimeError("no such thing\nand more")

    def times(factor: float) -> Callable[..., torch.Tensor]:
        return lambda *args, **options: factor * right(*args, **options)

    def in_this_process(*_: object) -> dict[str, float]:
        return {"error": doctor.loss_error(ALONE)}

    monkeypatch.setattr(doctor.local, "start", in_this_process)
    monkeypatch.setattr(doctor, "CHECKS", (broken, doctor.loss))
    for factor in (1.001, float("nan")):
        monkeypatch.setattr(doctor, "contrastive_loss", times(factor))
        assert main() == 1
        out = capsys.readouterr().out
        assert "RuntimeError: no such thing" in out and "and more" not in out
        assert "that is not rounding" in out
    monkeypatch.setattr(doctor, "contrastive_loss", right)
    monkeypatch.setattr(doctor, "CHECKS", (doctor.devices, doctor.loss))
    assert main() == 0
