"""The free memory is the least that the machine and the limits around this process leave."""

import ctypes
import resource
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from clipscale.common import memory
from clipscale.distributed.join import init_world
from tests.data.test_sample import SAMPLES
from tests.support.forked_processes import forks

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


def fewest_cleared_pages(sends: Connection) -> None:
    """Send the fewest pages that the system gave to one of 30 allocations of the same size."""
    init_world("cpu")
    pages = []
    for _ in range(30):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.empty(2**26, dtype=torch.uint8).fill_(1)
        pages.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    sends.send(min(pages))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
@pytest.mark.parametrize("variable", [None, "MALLOC_ARENA_MAX"])
def test_freed_memory_serves_the_next_step_unless_the_user_configures_malloc(
    monkeypatch: pytest.MonkeyPatch, variable: str | None
) -> None:
    if variable:
        monkeypatch.setenv(variable, "2")
    receives, sends = forks().Pipe(duplex=False)
    process = forks().Process(target=fewest_cleared_pages, args=(sends,))
    process.start()
    pages = receives.recv()
    process.join()
    huge_pages = 2**26 // 2**21  # the fewest that can be cleared
    assert (pages >= huge_pages) == bool(variable), pages
