"""Measures the memory of a step, bounds that of a process, and chooses the next batch in a search for the largest that fits."""

import gc
import resource
from pathlib import Path

import torch

HOW = {
    "cpu": "growth of the resident set (VmHWM) in one step of a fresh process for each method",
    "cuda": "growth of the peak of torch's CUDA allocator in one step",
}


class HostMemory:
    """The resident set of this process."""

    def __init__(self) -> None:
        gc.collect()

    def reset(self) -> int:
        """Bytes held now, from where `peak` counts on."""
        held = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): sets the peak to the present size
        return held

    def peak(self) -> int:
        return _status("VmHWM")


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
    limit, (_, hard) = _status("VmData") + size, resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    end_first()


def end_first() -> None:
    """If the system lacks memory and must end a process, it chooses this one, or one that it starts (proc(5))."""
    Path("/proc/self/oom_score_adj").write_text("1000")


def is_out_of_memory(error: Exception) -> bool:
    """Did an allocation fail, on either device. The last signs are the libraries' own: oneDNN's, and cuBLAS's and cuDNN's."""
    message = str(error)
    signs = ["can't allocate memory", "Cannot allocate memory", "not enough memory", "bad_alloc", "out of memory"]
    signs += ["could not create a primitive", "STATUS_ALLOC_FAILED"]
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(sign in message for sign in signs)


def next_batch(good: int, bad: int, first: int, *, grain: int, factor: float, close: float) -> int | None:
    """The batch to try after `good` has fitted and `bad` has not (0: none yet); None once the largest is known.

    From `first` it grows or shrinks by `factor`; then the gap is halved until it is `grain`, or `close` as a share of `bad`.
    """
    if bad and bad - good <= max(grain, close * bad):
        return None
    size = (good + bad) / 2 if good and bad else factor * good if good else bad / factor if bad else first
    return max(int(size) // grain * grain, good + grain)


def _status(name: str) -> int:
    """A size from proc(5), in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":"))
    return 1024 * int(line.split()[1])
