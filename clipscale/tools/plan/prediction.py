"""Predicts the steps of a run on a machine: chunk sizes, memory, time, and the largest batch."""

import math
from bisect import bisect
from dataclasses import asdict, dataclass
from functools import cached_property

from clipscale.common.hardware import Hardware
from clipscale.common.memory import free_memory
from clipscale.common.record import Record
from clipscale.config.advice import oversized_batch_warning
from clipscale.step.chunk_sizes import CPU_CHUNK, batch_norm_chunk
from clipscale.step.memory import USABLE_SHARE
from clipscale.tools.plan.assumed import ASSUMED
from clipscale.tools.plan.dry_run import DryRun
from clipscale.tools.plan.settings import PlanConfig
from clipscale.tools.plan.step_memory import (
    PHASES,
    TOWERS,
    HostMemory,
    StepEstimate,
    StepMemory,
    TowerPair,
    bytes_outside_torch,
    host_memory,
)
from clipscale.tools.plan.step_time import step_time


@dataclass(frozen=True)
class SecondPasses:
    """Which chunks of a step have a second pass."""

    # Chunks of each tower whose graphs are kept.
    kept: TowerPair
    # The share of each tower's inputs that are encoded twice.
    replayed_share: list[float]
    # Operations of all passes.
    operations: float


class Prediction:
    """Predicts the steps of a run on a machine."""

    def __init__(self, config: PlanConfig, gpu: Hardware | None, dry_run: DryRun) -> None:
        """`gpu`: None for a CPU."""
        self.config = config
        self.gpu = gpu
        self.dry_run = dry_run
        self.local_batch = config.local_batch
        # Memory of cuBLAS, which torch's allocator counts.
        self.workspace = 0
        # Memory that torch's allocator does not count.
        self.outside = 0
        # Memory of a GPU.
        self.usable: int | None = None
        # Memory that a step may take.
        self.free = math.inf
        if gpu:
            self.workspace = ASSUMED.hopper_workspace_bytes if gpu.capability >= 90 else ASSUMED.workspace_bytes
            self.outside = bytes_outside_torch(config.ranks)
            self.usable = int(gpu.memory_bytes * (1 - ASSUMED.reserved_share))
            self.free = self.usable - self.workspace - self.outside

    @cached_property
    def chunk_sizes(self) -> TowerPair:
        """The sizes that are set. An `auto` size is assumed: `auto_chunk` of assumed.yaml, halved until passes fit."""
        fixed = [*self.config.cache.sizes]
        rows = (self.local_batch, self.local_batch * self.dry_run.texts_per_sample)
        for i, name in enumerate(TOWERS):
            if batch_norm_chunk(self.dry_run.towers[i], name, fixed[i], rows[i]):
                fixed[i] = ASSUMED.largest_batch
        size = ASSUMED.auto_chunk if self.gpu else CPU_CHUNK
        while True:
            sizes = (fixed[0] or size, fixed[1] or size)
            if all(fixed) or size == 1:
                return sizes
            memory = StepEstimate(self.dry_run, self.local_batch, sizes).memory()
            if max(memory.phase("encode"), memory.phase("replay")) <= self.free:
                return sizes
            size //= 2

    def memory(self, batch: int) -> StepMemory:
        """Memory of a step of `batch` samples on a rank, with the graphs that `cache.keep` keeps."""
        step = StepEstimate(self.dry_run, batch, self.chunk_sizes)
        budget = self.config.cache.keep_bytes
        if budget is None:  # takes a share of the memory that is free before the step
            if self.gpu:
                share = USABLE_SHARE["cuda"]
                free = self.free
            else:
                share = USABLE_SHARE["cpu"]
                free = (self.config.host_memory or free_memory()) / self.config.gpus
            budget = step.budget(self.dry_run.memory.state + share * (free - self.dry_run.memory.state))
        return step.memory_within(budget)

    def host_memory(self, batch: int, memory: StepMemory) -> HostMemory:
        """Host memory of a node, in a step of `batch` samples on a rank."""
        return host_memory(self.config, self.dry_run, batch, memory.highest)

    def has_room(self, memory: StepMemory, host: HostMemory) -> bool:
        """Whether the machine has that much memory."""
        return memory.highest <= self.free and host["node_bytes"] <= (self.config.host_memory or math.inf)

    def fits(self, batch: int) -> bool:
        """Whether `batch` samples on each rank fit, with these chunks."""
        memory = self.memory(batch)
        return self.has_room(memory, self.host_memory(batch, memory))

    def largest_batch(self) -> int:
        """The largest batch that fits with these chunks: the run's own, or a power of two on each rank; 0 if none."""
        powers = (ASSUMED.largest_batch // self.config.ranks).bit_length()
        sizes = sorted({self.local_batch, *(1 << i for i in range(powers))})
        known = sizes.index(self.local_batch)
        first = 0
        end = len(sizes)
        if self.fits(self.local_batch):
            first = known + 1
        else:
            end = known
        # sizes that fit give False, which sorts before True
        num_fitting = bisect(sizes, False, first, end, key=lambda size: not self.fits(size))
        return sizes[num_fitting - 1] * self.config.ranks if num_fitting else 0

    def second_passes(self, step: StepEstimate, memory: StepMemory) -> SecondPasses:
        """The chunks that the step encodes twice, and the operations of all its passes."""
        counts = zip(self.dry_run.trained, memory.kept, step.counts)
        replayed_share = [1 - graphs / count if trained else 0.0 for trained, graphs, count in counts]
        operations = step.operations(replayed_share)
        if not self.dry_run.trains_captioner:
            return SecondPasses(memory.kept, replayed_share, operations)
        # A captioner's chunks are pairs. Images whose outputs are kept have no second pass.
        share_of_pairs = replayed_share[0]
        share_of_images = max(0.0, share_of_pairs - memory.kept_images / self.local_batch)
        return SecondPasses((memory.kept[0], memory.kept[0]), [share_of_images, share_of_pairs], operations)

    def phases(self, memory: StepMemory) -> dict[str, dict[str, float]]:
        """Bytes of a device in each phase of the step: before it, at its peak, and what the peak adds."""
        phases = {}
        for name in PHASES:
            before = memory.before[name] + self.workspace
            peak = memory.phase(name) + self.workspace
            phases[name] = {"before_bytes": before, "extra_bytes": peak - before, "peak_bytes": peak}
        return phases

    def result(self) -> Record:
        """The object of docs/plan.md: memory, whether it fits, and time; without a largest batch and remedies."""
        config = self.config
        memory = self.memory(self.local_batch)
        host = self.host_memory(self.local_batch, memory)
        step = StepEstimate(self.dry_run, self.local_batch, self.chunk_sizes)
        second = self.second_passes(step, memory)
        min_seconds, time = step_time(
            config,
            self.gpu,
            self.dry_run,
            second.replayed_share,
            in_chunks=not all(step.only_chunk),
            launches=second.operations,
        )
        phases = self.phases(memory)
        peak = memory.highest + self.workspace
        return {
            "fits": self.has_room(memory, host),
            "peak_bytes": peak,
            "loss_bytes": phases["loss"]["extra_bytes"],
            "host_bytes": host["node_bytes"],
            "step_s": time["step_s"] if time else None,
            "least_step_s": min_seconds,
            "model": config.model.name,
            **{name: getattr(config, name) for name in ("batch", "hardware", "gpus", "nodes", "offload")},
            "parameters": asdict(self.dry_run.parameters),
            "exchange": self.dry_run.config.loss.exchange,
            "local_batch": self.local_batch,
            "chunk": dict(zip(TOWERS, step.sizes)),
            "kept": dict(zip(TOWERS, second.kept)),
            "second_pass": dict(zip(TOWERS, second.replayed_share)),
            "device": {"phases": phases, "total_bytes": peak + self.outside, "usable_bytes": self.usable},
            "host": host | {"memory_bytes": config.host_memory},
            "time": time,
            "warning": oversized_batch_warning(config.batch, config.samples),
            "notes": ASSUMED.notes,
        }
