"""The doctor reports no problem on a working machine, and each kind of broken one."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from clipscale import doctor
from clipscale.config.tools import DoctorSettings
from clipscale.doctor import Finding, main


def only(monkeypatch: pytest.MonkeyPatch, *checks: str) -> None:
    monkeypatch.setattr(doctor, "CHECKS", tuple(getattr(doctor, name) for name in checks))


@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_machine_that_works_has_no_problems(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, processes: bool
) -> None:
    """With `processes`, two that compute a loss together."""
    if not processes:
        only(monkeypatch, *(check.__name__ for check in doctor.CHECKS if check is not doctor.processes))
    assert main(DoctorSettings(run=str(tmp_path / "runs/deep"))) == 0
    out = capsys.readouterr().out
    for words in (
        "software",
        "devices",
        "loss",
        "2 processes on a ring" if processes and not torch.cuda.is_available() else "",
        "free",
        "pictures of 512",
    ):
        assert words in out, out
    assert not list(tmp_path.iterdir())


def test_a_wrong_gradient_is_a_problem(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    only(monkeypatch, "loss")
    right = doctor.contrastive_loss
    monkeypatch.setattr(doctor, "contrastive_loss", lambda *args, **options: 1.001 * right(*args, **options))
    assert main(DoctorSettings()) == 1
    assert "that is not rounding" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "contrastive_loss", lambda *args, **options: float("nan") * right(*args, **options))
    assert main(DoctorSettings()) == 1


def test_processes_that_hang_are_ended_in_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hanging: list[subprocess.Popen[bytes]] = []

    def start(*_: object) -> None:
        hanging.append(subprocess.Popen(["sleep", "60"]))
        raise RuntimeError(f"status {hanging[0].wait()}")

    only(monkeypatch, "processes")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(doctor.local, "start", start)
    monkeypatch.setattr(doctor.local, "kill_children", lambda: [one.kill() for one in hanging])
    assert main(DoctorSettings(timeout_s=0.05)) == 1
    assert "2 processes did not compute a loss together in timeout_s=0.05" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_a_problem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "folders")
    assert main(DoctorSettings(run="/proc/runs")) == 1
    assert "run=/proc/runs: /proc cannot be written" in capsys.readouterr().out


def test_a_check_that_fails_is_a_problem_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(settings: DoctorSettings) -> Iterator[Finding]:
        yield "ok", "so far so good"
        raise RuntimeError("no such thing\nand more")

    monkeypatch.setattr(doctor, "CHECKS", (broken, doctor.memory))
    assert main(DoctorSettings()) == 1
    out = capsys.readouterr().out
    assert "so far so good" in out and "RuntimeError: no such thing" in out and "and more" not in out
    assert "free for this process" in out


def test_a_driver_without_a_device_is_a_problem_and_no_driver_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only(monkeypatch, "devices")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    assert main(DoctorSettings()) == 1
    assert "finds no device" in capsys.readouterr().out
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    if not Path("/proc/driver/nvidia/version").exists():
        assert main(DoctorSettings()) == 0
