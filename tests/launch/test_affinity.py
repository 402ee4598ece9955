"""Ranks are bound to the cores of their GPU's NUMA node, as a made-up /sys describes the machine."""

import os
from pathlib import Path

import pytest

from clipscale.common.hardware import BOUND, cores_of_rank
from clipscale.launch.affinity import bound, divide


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two nodes of four cores with two hardware threads each (core c: c and c + 8), a GPU on each, and one that nobody knows of."""
    for node, cpus in ((0, "0-3,8-11"), (1, "4-7,12-15"), (2, "")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    for cpu in range(16):
        folder = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    for pci, node in (("0000:3b:00.0", 1), ("0000:86:00.0", 0), ("0000:aa:00.0", -1)):
        (tmp_path / "bus/pci/devices" / pci).mkdir(parents=True)
        (tmp_path / "bus/pci/devices" / pci / "numa_node").write_text(f"{node}\n")
    return tmp_path


ALL = set(range(16))
FIRST, SECOND = "0000:86:00.0", "0000:3b:00.0"


def test_ranks_share_the_physical_cores_of_their_gpus_node(machine: Path) -> None:
    found = divide([SECOND, FIRST, SECOND], 3, ALL, machine)
    assert found == [{4, 5, 12, 13}, {0, 1, 2, 3, 8, 9, 10, 11}, {6, 7, 14, 15}]


def test_only_allowed_cores_are_given_and_more_ranks_than_cores_share_them(machine: Path) -> None:
    assert divide([FIRST, SECOND], 2, {0, 8, 4, 5}, machine) == [{0, 8}, {4, 5}]
    assert all(divide([FIRST] * 3 + [SECOND], 4, {0, 8, 4}, machine))


def test_without_gpus_ranks_are_spread_over_the_nodes(machine: Path) -> None:
    first, second, *_ = divide([], 4, ALL, machine)
    assert first | second == {0, 1, 2, 3, 8, 9, 10, 11}


def test_nothing_is_bound_where_there_is_nothing_to_choose(machine: Path, tmp_path: Path) -> None:
    assert divide([FIRST, "0000:aa:00.0"], 2, ALL, machine) == []
    assert divide([FIRST], 2, ALL, machine) == [], "a GPU for each rank must be visible"
    assert divide([], 2, {0, 1}, machine) == [], "one node"
    assert divide([], 2, ALL, tmp_path / "nothing") == []


def test_a_rank_is_bound_inside_the_block_alone(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: ALL)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: done.append(sorted(cpus)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with bound("auto", "cpu", machine) as cores:
        assert done == [sorted(cores)] == [[4, 5, 6, 7, 12, 13, 14, 15]]
        monkeypatch.setattr("clipscale.common.hardware.cores", lambda: 8)
        assert cores_of_rank() == 8, "these cores are shared with no other rank"
    assert done[1:] == [sorted(ALL)] and BOUND not in os.environ
    with bound("none", "cpu", machine) as cores:
        assert not cores
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    with bound("auto", "cpu", machine) as cores:
        assert not cores, "Slurm has given this task its cores"
