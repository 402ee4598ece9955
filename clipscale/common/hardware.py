"""The table of GPUs, with memory and FLOP/s, for MFU and `clipscale plan`."""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.text import did_you_mean


@dataclass(frozen=True)
class Hardware:
    """A GPU model, in the words and units of hardware.yaml."""

    words: list[str]
    capability: int
    memory: float
    half: float
    tf32: float

    @property
    def memory_bytes(self) -> int:
        return int(self.memory * 2**30)

    def peak(self, precision: str) -> float:
        """Peak FLOP/s of matrix products in `fp32` (by TF32), `bf16` or `fp16`."""
        return 1e12 * (self.tf32 if precision == "fp32" else self.half)


# Name that `hardware=` accepts -> the GPU.
HARDWARE = {
    name: Hardware(**values) for name, values in files.read_yaml(Path(__file__).with_name("hardware.yaml")).items()
}


def hardware(name: str) -> Hardware:
    """The entry of that name. A chip's name such as `h100` suffices if the table has one memory size of that chip.

    Raises UserError with the nearest names.
    """
    word = name.lower()
    alike = [listed for listed in HARDWARE if listed.startswith(f"{word}-")]
    if word not in HARDWARE and len(alike) != 1:
        raise UserError(f"hardware={name}: unknown{did_you_mean(word, HARDWARE)}; there is {', '.join(HARDWARE)}")
    return HARDWARE.get(word) or HARDWARE[alike[0]]


def hardware_of(device_name: str) -> str | None:
    """The table's name of a GPU by the driver's `device_name` ("NVIDIA A100-SXM4-80GB"); None if the table lacks it.

    If `device_name` does not contain the memory, this is the first entry with that chip.
    """
    words = set(re.split(r"[\s-]+", device_name))
    same_chip = [
        name for name, entry in HARDWARE.items() if all(word in words or word.endswith("GB") for word in entry.words)
    ]
    return max(same_chip, key=lambda name: len(words.intersection(HARDWARE[name].words)), default=None)


def gpu_here() -> str | None:
    """The driver's name of this machine's first GPU; None without one.

    Asks the driver, not CUDA: a launcher that initialises CUDA keeps memory on the GPU.
    """
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        names = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    return names[0] if names and os.environ.get("CUDA_VISIBLE_DEVICES") != "" else None
