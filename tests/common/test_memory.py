"""The free memory is the least that the machine and the limits around this process leave."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from clipscale.common import memory
from tests.data.test_captions import SAMPLES

FREE = 20 << 30


@pytest.mark.skipif("cgroup" not in Path("/proc/mounts").read_text(), reason="this machine has no control groups")
def test_control_groups_are_looked_for_where_the_machine_has_them() -> None:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    folders = [Path(folder) for _, folder, kind, *_ in mounts if kind.startswith("cgroup")]
    assert any(folder.is_relative_to(memory.GROUPS) for folder in folders), folders


@pytest.mark.parametrize(("own", "folder", "limit", "stat", "free"), SAMPLES["groups"])
def test_limits_of_control_groups_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, folder: str, limit: str, stat: str, free: int | None
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=FREE))
    monkeypatch.setattr(memory, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(memory, "OWN_GROUPS", tmp_path / "own")
    (tmp_path / "own").write_text(own + "\n")
    group = tmp_path / "groups" / folder
    group.mkdir(parents=True)
    name, _, value = limit.partition(" ")
    (group / name).write_text(value + "\n")
    (group / "memory.stat").write_text(stat + "\n")
    assert memory.free_memory() == (FREE if free is None else free)
