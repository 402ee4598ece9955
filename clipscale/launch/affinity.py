"""Keeps a rank, its loaders and its memory on the NUMA node of its GPU, as /sys describes the machine."""

import ctypes
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipscale.hardware import BOUND

SYS = Path("/sys")
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Linux's numbers of the system call."""
DEFAULT, PREFERRED = 0, 1
"""Its memory policies: on the node of the core that touches a page first; on a given node while that has memory."""


@dataclass(frozen=True)
class Binding:
    """Where a rank runs."""

    cpus: frozenset[int]
    node: int
    """The NUMA node of its memory."""


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


def cores(cpus: set[int], root: Path = SYS) -> list[frozenset[int]]:
    """The physical cores among these, each with its hardware threads."""

    def siblings(cpu: int) -> frozenset[int]:
        try:
            text = (root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            return frozenset({cpu})
        return frozenset(numbers(text) & cpus)

    return sorted({siblings(cpu) for cpu in cpus}, key=min)


def divide(gpus: Sequence[str], ranks: int, allowed: set[int], root: Path = SYS) -> list[Binding]:
    """The binding of every local rank: an even part of the physical cores of its node.

    gpus: the PCI address of each rank's GPU, or none: then ranks are spread over the nodes. allowed: the cores that this job may use.
    Empty if the machine has one node, or does not say where its GPUs are.
    """
    usable = {node: cpus & allowed for node, cpus in nodes(root).items() if cpus & allowed}
    names = list(usable)
    spread = [names[rank * len(names) // ranks] for rank in range(ranks) if names]
    places = [node_of(pci, root) for pci in gpus] or spread
    if len(usable) < 2 or len(places) != ranks or any(place not in usable for place in places):
        return []
    bindings = []
    for rank, place in enumerate(places):
        assert place is not None
        own = cores(usable[place], root)
        count, before = places.count(place), places[:rank].count(place)
        part = own[before * len(own) // count : (before + 1) * len(own) // count]
        bindings.append(Binding(frozenset().union(*part or own), place))  # more ranks than cores share them
    return bindings


def gpu_addresses(device: str) -> list[str]:
    """The PCI addresses of the visible GPUs, in the order of the ranks; none for a run on the CPU."""
    import torch

    if device == "cpu":
        return []
    found: list[Any] = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return [f"{one.pci_domain_id:04x}:{one.pci_bus_id:02x}:{one.pci_device_id:02x}.0" for one in found]


@contextmanager
def bound(mode: str, device: str, root: Path = SYS) -> Iterator[Binding | None]:
    """Binds this process, and all that it starts, inside the block. Does nothing with mode `none`, or where there is nothing to choose.

    A Slurm task that has cores of its own keeps them.
    """
    ranks, rank = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    before = os.sched_getaffinity(0)
    gpus = gpu_addresses(device) if mode == "auto" else []
    own = "SLURM_PROCID" in os.environ and len(before) * ranks <= (os.cpu_count() or 1)
    found = [] if mode == "none" or own or 0 < len(gpus) < ranks else divide(gpus[:ranks], ranks, before, root)
    if not found:
        yield None
        return
    binding = found[rank]
    os.sched_setaffinity(0, binding.cpus)
    prefer(binding.node)
    os.environ[BOUND] = "1"
    try:
        yield binding
    finally:
        os.sched_setaffinity(0, before)
        prefer(None)
        os.environ.pop(BOUND, None)


def prefer(node: int | None) -> None:
    """New pages of this process and its children come from this node; None: from that of the core which touches them first."""
    number = SET_MEMPOLICY.get(platform.machine())
    if number is None or (node or 0) >= 1024:
        return
    mask = (ctypes.c_ulong * 16)()  # 1,024 nodes
    if node is not None:
        mask[node // 64] = 1 << node % 64
    with suppress(OSError):  # the policy only makes memory faster
        ctypes.CDLL(None, use_errno=True).syscall(
            ctypes.c_long(number), ctypes.c_int(DEFAULT if node is None else PREFERRED),
            mask if node is not None else None, ctypes.c_ulong(1025 if node is not None else 0),
        )  # fmt: skip
