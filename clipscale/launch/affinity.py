"""Keeps a rank and its loaders on the NUMA node of its GPU, as /sys describes the machine.

Their memory follows: Linux takes a new page from the node of the core that first touches it.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clipscale.common.hardware import BOUND

SYS = Path("/sys")


def numbers(text: str) -> set[int]:
    """`0-3,8` -> {0, 1, 2, 3, 8}."""
    ends = [part.partition("-")[::2] for part in text.strip().split(",") if part]
    return {number for first, last in ends for number in range(int(first), int(last or first) + 1)}


def nodes(root: Path = SYS) -> dict[int, set[int]]:
    """The cores of every NUMA node that has some."""
    folders = (root / "devices/system/node").glob("node[0-9]*")
    found = {int(folder.name[4:]): numbers((folder / "cpulist").read_text()) for folder in folders}
    return {node: cpus for node, cpus in sorted(found.items()) if cpus}


def node_of(pci: str, root: Path = SYS) -> int | None:
    """The NUMA node of a PCI device (`0000:3b:00.0`); None if the machine does not say."""
    try:
        node = int((root / "bus/pci/devices" / pci / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def cores(cpus: set[int], root: Path = SYS) -> list[set[int]]:
    """The physical cores among these, each with its hardware threads."""
    found = []
    for cpu in sorted(cpus):
        file = root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        threads = numbers(file.read_text()) & cpus if file.exists() else {cpu}
        if min(threads) == cpu:
            found.append(threads)
    return found


def divide(gpus: Sequence[str], ranks: int, allowed: set[int], root: Path = SYS) -> list[set[int]]:
    """The cores of every local rank: an even part of the physical ones of its node.

    gpus: the PCI address of each rank's GPU, or none: then ranks are spread over the nodes. allowed: the cores that this job may use.
    Empty if the machine has one node, or does not say where its GPUs are.
    """
    usable = {node: cpus & allowed for node, cpus in nodes(root).items() if cpus & allowed}
    names = list(usable)
    spread = [names[rank * len(names) // ranks] for rank in range(ranks) if names]
    places = [node_of(pci, root) for pci in gpus] or spread
    if len(usable) < 2 or len(places) != ranks:
        return []
    found = []
    for rank, place in enumerate(places):
        if place not in usable:
            return []
        own = cores(usable[place], root)
        count, before = places.count(place), places[:rank].count(place)
        part = own[before * len(own) // count : (before + 1) * len(own) // count]
        found.append(set().union(*part or own))  # more ranks than cores share them
    return found


def gpu_addresses(device: str) -> list[str]:
    """The PCI addresses of the visible GPUs, in the order of the ranks; none for a run on the CPU."""
    import torch

    if device == "cpu":
        return []
    found: list[Any] = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return [f"{one.pci_domain_id:04x}:{one.pci_bus_id:02x}:{one.pci_device_id:02x}.0" for one in found]


@contextmanager
def bound(mode: str, device: str, root: Path = SYS) -> Iterator[set[int]]:
    """Binds this process, and all that it starts, to cores inside the block; to none with mode `none`, or where there is no choice.

    A Slurm task that has cores of its own keeps them.
    """
    ranks, rank = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    before = os.sched_getaffinity(0)
    gpus = gpu_addresses(device) if mode == "auto" else []
    own = "SLURM_PROCID" in os.environ and len(before) * ranks <= (os.cpu_count() or 1)
    found = [] if mode == "none" or own or 0 < len(gpus) < ranks else divide(gpus[:ranks], ranks, before, root)
    if not found:
        yield set()
        return
    os.sched_setaffinity(0, found[rank])
    os.environ[BOUND] = "1"
    try:
        yield found[rank]
    finally:
        os.sched_setaffinity(0, before)
        os.environ.pop(BOUND, None)
