"""The doctor reports no problem on a working machine, and a driver that torch cannot use is one."""

import shutil
from types import SimpleNamespace

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


def test_a_gpu_that_cannot_be_used_is_a_problem_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """The other GPUs are shown. CUDA says so of one in exclusive mode that another process has."""

    def free(number: int) -> tuple[int, int]:
        if number == 0:
            raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nCompile with ...")
        return 2**30, 2**31

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda number: SimpleNamespace(name="H100", major=9))
    monkeypatch.setattr("torch.cuda.mem_get_info", free)
    monkeypatch.setattr("clipscale.tools.doctor.environment", lambda: {"versions": {}})
    assert main() == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "problem GPU 0 cannot be used: CUDA error: all CUDA-capable devices are busy or unavailable" in out
    assert "GPU 1: H100, 1.00 GiB of 2.00 GiB free" in out
