"""The table of GPUs by the driver's names, and the cores of this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clipscale.common import files
from clipscale.common import hardware as machine
from clipscale.common.errors import UserError
from clipscale.common.hardware import hardware, hardware_of

GPUS = files.read_yaml(Path(__file__).with_name("gpus.yaml"))


@pytest.mark.parametrize(("device", "name"), GPUS.items())
def test_a_gpu_is_found_by_the_drivers_name(device: str, name: str | None) -> None:
    assert hardware_of(device) == name


def test_the_beginning_of_one_name_is_enough() -> None:
    assert hardware("rtx4090") is hardware("RTX4090-24g")
    assert hardware("l4") is hardware("l4-24g"), "not the L40S"
    for name in ("v100", "x100"):  # of two, and of none
        with pytest.raises(UserError, match=f"hardware={name}: unknown"):
            hardware(name)


@pytest.mark.parametrize(
    ("information", "has_bf16"),
    [
        ("flags\t\t: fpu avx2\n", False),
        ("flags\t\t: fpu avx512f avx512_bf16 amx_tile\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("model name: another\n", True),
        (None, True),
    ],
)
def test_a_cpus_instructions_for_bf16_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, information: str | None, has_bf16: bool
) -> None:
    monkeypatch.setattr(machine, "CPU_INFO", tmp_path / "cpuinfo")
    if information is not None:
        machine.CPU_INFO.write_text(information)
    assert machine.cpu_has_bf16() is has_bf16


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("UNUSED", "passive 0 expandable_segments:True"),
        ("OMP_PROC_BIND", "None None expandable_segments:True"),
        ("PYTORCH_CUDA_ALLOC_CONF", "passive 0 None"),
    ],
)
def test_threads_sleep_and_segments_grow_unless_the_user_has_set_them(setting: str, values: str) -> None:
    """The command line sets this before torch is loaded, for itself and for the processes it starts."""
    code = "import os, sys, clipscale.cli.main as cli; cli.main(['--version']); "
    code += "print('torch' in sys.modules, *map(os.environ.get, sys.argv[1:]))"
    command = [sys.executable, "-c", code, "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "PYTORCH_ALLOC_CONF"]
    variables = {"PYTHONPATH": os.pathsep.join(sys.path), setting: ""}
    printed = subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[-1] == f"False {values}"


@pytest.mark.parametrize(("share", "most"), [("max 100000", 1000), ("150000 100000", 2), ("10000 100000", 1)])
def test_cores_follow_the_quota_of_the_container(
    share: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "CPU_SHARE", tmp_path / "cpu.max")
    unlimited = machine.cores()
    (tmp_path / "cpu.max").write_text(share + "\n")
    assert machine.cores() == min(unlimited, most)


def test_a_rank_has_a_share_of_the_cores_or_its_own_under_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    launchers = 12
    monkeypatch.setattr(machine, "cores", lambda process=0: launchers if process else 12)
    monkeypatch.setattr("os.cpu_count", lambda: 48)
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert machine.cores_of_rank() == 3
    launchers = 24
    assert machine.cores_of_rank() == 6, "two of the four are bound to the other half of the machine"
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert machine.cores_of_rank() == 12
    launchers = 12
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    assert machine.cores_of_rank() == 3, "tasks that are not bound to cores"
