"""Memory of a run: what a few rehearsed steps say of any batch and chunk, of kept graphs, and of the host.

b: samples of one rank, c: samples of a chunk. All sizes in bytes, of one GPU unless said otherwise.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

from clipscale.autotune import MARGIN
from clipscale.config.tools import PlanConfig
from clipscale.data.loader.host_batch import Layout
from clipscale.data.loader.memory import largest_pool
from clipscale.data.order import default_streams
from clipscale.plan.rehearsal import PHASES, Rehearsal, Step
from clipscale.units import parse_count

MIB, GIB = 2**20, 2**30
CONTEXT = 600 * MIB
"""Assumed: what the driver, torch's kernels and cuBLAS take on a GPU outside of torch's allocator."""
NCCL = 600 * MIB
"""Assumed: NCCL's buffers, where there are several GPUs."""
WORKSPACES = {70: 2 * 8 * MIB, 80: 2 * 8 * MIB, 89: 2 * 8 * MIB, 90: 2 * 32 * MIB, 100: 2 * 32 * MIB}
"""cuBLAS's workspaces, which torch allocates: one for the thread that calls forward and one for autograd's (torch's documentation,
CUBLAS_WORKSPACE_CONFIG: 4096 KiB x 2 + 16 KiB x 8, on Hopper 4096 KiB x 8)."""
PROCESS, CUDA_PROCESS = 930 * MIB, 3 * GIB
"""Of the host: a training process, its tensors and its batch aside: on a CPU, measured (torch 2.15.0, five runs); with CUDA, assumed."""
LOADER, WORKER = 550 * MIB, 100 * MIB
"""Of the host: the process that loader workers are forked from, measured once its modules are there; what each worker adds, assumed."""
LINEAR_FROM = 2**18
"""Samples from which on the loss's memory is a straight line."""

Chunks = tuple[int | None, int | None]
"""Of the image and the text tower; None: the whole local batch (batch normalisation)."""


@dataclass(frozen=True)
class Memory:
    """One GPU's memory in a step."""

    fixed: dict[str, int]
    """What is there between steps, by what it is."""
    before: dict[str, int]
    """By phase: what is there when it begins."""
    peak: dict[str, int]
    """By stage ("encode image", "loss", ...): the most there is at once."""
    kept: tuple[int, int] = (0, 0)
    """Chunks of either tower whose graphs are kept."""

    def phase(self, name: str) -> int:
        """The most there is at once in a phase."""
        return max([self.before[name], *(size for stage, size in self.peak.items() if stage.split()[0] == name)])

    @property
    def highest(self) -> int:
        """The most that torch's allocator holds at once."""
        return max(map(self.phase, PHASES))

    @property
    def gradients(self) -> int:
        """What the parameters' gradients take beside all that is fixed (DDP's lie in its buckets at the end)."""
        return self.before["optim"] - self.before["encode"]


class Model:
    """Peaks at any batch and chunk, from rehearsed steps of two or three chunks: every stage is a straight line in b and in c."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        self.rehearsal = rehearsal
        self._steps: dict[tuple[tuple[int, int], int], Step] = {}
        self._losses: dict[int, int] = {}

    def at(self, batch: int, chunks: Chunks, keep: float = 0) -> Memory:
        """With `batch` samples on a rank and `keep` bytes for kept graphs."""
        whole = min(batch, max([c for c in chunks if c] or [64]))
        count = (
            2 if self.rehearsal.ranks == 1 else 3
        )  # the last chunk of several is another one: gradients are summed over the ranks there
        near = self._step(min(batch, count * whole), chunks)
        further = max(0, batch - count * whole)
        slopes = self._per_sample
        if further and None in chunks:
            more = self._step((count + 1) * whole, chunks)
            pairs = (near.before, more.before), (near.peak, more.peak)
            before_slope, peak_slope = ({name: (b[name] - a[name]) / whole for name in a} for a, b in pairs)
            slopes = before_slope, peak_slope
        before, peak = (
            {name: size + round(further * slope.get(name, 0)) for name, size in sizes.items()}
            for sizes, slope in zip((near.before, near.peak), slopes)
        )
        peak["loss"] = before["loss"] + self.loss(batch)
        memory = Memory(self._fixed, before, peak)
        return self._with_kept(memory, batch, chunks, keep) if keep else memory

    def estimate(self, batch: int, size: int, chunk: int) -> Memory:
        """With chunks of `size` samples for both towers, by the straight line through chunks of `chunk` and of half as many."""
        half = max(1, chunk // 2)
        if size in (half, chunk) or half == chunk:
            return self.at(batch, (size, size))
        low, high = self.at(batch, (half, half)), self.at(batch, (chunk, chunk))
        before, peak = (
            {name: b[name] + round((size - chunk) * (b[name] - a[name]) / (chunk - half)) for name in b}
            for a, b in ((low.before, high.before), (low.peak, high.peak))
        )
        return Memory(high.fixed, before, peak)

    def loss(self, batch: int) -> int:
        """Bytes that the loss and its gradients take beyond the features."""
        if batch > 2 * LINEAR_FROM:
            low, high = self.loss(LINEAR_FROM), self.loss(2 * LINEAR_FROM)
            return round(high + (batch / LINEAR_FROM - 2) * (high - low))
        if batch not in self._losses:
            self._losses[batch] = self.rehearsal.loss(batch)
        return self._losses[batch]

    @cached_property
    def _fixed(self) -> dict[str, int]:
        return self.rehearsal.fixed()

    @cached_property
    def _per_sample(self) -> tuple[dict[str, float], dict[str, float]]:
        return self.rehearsal.per_sample()

    def _step(self, batch: int, chunks: Chunks) -> Step:
        image, text = (min(c or batch, batch) for c in chunks)
        key = ((image, text), batch)
        if key not in self._steps:
            self._steps[key] = self.rehearsal.step(*key)
        return self._steps[key]

    def _with_kept(self, memory: Memory, batch: int, chunks: Chunks, keep: float) -> Memory:
        """The graphs that `keep` has room for, image chunks first, as GradCache takes them; all stay until their tower's second pass."""
        counts, sizes = [], []
        for tower, chunk in enumerate(chunks):
            size = self.rehearsal.graph(tower, min(chunk or batch, batch))
            count = min(math.ceil(batch / (chunk or batch)), int(keep // size)) if size else 0
            keep -= count * size
            counts.append(count)
            sizes.append(count * size)
        images, texts = sizes
        last_image, last_text = (size // count if count else 0 for size, count in zip(sizes, counts))
        all_kept = [count >= math.ceil(batch / (chunk or batch)) for count, chunk in zip(counts, chunks)]
        there = {
            "encode image": images - last_image * all_kept[0],
            "encode text": images + texts - last_text * all_kept[1],
            "loss": images + texts,
            "replay image": max(0, images - last_image) + texts,
            "replay text": max(0, texts - last_text),
        }
        peak = {stage: size + there.get(stage, 0) for stage, size in memory.peak.items()}
        before = {
            phase: size + (images + texts if phase in ("loss", "replay") else 0)
            for phase, size in memory.before.items()
        }
        # A kept chunk's own forward pass leaves its graph behind: nothing of it is given back when it ends.
        for stage, held in (("encode image", images), ("encode text", images + texts)):
            peak[stage] = max(peak[stage], memory.before["encode"] + held)
        return Memory(memory.fixed, before, peak, (counts[0], counts[1]))


def keep_bytes(setting: str, memory: Memory, room: float) -> float:
    """`cache.activation_budget` in bytes; `auto`: what a step without kept graphs leaves of `room`, less a margin, as in a run."""
    if setting == "none":
        return 0.0
    if setting != "auto":
        return float(parse_count(setting))
    start = memory.before["encode"]
    return max(0.0, MARGIN * (room - start) - (memory.highest - start))


def workspace(capability: int) -> int:
    """cuBLAS's, in torch's allocator."""
    return WORKSPACES.get(capability, WORKSPACES[80])


def outside(ranks: int) -> int:
    """What a GPU loses to others than torch's allocator."""
    return CONTEXT + (NCCL if ranks > 1 else 0)


# ---- the host ----


@dataclass(frozen=True)
class Host:
    """One node's memory, by what it is, and its disk."""

    process: dict[str, int]
    """Of one training process and its loader workers."""
    processes: int
    disk: int
    """Of a node, for offload=disk."""

    @property
    def node(self) -> int:
        return self.processes * sum(self.process.values())


def host(config: PlanConfig, rehearsal: Rehearsal, batch: int, chunk: int, *, cuda: bool) -> Host:
    """Of a node. `batch`: samples of one rank; `chunk`: of the image tower."""
    data, ranks = config.data, config.gpus * config.nodes
    lanes = data.shard_streams or default_streams(config.batch, ranks, None)
    workers = min(data.workers, max(1, lanes // ranks))
    tier = config.offload if config.offload != "none" else "host"
    layout = Layout(
        slots=data.buffers if workers else 1,
        samples=batch,
        row=rehearsal.row,
        context_length=rehearsal.context_length,
        dtype=str(rehearsal.row_type).removeprefix("torch."),
        tier="device" if data.on_device else tier,
        decoded=data.on_device and tier != "encoded",
        chunk=chunk,
    )
    layout = replace(layout, pool=largest_pool(layout, config.image_bytes))
    process = {
        "process": CUDA_PROCESS if cuda else PROCESS,
        "batch": layout.memory_bytes(
            config.image_bytes if data.on_device else min(config.image_bytes, layout.row_bytes)
        ),
        "shuffle windows": lanes // ranks * max(data.shuffle, 1) * config.image_bytes,
        "loader workers": LOADER + workers * WORKER if workers else 0,
    }
    return Host(process, config.gpus, config.gpus * layout.disk_bytes())
