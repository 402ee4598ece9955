"""The free memory is the least that the machine and the limits around this process leave."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from clipscale.data.loader import memory

FREE = 20 << 30


@pytest.mark.parametrize(
    ("own", "folder", "limit", "stat", "free"),
    [
        ("0::/job/step", "job", "memory.max 8000", "anon 1000\nshmem 500\nfile 9", 6500),
        ("0::/job/step", "job/step", "memory.max max", "anon 1000", FREE),
        ("0::/", ".", "memory.max 8000", "anon 1000", 7000),
        ("0::/../outside", ".", "memory.max 100", "anon 1000", 0),
        ("5:memory:/job\n0::/", "memory/job", "memory.limit_in_bytes 8000", "rss 9\ntotal_rss 3000", 5000),
        ("4:cpu,memory:/not/seen", "cpu,memory", "memory.limit_in_bytes 8000", "total_shmem 1000", 7000),
        ("4:cpu:/job", "cpu/job", "memory.limit_in_bytes 8000", "total_rss 1000", FREE),
    ],
)
def test_limits_of_control_groups_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, folder: str, limit: str, stat: str, free: int
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
    assert memory.free_memory() == free
