"""The memory that a step takes: torch's CUDA allocator, or the resident set of this process; and a bound on what a process may take."""

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
    """The resident set of this process."""

    def __init__(self) -> None:
        gc.collect()

    def reset(self) -> int:
        """Bytes held now, from where `peak` counts on."""
        if not STATUS.exists():
            return self.peak()
        held = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): sets the peak to the present size
        return held

    def peak(self) -> int:
        if STATUS.exists():
            return _status("VmHWM")
        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class DeviceMemory:
    """What torch's CUDA allocator has given out."""

    def __init__(self, device: torch.device) -> None:
        gc.collect()
        torch.cuda.synchronize(device)
        self._device = device

    def reset(self) -> int:
        """Bytes held now, from where `peak` counts on."""
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)


def bound_memory(size: int) -> None:
    """Refuse this process more than `size` bytes beyond what it has, and let the system end it first."""
    if not STATUS.exists():
        return
    data = _status("VmData")
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = data + size
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    end_first()


def end_first() -> None:
    """Where the system lacks memory and must end a process, let it be this one, or one that it starts (proc(5))."""
    if STATUS.exists():
        Path("/proc/self/oom_score_adj").write_text("1000")


def bound_address_space(size: int) -> None:
    """Let this process map at most `size` bytes beyond what it has mapped. Linux alone."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + size, hard))


def is_out_of_memory(error: Exception) -> bool:
    """Did an allocation fail, on either device. The last signs are the libraries' own: oneDNN's, and cuBLAS's and cuDNN's."""
    message = str(error)
    signs = ["can't allocate memory", "Cannot allocate memory", "not enough memory", "bad_alloc", "out of memory"]
    signs += ["could not create a primitive", "STATUS_ALLOC_FAILED"]
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(sign in message for sign in signs)


def _status(name: str) -> int:
    """A size from proc(5), in bytes."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name + ":"))
    return 1024 * int(line.split()[1])
