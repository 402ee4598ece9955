"""How much memory a step takes beyond what was there before it, on the CPU and on CUDA; and a bound on what a process may take."""

import gc
import resource
import sys
from pathlib import Path

import torch

HOW = {
    "cpu": "peak resident set of a fresh process for each method during one step (Linux: VmHWM, reset before the step; elsewhere "
    "ru_maxrss), less its resident set before the step, with inputs in memory and the method warmed up on a few rows",
    "cuda": "peak of torch's CUDA allocator during one step, less what was allocated before it",
}
"""What is measured, in words."""
STATUS = Path("/proc/self/status")


class HostMemory:
    """Growth of this process's peak resident set since this object was made or last asked."""

    def __init__(self) -> None:
        gc.collect()
        self._before = _resident()
        self._reset()

    def growth(self) -> int:
        """Bytes by which the peak since the last call lies above what was held at the start."""
        peak = _peak()
        self._reset()
        return peak - self._before

    def _reset(self) -> None:
        if STATUS.exists():
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): sets the peak to the present size


class DeviceMemory:
    """The same of torch's CUDA allocator."""

    def __init__(self, device: torch.device) -> None:
        gc.collect()
        torch.cuda.synchronize(device)
        self._device, self._before = device, torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)

    def growth(self) -> int:
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak - self._before


def bound_memory(size: int) -> None:
    """Refuse this process more than `size` bytes beyond what it has, and name it first where the system must end one."""
    if not STATUS.exists():
        return
    data = _status("VmData")
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = data + size
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    name_first()


def name_first() -> None:
    """Where the system must end a process for want of memory, let it be this one, or one that it starts (proc(5))."""
    if STATUS.exists():
        Path("/proc/self/oom_score_adj").write_text("1000")


def address_space() -> int:
    """Bytes that this process has mapped. Linux alone."""
    return _status("VmSize")


def is_out_of_memory(error: Exception) -> bool:
    """Did an allocation fail, on either device. The last signs are the libraries' own: oneDNN's, and cuBLAS's and cuDNN's."""
    said = str(error)
    signs = ["can't allocate memory", "Cannot allocate memory", "not enough memory", "bad_alloc", "out of memory"]
    signs += ["could not create a primitive", "STATUS_ALLOC_FAILED"]
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(sign in said for sign in signs)


def _resident() -> int:
    return _status("VmRSS") if STATUS.exists() else _peak()


def _peak() -> int:
    if STATUS.exists():
        return _status("VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _status(name: str) -> int:
    """A size from proc(5), in bytes."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name + ":"))
    return 1024 * int(line.split()[1])
