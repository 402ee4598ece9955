"""The doctor reports no problem on a working machine, and a driver that torch cannot use is one."""

import shutil

import pytest

from clipscale.tools.doctor import main
from tests.conftest import Capture


@pytest.mark.parametrize(("driver", "status", "said"), [(None, 0, "note"), ("/bin/nvidia-smi", 1, "problem")])
def test_a_driver_without_a_device_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, driver: str | None, status: int, said: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: driver)
    assert main() == status
    out = capsys.readouterr().out
    assert said in out and "torch 2" in out and "of host memory are free" in out
