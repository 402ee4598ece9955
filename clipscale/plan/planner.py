"""A run on a machine that it has not seen yet: chunks, memory, time, and what would fit."""

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from clipscale.autotune import CPU_CHUNK, SMALLEST, chunk_sizes, uncut
from clipscale.config.checks import at_least, shared
from clipscale.config.tools import PlanConfig
from clipscale.errors import UserError
from clipscale.hardware import Hardware, hardware
from clipscale.plan.memory import PHASES, Chunks, Host, Memory, Model, host, keep_bytes, outside, workspace
from clipscale.plan.rehearsal import TOWERS, Rehearsal, rehearsed
from clipscale.plan.time import seconds
from clipscale.units import format_bytes

AUTO_MOST = 512
"""Samples to which cache.chunk=auto is assumed to come at most: larger chunks are hardly faster on a GPU, and it takes the smallest of the
fast ones."""
LARGEST_BATCH = 2**28
"""Where the search for the largest batch ends."""
Result = dict[str, Any]


def plan(config: PlanConfig, say: Callable[[str], None] = lambda line: None) -> Result:
    """What `json=true` prints (docs/plan.md). `say` is told, once the settings have been checked, what takes its time.

    Raises UserError.
    """
    gpu = machine(config)
    ranks = config.gpus * config.nodes
    chunk_sizes(config.cache, config.batch // ranks)
    with rehearsed(config, ranks, gpu.capability if gpu else None) as rehearsal:
        say(rehearsing(config))
        return Plan(config, gpu, rehearsal).result()


def rehearsing(config: PlanConfig) -> str:
    """What is done, as a line for whoever waits for it."""
    where = f"{config.gpus * config.nodes} x {config.hardware}"
    return f"rehearsing steps of {config.model.name} on {where}, without memory or data: usually some 10 to 60 seconds"


def machine(config: PlanConfig) -> Hardware | None:
    """The GPU; None for `cpu`. Raises UserError for what cannot be."""
    for name in ("gpus", "nodes", "image_bytes"):
        at_least(name, getattr(config, name), 1)
    for name in ("reserve", "utilisation"):
        if not 0 <= getattr(config, name) <= 1:
            raise UserError(f"{name}={getattr(config, name)}: give a share, 0 to 1")
    for name in ("utilisation", "network"):
        if getattr(config, name) <= 0:
            raise UserError(f"{name}={getattr(config, name):g}: give more than 0")
    if not config.hardware:
        raise UserError("hardware is not set; give the GPU, hardware=a100-80g, or run=NAME to compare with a run")
    gpu = None if config.hardware == "cpu" else hardware(config.hardware)
    ranks = config.gpus * config.nodes
    shared(config.batch, ranks, f"gpus={config.gpus} x nodes={config.nodes}")
    return gpu


class Plan:
    """A rehearsed run on a machine."""

    def __init__(
        self, config: PlanConfig, gpu: Hardware | None, rehearsal: Rehearsal, found: dict[str, int] | None = None
    ) -> None:
        """`found`: chunk sizes by tower that an earlier start of the run has found."""
        self.config, self.gpu, self.rehearsal = config, gpu, rehearsal
        self.ranks = config.gpus * config.nodes
        self.local = config.batch // self.ranks
        self.model = Model(rehearsal)
        self.inside = workspace(gpu.capability) if gpu else 0
        self.outside = outside(self.ranks) if gpu else 0
        self.room = math.inf if gpu is None else gpu.memory_bytes * (1 - config.reserve)
        self.chunks, self.assumed = self.choose(found or {})
        plain = self.model.at(self.local, self.chunks)
        self.keep = keep_bytes(config.cache.activation_budget, plain, self.room - self.inside - self.outside)
        self.memory = self.at(self.local, self.chunks)

    def at(self, batch: int, chunks: Chunks) -> Memory:
        return self.model.at(batch, chunks, self.keep)

    def total(self, memory: Memory) -> int:
        """What the GPU has to hold."""
        return memory.highest + self.inside + self.outside

    def choose(self, found: dict[str, int]) -> tuple[Chunks, bool]:
        """Chunks as set, as found, or for `auto` the largest power of two up to AUTO_MOST that fits; and whether that was assumed."""
        model, local = self.rehearsal.learner.model, self.local
        set_sizes = chunk_sizes(self.config.cache, local)
        sizes: dict[str, int | None] = {}
        for name, tower in zip(TOWERS, (model.image, model.text)):
            if uncut(tower, name, set_sizes[name], local) or (self.rehearsal.learner.stored and name == "image"):
                sizes[name] = None
            else:
                sizes[name] = set_sizes[name] or found.get(name) or 0
        if all(size != 0 for size in sizes.values()):
            return (sizes["image"], sizes["text"]), False
        self.keep = 0.0
        if self.gpu is None:
            size = min(CPU_CHUNK, local)
        else:
            tried = min(AUTO_MOST // 2, local)
            size = min(self.largest_chunk(tried) or SMALLEST, AUTO_MOST, local)
        return (sizes["image"] if sizes["image"] != 0 else size, sizes["text"] if sizes["text"] != 0 else size), True

    def host(self, batch: int) -> Host:
        return host(self.config, self.rehearsal, batch, self.chunks[0] or batch, cuda=self.gpu is not None)

    # ---- what would fit ----

    def largest_chunk(self, known: int) -> int | None:
        """The largest power of two, for both towers, that fits at this batch without kept graphs; None where not even SMALLEST does.

        By a straight line through the chunk `known` and its half.
        """
        best, size = None, SMALLEST
        while size <= self.local and self.total(self.model.estimate(self.local, size, known)) <= self.room:
            best, size = size, 2 * size
        return best

    def largest_batch(self) -> tuple[int, str]:
        """The largest power of two, or this batch, that fits with these chunks, and what bounds it; 0 where none does."""
        batch, bound = self.config.batch, ""
        local = self.local

        def bounded(size: int) -> str:
            if self.total(self.at(size, self.chunks)) > self.room:
                return "GPU memory"
            return "host memory" if self.config.host_memory and self.host(size).node > self.config.host_memory else ""

        if not (bound := bounded(local)):
            size = 2 ** math.floor(math.log2(batch))
            while 2 * size // self.ranks >= 1 and 2 * size <= LARGEST_BATCH:
                if 2 * size % self.ranks == 0 and (bound := bounded(2 * size // self.ranks)):
                    break
                size = 2 * size
            return max(size, batch), bound
        size = 2 ** math.ceil(math.log2(batch)) // 2
        least = self.ranks * max(c or 1 for c in self.chunks)
        while size >= least and bounded(size // self.ranks):
            size //= 2
        return (size, bound) if size >= least else (0, bound)

    # ---- telling ----

    def result(self) -> Result:
        config, memory, node = self.config, self.memory, self.host(self.local)
        device_fits = self.total(memory) <= self.room
        host_fits = node.node <= config.host_memory if config.host_memory else None
        batch, bound = self.largest_batch() if self.gpu else (0, "")
        cut = [c for c in self.chunks if c]
        chunk = self.largest_chunk(max(cut)) if self.gpu and len(cut) == len(TOWERS) else None
        result: Result = {
            "settings": {
                "model": config.model.name,
                "batch": config.batch,
                "hardware": config.hardware,
                "gpus": config.gpus,
                "nodes": config.nodes,
                "local_batch": self.local,
                "chunk": {name: chunk or self.local for name, chunk in zip(TOWERS, self.chunks)},
                "chunk_assumed": self.assumed,
                "kept_chunks": dict(zip(TOWERS, memory.kept)),
                "precision": config.precision.name,
                "optim": config.optim.name,
                "offload": config.offload,
                "parallel": config.launch.parallel,
            },
            "device": self.device_record(),
            "host": {
                "process_bytes": node.process,
                "processes": node.processes,
                "node_bytes": node.node,
                "memory_bytes": config.host_memory,
                "disk_bytes": node.disk,
                "fits": host_fits,
            },
            "limits": {"chunk": chunk, "batch": batch, "batch_bound": bound} if self.gpu else None,
            "time": self.time_record(),
            "notes": self.notes(),
            "fits": device_fits and host_fits is not False,
        }
        result["verdict"] = verdict(result)
        return result

    def device_record(self) -> Result:
        memory = self.memory
        phases = {
            name: {
                "before_bytes": memory.before[name] + self.inside,
                "extra_bytes": memory.phase(name) - memory.before[name],
                "peak_bytes": memory.phase(name) + self.inside,
            }
            for name in PHASES
        }
        return {
            "fixed_bytes": memory.fixed,
            "gradients_bytes": memory.gradients,
            "phases": phases,
            "workspace_bytes": self.inside,
            "peak_bytes": memory.highest + self.inside,
            "outside_bytes": self.outside,
            "total_bytes": self.total(memory),
            "usable_bytes": int(self.room) if self.gpu else None,
            "memory_bytes": self.gpu.memory_bytes if self.gpu else None,
        }

    def time_record(self) -> Result | None:
        if self.gpu is None:
            return None
        counts = [math.ceil(self.local / (c or self.local)) for c in self.chunks]
        kept = self.memory.kept[0] / counts[0], self.memory.kept[1] / counts[1]
        step = seconds(self.config, self.gpu, self.rehearsal, self.local, kept)
        samples = self.config.samples
        return {
            "assumed_utilisation": self.config.utilisation,
            **{f"{name}_s": value for name, value in asdict(step).items()},
            "step_s": step.step,
            "samples_per_s": self.config.batch / step.step,
            "hours": samples / self.config.batch * step.step / 3600 if samples else None,
        }

    def notes(self) -> list[str]:
        """What the figures rest on that the settings do not say."""
        config, found = self.config, []
        if self.assumed:
            found.append(
                f"cache.chunk=auto: {self.chunks[0] or self.local} assumed; the run finds its own by trial, for speed, with what fits"
            )
        if config.model.compile:
            found.append("model.compile=true: predicted as if not compiled")
        if config.data.on_device:
            found.append("data.decode=gpu: the decoder's own memory on the GPU is not predicted")
        if config.cache.activation_budget == "auto":
            found.append("cache.activation_budget=auto fills what is free, by intention")
        if self.gpu:
            found.append(
                f"assumed: {format_bytes(self.outside)} outside of torch's allocator (context, NCCL), {format_bytes(self.inside)} of "
                f"cuBLAS workspace, {config.reserve:.0%} left free"
            )
        found.append(
            f"assumed: {config.image_bytes / 1000:g} kB a picture in the shards, and what processes take on the host"
        )
        return found


def verdict(result: Result) -> str:
    """One line, for people."""
    device, limits, host_record = result["device"], result["limits"], result["host"]
    total, usable = device["total_bytes"], device["usable_bytes"]
    if usable is None:
        return f"{format_bytes(total)} in each process, beside the host's share"
    said = f"{format_bytes(total)} of {format_bytes(usable)} usable on each GPU"
    node = f"{format_bytes(host_record['node_bytes'])} of host memory on each node"
    if result["fits"]:
        return f"fits: {said}, {node}"
    remedies = []
    if total > usable:
        if limits["chunk"]:
            remedies.append(f"cache.chunk={limits['chunk']}")
        elif sum(device["fixed_bytes"].values()) > usable / 2:
            remedies.append("launch.parallel=fsdp or more GPUs")
        else:
            remedies.append("model.grad_checkpointing=true, launch.parallel=fsdp or more GPUs")
        if result["settings"]["offload"] == "none":
            remedies.append("offload=host")
    if host_record["fits"] is False:
        said += f", {node} of {format_bytes(host_record['memory_bytes'])}"
        remedies.append("offload=encoded, offload=disk, data.buffers=1 or more nodes")
    if limits["batch"]:
        remedies.append(f"batch={limits['batch']}")
    return f"does not fit: {said}; try {', or '.join(remedies)}"
