"""The cores of this machine, and what they can do."""

from pathlib import Path

import pytest

from clipscale.common import cpu


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
    monkeypatch.setattr(cpu, "CPU_INFO", tmp_path / "cpuinfo")
    if information is not None:
        cpu.CPU_INFO.write_text(information)
    assert cpu.cpu_has_bf16() is has_bf16


@pytest.mark.parametrize(("share", "most"), [("max 100000", 1000), ("150000 100000", 2), ("10000 100000", 1)])
def test_cores_follow_the_quota_of_the_container(
    share: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "CPU_SHARE", tmp_path / "cpu.max")
    unlimited = cpu.cores()
    (tmp_path / "cpu.max").write_text(share + "\n")
    assert cpu.cores() == min(unlimited, most)


def test_a_rank_has_a_share_of_the_cores_or_its_own_under_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    launchers = 12
    monkeypatch.setattr(cpu, "cores", lambda process=0: launchers if process else 12)
    monkeypatch.setattr("os.cpu_count", lambda: 48)
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert cpu.cores_of_rank() == 3
    launchers = 24
    assert cpu.cores_of_rank() == 6, "two of the four are bound to the other half of the machine"
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert cpu.cores_of_rank() == 12
    launchers = 12
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    assert cpu.cores_of_rank() == 3, "tasks that are not bound to cores"
