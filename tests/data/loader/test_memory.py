"""The free memory is the least that the machine and the limits around this process leave."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from clipscale.data.loader import memory
from tests.data.test_decode import SAMPLES

FREE = 20 << 30


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
