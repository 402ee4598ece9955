"""Plans a run on any machine: chunk sizes, memory, time, the largest batch, and settings with which a run fits."""

import math
from bisect import bisect, bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from clipscale.common.hardware import Hardware
from clipscale.common.record import Record
from clipscale.common.terminal import doing
from clipscale.common.units import parse_memory
from clipscale.config.sections import CacheConfig
from clipscale.data.loader.memory import free_memory
from clipscale.models.flops import PassFlops
from clipscale.step.chunk_sizes import CPU_CHUNK, batch_norm_chunk, sizes_of_settings
from clipscale.step.keep_budget import MARGIN
from clipscale.tools.plan import ASSUMED
from clipscale.tools.plan.dry_run import TOWERS, dry_runs, model_without_values
from clipscale.tools.plan.memory import (
    PHASES,
    Chunks,
    MemoryModel,
    StepMemory,
    caption_width,
    host_memory,
    outside_torch,
)
from clipscale.tools.plan.settings import PlanConfig, target_gpu
from clipscale.tools.plan.step_time import StepTime, pass_flops
from clipscale.tools.plan.text import written

OFFLOADS = ("none", "host")
"""Where pixels wait, the fastest first."""
HELPS = 0.95
"""Share of the lack that a setting must leave at most, so that it is named."""


@dataclass(frozen=True)
class Target:
    """The machine of a plan, and the memory of each of its GPUs."""

    gpu: Hardware | None
    ranks: int
    workspace: int
    """Of cuBLAS, which torch's allocator counts."""
    outside: int
    """What torch's allocator does not count."""
    usable: int | None
    """None: a CPU, whose memory is the host's."""

    @classmethod
    def of(cls, config: PlanConfig) -> "Target":
        """Raises UserError for settings that do not go together."""
        gpu = target_gpu(config)
        ranks = config.gpus * config.nodes
        if gpu is None:
            return cls(None, ranks, 0, 0, None)
        workspace = ASSUMED.workspace_hopper if gpu.capability >= 90 else ASSUMED.workspace
        usable = int(gpu.memory_bytes * (1 - ASSUMED.reserve))
        return cls(gpu, ranks, workspace, outside_torch(ranks), usable)

    @property
    def free(self) -> float:
        """What a step may take."""
        return math.inf if self.usable is None else self.usable - self.workspace - self.outside


class Prediction:
    """One step of a run on a machine."""

    def __init__(
        self, config: PlanConfig, target: Target, model: MemoryModel, flops: tuple[PassFlops, PassFlops]
    ) -> None:
        """What follows `target` is of these settings but for batch, chunks, kept graphs, offload and the host's."""
        self.config, self.target, self.model, self.flops = config, target, model, flops
        self.run = model.run
        self.local = config.batch // target.ranks
        self.resident = config.offload == "none"
        self.chunks = self.chunk_sizes()
        self.step = self.memory(self.local)
        self.host = self.host_of(self.local)

    def memory(self, batch: int) -> StepMemory:
        """Of a step of `batch` samples on a rank, with the graphs that `cache.keep` keeps."""
        bare = self.model.at(batch, self.chunks, resident=self.resident)
        keep: float | None = parse_memory("cache.keep", self.config.cache.keep)
        if keep is None:  # a share of what is free before the step
            start = bare.before["encode"]
            share, free = MARGIN["cuda"], self.target.free
            if self.target.gpu is None:
                share, free = MARGIN["cpu"], (self.config.host_memory or free_memory()) / self.config.gpus
            keep = self.model.room(bare, batch, self.chunks, start + share * (free - start))
        return self.model.with_kept(bare, batch, self.chunks, keep)

    def chunk_sizes(self) -> Chunks:
        """Chunk sizes as set, or assumed: the largest of `auto_chunk` and its halves that fits."""
        model, local = self.run.train_step.model, self.local
        settings = sizes_of_settings(self.config.cache, local, self.run.captions)
        rows = self.model.sizes(local, (None, None))
        set_sizes: list[int | None] = []
        for name, tower, most in zip(TOWERS, (model.image, model.text), rows):
            whole = batch_norm_chunk(tower, name, settings[name], most)
            set_sizes.append(None if whole else settings[name] or 0)

        def chunks(size: int) -> Chunks:
            image, text = (size if setting == 0 else setting for setting in set_sizes)
            return image, text

        def fits(size: int) -> bool:
            return self.model.at(local, chunks(size), resident=self.resident).highest <= self.target.free

        most = min(ASSUMED.auto_chunk if self.target.gpu else CPU_CHUNK, local)
        if 0 not in set_sizes or fits(most):
            return chunks(most)
        sizes = [most >> i for i in range(most.bit_length())]
        return chunks([*sizes, 1][bisect_left(sizes, True, key=fits)])

    def host_of(self, batch: int) -> Record:
        """The host's memory, for so many samples on each rank."""
        return host_memory(self.config, self.run, batch, self.memory(batch).highest)

    def fits(self, batch: int) -> bool:
        """Whether so many samples on each rank fit, with these chunks."""
        if self.memory(batch).highest > self.target.free:
            return False
        most = self.config.host_memory
        return most is None or self.host_of(batch)["node_bytes"] <= most

    def largest_batch(self) -> dict[str, int]:
        """Of this batch, its halves and doubles, with these chunks (0: none), and what it needs of the host."""
        ranks, batch = self.target.ranks, self.local
        least = max(chunk or 1 for chunk in self.chunks)
        sizes = [batch >> i for i in range(batch.bit_length()) if batch >> i >= least][::-1]
        while sizes and 2 * sizes[-1] * ranks <= ASSUMED.largest_batch:
            sizes.append(2 * sizes[-1])
        found = bisect(sizes, False, key=lambda size: not self.fits(size))
        batch = sizes[found - 1] if found else 0
        node = self.host_of(batch)["node_bytes"] if batch else 0
        return {"largest_batch": batch * ranks, "largest_host_bytes": node}

    def second_pass(self) -> list[float]:
        """The share of each tower's chunks that have one, because their graphs are not kept; 0 of a frozen tower."""
        counts = self.model.counts(self.local, self.chunks)
        pairs = zip(self.run.train_step.cache.trained, self.step.kept, counts)
        return [1 - graphs / count if trained else 0.0 for trained, graphs, count in pairs]

    def result(self) -> Record:
        """The object of docs/plan.md, without a largest batch."""
        config, target, step = self.config, self.target, self.step
        again = self.second_pass()
        time = StepTime(config, target.gpu, self.run, self.flops, again)
        estimate = time.estimate()
        phases = {}
        for name in PHASES:
            before = step.before[name] + target.workspace
            peak = step.phase(name) + target.workspace
            phases[name] = {"before_bytes": before, "extra_bytes": peak - before, "peak_bytes": peak}
        peak = step.highest + target.workspace
        node = self.host["node_bytes"]
        return {
            "fits": step.highest <= target.free and node <= (config.host_memory or math.inf),
            "peak_bytes": peak,
            "loss_bytes": phases["loss"]["extra_bytes"],
            "host_bytes": node,
            "step_s": estimate["step_s"] if estimate else None,
            "least_step_s": time.step_s(1.0),
            "model": config.model.name,
            "batch": config.batch,
            "hardware": config.hardware,
            "gpus": config.gpus,
            "nodes": config.nodes,
            "offload": config.offload,
            "exchange": self.run.config.loss.exchange,
            "local_batch": self.local,
            "chunk": dict(zip(TOWERS, self.model.sizes(self.local, self.chunks))),
            "kept": dict(zip(TOWERS, step.kept)),
            "second_pass": dict(zip(TOWERS, again)),
            "device": {"phases": phases, "total_bytes": peak + target.outside, "usable_bytes": target.usable},
            "host": self.host | {"memory_bytes": config.host_memory},
            "time": estimate,
            "notes": ASSUMED.notes,
        }


def plan(config: PlanConfig, *, search: bool = True) -> Record:
    """The object that `json=true` prints (docs/plan.md). Raises UserError.

    `search`: also look for the largest batch.
    """
    result = fitted(config) if config.fit else predicted(config, search=search)
    result["remedies"] = [] if result["fits"] else remedies(config, result)
    return result | {"conclusion": written("conclusion", **result)}


def remedies(config: PlanConfig, result: Record) -> list[str]:
    """The settings that make a run fit; where none does by itself, those with which it takes less of what it lacks."""

    def lacking(result: Record) -> float:
        device, host = result["device"], result["host"]
        over_device = device["total_bytes"] - (device["usable_bytes"] or math.inf)
        return max(0, over_device) + max(0, host["node_bytes"] - (host["memory_bytes"] or math.inf))

    tiles = replace(config.loss, exchange="auto", backend="auto")
    trials: dict[str, Record] = {
        "loss=infcl" if config.loss.objective == "softmax" else "loss.backend=auto": {"loss": tiles},
        "cache.chunk=auto": {"cache": replace(config.cache, chunk=["auto"])},
        "cache.keep=none": {"cache": replace(config.cache, keep="none")},
        "model.grad_checkpointing=true": {"model": replace(config.model, grad_checkpointing=True)},
        "launch.parallel=zero3": {"launch": replace(config.launch, parallel="zero3")},
        "data.buffers=1": {"data": replace(config.data, buffers=1)},
    }
    changed = {words: replace(config, fit=False, **trial) for words, trial in trials.items()}
    after = {words: predicted(trial, search=False) for words, trial in changed.items() if trial != config}
    fitting = [words for words, trial in after.items() if trial["fits"]]
    return fitting or [words for words, trial in after.items() if lacking(trial) < HELPS * lacking(result)]


@contextmanager
def predictions(config: PlanConfig) -> Iterator[Callable[[PlanConfig], Prediction]]:
    """What predicts these settings, and those with another batch, chunk, offload or number of kept graphs.

    Raises UserError for settings that do not go together.
    """
    target = Target.of(config)
    # Refused before the dry run.
    sizes_of_settings(config.cache, config.batch // target.ranks, config.data.texts_per_step)
    doing(f"planning: a dry run of {config.model.name} on {target.ranks} x {config.hardware}")
    model = model_without_values(config.model)
    flops = pass_flops(config.model, model)
    capability = target.gpu.capability if target.gpu else None
    with dry_runs(config, target.ranks, capability, config.nodes) as runs:
        memory = MemoryModel(runs, caption_width(model) / model.context_length)
        yield lambda settings: Prediction(settings, target, memory, flops)


def predicted(config: PlanConfig, *, search: bool = True) -> Record:
    """The plan of these settings. Raises UserError for settings that do not go together."""
    with predictions(config) as predict:
        prediction = predict(config)
        result = prediction.result()
        if search and (prediction.target.gpu or config.host_memory):
            result |= prediction.largest_batch()
    return result


def fitted(config: PlanConfig) -> Record:
    """The plan of the largest batch, with the fastest place of its pixels, and the fastest chunks and kept graphs."""
    with predictions(config) as predict:
        trials = [replace(config, offload=offload, cache=CacheConfig(["auto"], "none")) for offload in OFFLOADS]
        found = [predict(trial).largest_batch() for trial in trials]
        largest = max(found, key=lambda batch: batch["largest_batch"])
        best = trials[found.index(largest)]
        results = []
        for keep in ("none", "auto"):
            batch = largest["largest_batch"] or config.batch
            trial = replace(best, batch=batch, cache=replace(best.cache, keep=keep))
            results.append(predict(trial).result() | {"keep": keep} | largest)
    fitting = [result for result in results if result["fits"]]
    result = min(fitting, key=lambda result: result["least_step_s"], default=results[0])
    words = "batch={batch} offload={offload} 'cache.chunk=[{chunk[image]},{chunk[text]}]'"
    return result | {"fit": f"{words} cache.keep={{keep}}".format(**result)}
