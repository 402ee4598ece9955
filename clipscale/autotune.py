"""Memory and speed found by trying: chunk sizes, and the room for kept graphs."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from clipscale.config.sections import CacheConfig
from clipscale.errors import UserError
from clipscale.grad_cache import GraphMemory
from clipscale.phases import Phases
from clipscale.rng import RandomState
from clipscale.units import parse_count

CPU_CHUNK = 256
"""Samples per chunk on a CPU, where larger ones are neither faster nor refused."""
SMALLEST, LARGEST = 16, 2**15
"""Samples per chunk that a trial on a GPU starts and ends with; beyond the largest, attention kernels run out of grid."""
CHUNKS = "chunks.json"
GOOD_ENOUGH = 0.95
"""The smallest chunk with this share of the best speed is taken: what it leaves free can keep graphs."""
MARGIN = 0.9
"""Share of the free memory that is counted on: fragments of the rest are lost."""


def chunk_sizes(config: CacheConfig, local_batch: int) -> dict[str, int | None]:
    """Samples per chunk that the settings give for `image` and `text`; None: to be found by `find_chunk`.

    Raises UserError for sizes below 1 or beyond the samples of one process.
    """
    sizes: dict[str, int | None] = {}
    for tower, own in (("image", config.image_chunk), ("text", config.text_chunk)):
        setting, value = (f"cache.{tower}_chunk", str(own)) if own else ("cache.chunk", config.chunk)
        if value == "auto":
            sizes[tower] = None
            continue
        try:
            size = parse_count(value)
        except ValueError as error:
            raise UserError(f"{setting}={value}: give samples per chunk, or auto") from error
        if not 1 <= size <= local_batch:
            raise UserError(
                f"{setting}={size}: one process holds {local_batch} samples of the batch; choose 1 to {local_batch}"
            )
        sizes[tower] = size
    return sizes


def uncut(tower: nn.Module, name: str, size: int | None, local_batch: int) -> int | None:
    """The local batch for a tower whose batch normalisation has to see all of it at once; None for any other tower.

    Raises UserError where the settings ask for a smaller chunk.
    """
    mixing = [key for key, m in tower.named_modules() if isinstance(m, _BatchNorm) and m.training]
    if not mixing or not any(p.requires_grad for p in tower.parameters()):
        return None
    if size is not None and size < local_batch:
        raise UserError(
            f"cache.{name}_chunk={size}: the {name} tower has batch normalisation ({mixing[0]}), which mixes the samples of a batch; set "
            f"model.batch_norm=frozen, or cache.{name}_chunk={local_batch}, all that one process holds"
        )
    return local_batch


def find_chunk(tower: nn.Module, sample: Callable[[int], Tensor], local_batch: int, device: torch.device) -> int:
    """The smallest power of two that encodes and differentiates at nearly the best speed and fits the device.

    `sample(n)` makes an input of n samples on the device. On a CPU nothing is tried.
    """
    if device.type == "cpu":
        return min(CPU_CHUNK, local_batch)
    rates: dict[int, float] = {}
    size = min(SMALLEST, local_batch)
    with RandomState.now().preserved():
        while True:
            try:
                rates[size] = speed(tower, sample(size))
            except torch.OutOfMemoryError:
                break
            if size in (local_batch, LARGEST) or rates[size] < GOOD_ENOUGH * max(rates.values()):
                break
            size = min(2 * size, local_batch, LARGEST)
    torch.cuda.empty_cache()
    if not rates:
        raise UserError(f"cache.chunk=auto: not even {size} samples fit the device; set model.grad_checkpointing=true")
    # The largest that fitted left no room for the features, the loss and the gradients of the other tower.
    tried = {n: rate for n, rate in rates.items() if n < max(rates)} or rates
    return min(n for n, rate in tried.items() if rate >= GOOD_ENOUGH * max(tried.values()))


def speed(tower: nn.Module, inputs: Tensor) -> float:
    """Samples per second of one pass without a graph and one with, after one to warm up. Leaves no gradients behind."""
    seconds = 0.0
    for attempt in range(2):
        started = time.perf_counter()
        with torch.no_grad():
            out = tower(inputs)
        if any(p.requires_grad for p in tower.parameters()):
            tower(inputs).backward(torch.ones_like(out))
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started if attempt else 0.0
    tower.zero_grad(set_to_none=True)
    return len(inputs) / seconds


def remembered(folder: Path, key: str) -> int | None:
    """A chunk size that an earlier start of this run has found: a resumed run must cut its batches alike."""
    path = folder / CHUNKS
    return json.loads(path.read_text()).get(key) if path.is_file() else None


def remember(folder: Path, sizes: dict[str, int]) -> None:
    """Note them for later starts. Other ranks may be reading the note: it is replaced as a whole."""
    part = folder / f"{CHUNKS}.part"
    part.write_text(json.dumps(sizes) + "\n")
    part.replace(folder / CHUNKS)


class Retention:
    """Sets the budget for kept graphs before each step: `none`, a number of bytes, or `auto`.

    `auto` lets the first step keep nothing, takes what that step needed beyond its start as the working memory, and from then on
    gives the rest of the free memory, less a margin. On a CPU it is half of the memory free at the start.
    """

    def __init__(self, setting: str, device: torch.device) -> None:
        self.device = device
        self.auto = setting == "auto"
        self.fixed = 0.0
        self.working: int | None = None
        if setting not in ("none", "auto"):
            try:
                self.fixed = parse_count(setting)
            except ValueError as error:
                raise UserError(f"cache.activation_budget={setting}: give none, auto, or bytes such as 20G") from error
        elif self.auto and device.type == "cpu":
            self.auto, self.fixed = False, psutil.virtual_memory().available / 2

    def before_step(self, memory: GraphMemory) -> None:
        memory.budget = self.fixed
        if self.auto and self.working is not None:
            memory.budget = max(0.0, MARGIN * self.free_bytes() - self.working)

    def after_step(self, phases: Phases) -> None:
        if self.auto and self.working is None:
            start = phases.before["encode"]
            self.working = max(phases.peak.values()) - start

    def free_bytes(self) -> int:
        """What the device has left, with what the allocator holds in reserve."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
