"""The doctor reports no problem on a working machine, and each kind of broken one."""

from collections.abc import Callable

import pytest
import torch

from clipscale.tools import doctor
from clipscale.tools.doctor import main


@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_machine_that_works_has_no_problems(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, processes: bool
) -> None:
    """With `processes`, two that compute a loss together."""
    if not processes:
        checks = tuple(check for check in doctor.CHECKS if check is not doctor.processes)
        monkeypatch.setattr(doctor, "CHECKS", checks)
    assert main() == 0
    out = capsys.readouterr().out
    ring = ["2 processes on a ring"] if processes and not torch.cuda.is_available() else []
    for words in ("torch", "the gradient on", "of host memory are free", "pictures of 512", *ring):
        assert words in out, out


def test_a_wrong_gradient_and_a_check_that_fails_are_problems_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = doctor.contrastive_loss

    def broken() -> None:
        raise RuntimeError("no such thing\nand more")

    def times(factor: float) -> Callable[..., torch.Tensor]:
        return lambda *args, **options: factor * right(*args, **options)

    monkeypatch.setattr(doctor, "CHECKS", (broken, doctor.loss, doctor.decoding))
    for factor in (1.001, float("nan")):
        monkeypatch.setattr(doctor, "contrastive_loss", times(factor))
        assert main() == 1
        out = capsys.readouterr().out
        assert "RuntimeError: no such thing" in out and "and more" not in out
        assert "that is not rounding" in out and "pictures of" in out
