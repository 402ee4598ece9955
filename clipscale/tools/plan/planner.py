"""Plans a run on any machine: chunk sizes, memory, time, the largest batch, and settings with which a run fits."""

import math
from bisect import bisect
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, replace
from functools import cached_property

from clipscale.common.errors import UserError
from clipscale.common.hardware import Hardware
from clipscale.common.memory import free_memory
from clipscale.common.record import Record
from clipscale.common.terminal import show_task
from clipscale.config.stages import changed
from clipscale.config.train import beyond_published
from clipscale.data.shards.counts import counted_at_once
from clipscale.data.shards.listing import local_shards
from clipscale.step.cache.chunk_sizes import CPU_CHUNK, batch_norm_chunk, check_sizes
from clipscale.step.cache.graph_memory import MARGIN
from clipscale.tools.plan import ASSUMED
from clipscale.tools.plan.dry_run import DryRun, dry_run
from clipscale.tools.plan.memory import PHASES, TOWERS, PerTower, StepMemory, StepModel, host_memory, outside_torch
from clipscale.tools.plan.settings import PlanConfig, target_gpu
from clipscale.tools.plan.step_time import step_time
from clipscale.tools.plan.text import render


class Prediction:
    """Predicts the steps of a run on a machine."""

    def __init__(self, config: PlanConfig, gpu: Hardware | None, dry_run: DryRun) -> None:
        """`gpu`: None for a CPU."""
        self.config = config
        self.gpu = gpu
        self.dry_run = dry_run
        self.local = config.batch // config.ranks
        # Memory of cuBLAS, which torch's allocator counts.
        self.workspace = 0
        # Memory that torch's allocator does not count.
        self.outside = 0
        # Memory of a GPU.
        self.usable: int | None = None
        # Memory that a step may take.
        self.free = math.inf
        if gpu:
            self.workspace = ASSUMED.workspace_hopper if gpu.capability >= 90 else ASSUMED.workspace
            self.outside = outside_torch(config.ranks)
            self.usable = int(gpu.memory_bytes * (1 - ASSUMED.reserve))
            self.free = self.usable - self.workspace - self.outside

    @cached_property
    def chunk_sizes(self) -> PerTower:
        """The sizes that are set. An `auto` size is assumed: `auto_chunk` of assumed.yaml, halved until passes fit."""
        fixed = [*self.config.cache.sizes]
        rows = (self.local, self.local * self.dry_run.texts_per_sample)
        for i, name in enumerate(TOWERS):
            if batch_norm_chunk(self.dry_run.towers[i], name, fixed[i], rows[i]):
                fixed[i] = ASSUMED.largest_batch
        size = ASSUMED.auto_chunk if self.gpu else CPU_CHUNK
        while True:
            sizes = (fixed[0] or size, fixed[1] or size)
            if all(fixed) or size == 1:
                return sizes
            memory = StepModel(self.dry_run, self.local, sizes).memory()
            if max(memory.phase("encode"), memory.phase("replay")) <= self.free:
                return sizes
            size //= 2

    def memory(self, batch: int) -> StepMemory:
        """Memory of a step of `batch` samples on a rank, with the graphs that `cache.keep` keeps."""
        step = StepModel(self.dry_run, batch, self.chunk_sizes)
        keep = self.config.cache.keep_budget
        budget = keep.bytes
        if keep.is_unknown:  # takes a share of the memory that is free before the step
            if self.gpu:
                share = MARGIN["cuda"]
                free = self.free
            else:
                share = MARGIN["cpu"]
                free = (self.config.host_memory or free_memory()) / self.config.gpus
            budget = step.budget(self.dry_run.memory.state + share * (free - self.dry_run.memory.state))
        return step.within(budget)

    def fits(self, batch: int) -> bool:
        """Whether `batch` samples on each rank fit, with these chunks."""
        step = self.memory(batch).highest
        host = host_memory(self.config, self.dry_run, batch, step)["node_bytes"]
        return step <= self.free and host <= (self.config.host_memory or math.inf)

    def largest_batch(self) -> int:
        """The largest batch that fits with these chunks: the run's own, or a power of two on each rank; 0 if none."""
        powers = (ASSUMED.largest_batch // self.config.ranks).bit_length()
        sizes = sorted({self.local, *(1 << i for i in range(powers))})
        known = sizes.index(self.local)
        first = 0
        end = len(sizes)
        if self.fits(self.local):
            first = known + 1
        else:
            end = known
        # sizes that fit give False, which sorts before True
        num_fitting = bisect(sizes, False, first, end, key=lambda size: not self.fits(size))
        return sizes[num_fitting - 1] * self.config.ranks if num_fitting else 0

    def result(self) -> Record:
        """The object of docs/plan.md, without a largest batch."""
        config = self.config
        dry_run = self.dry_run
        memory = self.memory(self.local)
        step = StepModel(dry_run, self.local, self.chunk_sizes)
        host = host_memory(config, dry_run, self.local, memory.highest)
        counts = zip(dry_run.trained, memory.kept, step.counts)
        replayed_share = [1 - graphs / count if trained else 0.0 for trained, graphs, count in counts]
        operations = step.operations(replayed_share)
        kept = memory.kept
        if dry_run.is_captioner:  # chunks of pairs
            kept = kept[0], kept[0]
            pairs = replayed_share[0]
            replayed_share = [max(0.0, pairs - memory.kept_images / self.local), pairs]
        in_chunks = not all(step.only_chunk)
        min_seconds, time = step_time(
            config, self.gpu, dry_run, replayed_share, in_chunks=in_chunks, launches=operations
        )
        phases = {}
        for name in PHASES:
            before = memory.before[name] + self.workspace
            peak = memory.phase(name) + self.workspace
            phases[name] = {"before_bytes": before, "extra_bytes": peak - before, "peak_bytes": peak}
        peak = memory.highest + self.workspace
        return {
            "fits": self.fits(self.local),
            "peak_bytes": peak,
            "loss_bytes": phases["loss"]["extra_bytes"],
            "host_bytes": host["node_bytes"],
            "step_s": time["step_s"] if time else None,
            "least_step_s": min_seconds,
            "model": config.model.name,
            **{name: getattr(config, name) for name in ("batch", "hardware", "gpus", "nodes", "offload")},
            "parameters": asdict(dry_run.parameters),
            "exchange": dry_run.config.loss.exchange,
            "local_batch": self.local,
            "chunk": dict(zip(TOWERS, step.sizes)),
            "kept": dict(zip(TOWERS, kept)),
            "second_pass": dict(zip(TOWERS, replayed_share)),
            "device": {"phases": phases, "total_bytes": peak + self.outside, "usable_bytes": self.usable},
            "host": host | {"memory_bytes": config.host_memory},
            "time": time,
            "warning": beyond_published(config.batch, config.samples),
            "notes": ASSUMED.notes,
        }


def plan(config: PlanConfig, *, search: bool = True) -> Record:
    """The object that `json=true` prints (docs/plan.md). Raises UserError for settings that do not go together.

    `search`: also look for the largest batch.
    """
    gpu = target_gpu(config)
    trials: dict[str, PlanConfig] = {}
    with open_dry_run(config, gpu) as dry:
        prediction = Prediction(config, gpu, dry)
        result = prediction.result()
        if search and (gpu or config.host_memory):
            result["largest_batch"] = prediction.largest_batch()
        if not result["fits"]:
            trials = remedies(config)
        same_step = {words: trial for words, trial in trials.items() if has_same_step(trial, config)}
        fitting = next((words for words, trial in same_step.items() if fits(trial, gpu, dry)), None)
    result["remedies"] = []
    for words, trial in trials.items():
        if words == fitting or (words not in same_step and fits(trial, gpu)):
            result["remedies"] = [words]
            break
    result["epoch_samples"] = None
    if config.data.sample_weights:
        with suppress(UserError, OSError):  # a plan needs no data
            result["epoch_samples"] = counted_at_once(config.data, local_shards(config.data))
    return result | {"conclusion": render("conclusion", **result)}


def open_dry_run(config: PlanConfig, gpu: Hardware | None) -> AbstractContextManager[DryRun]:
    """A dry run of the plan. Raises UserError."""
    check_sizes(config.cache.sizes, config.batch // config.ranks, config.data.texts_per_step)
    show_task(f"planning: a dry run of {config.model.name} on {config.ranks} x {config.hardware}")
    return dry_run(config, config.ranks, gpu.capability if gpu else None, config.nodes)


def fits(config: PlanConfig, gpu: Hardware | None, dry: DryRun | None = None) -> bool:
    """Whether the run fits, by a dry run that serves it too, or by its own."""
    check_sizes(config.cache.sizes, config.batch // config.ranks, config.data.texts_per_step)
    with nullcontext(dry) if dry else open_dry_run(config, gpu) as known:
        return Prediction(config, gpu, known).fits(config.batch // config.ranks)


def remedies(config: PlanConfig) -> dict[str, PlanConfig]:
    """The run with each of the settings in assumed.yaml that changes it, by the words that set it, the best first."""
    trials = {}
    for words, values in ASSUMED.remedies.items():
        trial = config
        for name, value in values.items():
            trial = changed(trial, name, value)
        same = trial.loss.objective == config.loss.objective  # loss=infcl is another loss than a sigmoid
        if trial != config and same and all((size or 0) <= config.batch // config.ranks for size in trial.cache.sizes):
            trials[words] = trial
    return trials


def has_same_step(trial: PlanConfig, config: PlanConfig) -> bool:
    """Whether one dry run serves both: they differ in nothing but chunks, kept graphs and buffers."""
    return replace(trial, cache=config.cache, data=replace(trial.data, buffers=config.data.buffers)) == config
