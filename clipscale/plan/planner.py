"""Plans a run on a machine that need not be here: chunk sizes, memory, time, and what would fit."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from clipscale.common.errors import UserError
from clipscale.common.hardware import Hardware
from clipscale.common.units import format_bytes
from clipscale.config.tools import PlanConfig, target_gpu
from clipscale.plan.dry_run import PHASES, TOWERS, DryRun, StepMemory, dry_run
from clipscale.plan.memory import (
    CONTEXT,
    IMAGE_BYTES,
    NCCL,
    RESERVE,
    WORKSPACES,
    Chunks,
    MemoryModel,
    host_memory,
    keep_bytes,
)
from clipscale.plan.remedies import Needs, remedies
from clipscale.plan.step_time import CAPTION_TOKENS, caption_width, step_time
from clipscale.step.chunk_sizes import CPU_CHUNK, SMALLEST, batch_norm_chunk, sizes_of_settings

AUTO_MOST = 512
"""Largest chunk assumed for cache.chunk=auto: larger ones are hardly faster on a GPU."""
LARGEST_BATCH = 2**28
"""The search for the largest batch ends here."""
Result = dict[str, Any]


def plan(config: PlanConfig, announce: Callable[[str], None] = lambda line: None) -> Result:
    """The object that `json=true` prints (docs/plan.md). `announce` gets lines for the user. Raises UserError."""
    with planned(config) as made:
        announce(announcement(config))
        result, needs = made.result(), made.needs()
    if made.gpu and not result["fits"]:
        announce("it does not fit; planning it with other settings")
        result["remedies"] = [
            {"settings": list(remedy.words), "gpu_share": remedy.needs.gpu, "host_share": remedy.needs.host}
            for remedy in remedies(config, needs, measured_needs, result["limits"]["chunk"])
        ]
    result["conclusion"] = conclusion(result)
    return result


@contextmanager
def planned(config: PlanConfig) -> Iterator["MemoryPlan"]:
    """The plan of a run, while its dry run is open. Raises UserError."""
    gpu, ranks = target_gpu(config), config.gpus * config.nodes
    sizes_of_settings(config.cache, config.batch // ranks)
    with dry_run(config, ranks, gpu.capability if gpu else None) as run:
        yield MemoryPlan(config, gpu, run)


def measured_needs(config: PlanConfig) -> Needs:
    """The memory that a changed run takes; infinite if its settings do not go together, which makes it no remedy."""
    try:
        with planned(config) as made:
            return made.needs()
    except UserError:
        return Needs(math.inf, math.inf)


def announcement(config: PlanConfig) -> str:
    """The line for a user who waits."""
    where = f"{config.gpus * config.nodes} x {config.hardware}"
    return f"dry run of {config.model.name} on {where}, without memory or data: usually 10 to 60 seconds"


class MemoryPlan:
    """The memory of a run on a machine, and what would fit there."""

    def __init__(self, config: PlanConfig, gpu: Hardware | None, run: DryRun, tried: dict[str, Any] | None = None):
        """`tried`: chunk sizes by tower that the run itself has chosen."""
        self.config, self.gpu, self.run = config, gpu, run
        self.ranks = config.gpus * config.nodes
        self.local = config.batch // self.ranks
        self.model = MemoryModel(run, caption_width(config, run) / run.context_length)
        self.workspace = WORKSPACES.get(gpu.capability, WORKSPACES[80]) if gpu else 0
        """cuBLAS's, in torch's allocator."""
        self.outside = (CONTEXT + (NCCL if self.ranks > 1 else 0)) if gpu else 0
        """GPU memory outside of torch's allocator."""
        self.usable = math.inf if gpu is None else gpu.memory_bytes * (1 - RESERVE)
        self.chunks, self.assumed = self._chunks(tried or {})
        plain = self.model.at(self.local, self.chunks)
        self.keep = keep_bytes(config.cache.keep, plain, self.usable - self.workspace - self.outside)
        self.step = self.model.at(self.local, self.chunks, self.keep)

    def _chunks(self, tried: dict[str, Any]) -> tuple[Chunks, bool]:
        """Chunk sizes as set, as tried, or assumed: the largest up to AUTO_MOST that fits; and whether assumed."""
        model, local = self.run.state.model, self.local
        set_sizes = sizes_of_settings(self.config.cache, local)
        sizes: list[int | None] = []
        for name, tower in zip(TOWERS, (model.image, model.text)):
            whole = batch_norm_chunk(tower, name, set_sizes[name], local) or (self.run.state.stored and name == "image")
            sizes.append(None if whole else set_sizes[name] or tried.get(name) or 0)
        assumed = 0 in sizes
        if assumed:
            largest = CPU_CHUNK
            if self.gpu:
                largest = min(self.largest_chunk(min(AUTO_MOST // 2, local)) or SMALLEST, AUTO_MOST)
            sizes = [min(largest, local) if size == 0 else size for size in sizes]
        return (sizes[0], sizes[1]), assumed

    def total(self, step: StepMemory) -> int:
        """Memory that the GPU must have."""
        return int(step.highest) + self.workspace + self.outside

    def needs(self) -> Needs:
        """Memory in shares of what there is."""
        host = self.host(self.local)["node_bytes"] / self.config.host_memory if self.config.host_memory else 0.0
        fixed = sum(self.run.fixed.values()) / self.usable
        return Needs(self.total(self.step) / self.usable, host, fixed, max(PHASES, key=self.step.phase))

    def host(self, batch: int) -> Result:
        """Host memory of a node, at `batch` samples on each rank."""
        return host_memory(self.config, self.run, batch, self.chunks[0] or batch, cuda=self.gpu is not None)

    # ---- what would fit ----

    def largest_chunk(self, known: int) -> int | None:
        """The largest power of two, for both towers, that fits without kept graphs; None: SMALLEST does not.

        Follows a straight line through the chunk `known` and half of it.
        """
        best, size = None, SMALLEST
        while size <= self.local and self.total(self.model.estimate(self.local, size, known)) <= self.usable:
            best, size = size, 2 * size
        return best

    def largest_batch(self) -> tuple[int, str]:
        """The largest batch that fits with these chunks, of this one's halves and doubles (0: none); and its bound."""
        local, least = self.local, max(chunk or 1 for chunk in self.chunks)
        if bound := self._bound(local):
            while local >= least and self._bound(local):
                local //= 2
            return (local * self.ranks if local >= least else 0), bound
        while local * self.ranks < LARGEST_BATCH and not (bound := self._bound(2 * local)):
            local *= 2
        return local * self.ranks, bound

    def _bound(self, batch: int) -> str:
        """What does not suffice for `batch` samples on each rank; empty: it fits."""
        if self.total(self.model.at(batch, self.chunks, self.keep)) > self.usable:
            return "GPU memory"
        most = self.config.host_memory
        return "host memory" if most and self.host(batch)["node_bytes"] > most else ""

    # ---- the result ----

    def result(self) -> Result:
        """The plan as JSON-like values (docs/plan.md), without remedies and conclusion."""
        config, host = self.config, self.host(self.local)
        device, time, limits = self.device_record(), None, None
        host_fits = host["node_bytes"] <= config.host_memory if config.host_memory else None
        if self.gpu:
            counts = self.model.counts(self.local, self.chunks)
            image, text = (kept / count for kept, count in zip(self.step.kept, counts))
            time = step_time(config, self.gpu, self.run, self.local, (image, text)).record(config)
            batch, bound = self.largest_batch()
            cut = [chunk for chunk in self.chunks if chunk]
            chunk = self.largest_chunk(max(cut)) if len(cut) == len(TOWERS) else None
            limits = {"chunk": chunk, "batch": batch, "batch_bound": bound}
        return {
            "fits": self.total(self.step) <= self.usable and host_fits is not False,
            "peak_bytes": device["peak_bytes"],
            "loss_bytes": device["phases"]["loss"]["extra_bytes"],
            "host_bytes": host["node_bytes"],
            "step_s": time["step_s"] if time else None,
            "settings": {
                "model": config.model.name,
                **{name: getattr(config, name) for name in ("batch", "hardware", "gpus", "nodes", "offload")},
                "local_batch": self.local,
                "chunk": {name: chunk or self.local for name, chunk in zip(TOWERS, self.chunks)},
                "chunk_assumed": self.assumed,
                "kept_chunks": dict(zip(TOWERS, self.step.kept)),
                "precision": config.precision.name,
                "optim": config.optim.name,
                "parallel": config.launch.parallel,
            },
            "device": device,
            "host": host | {"memory_bytes": config.host_memory, "fits": host_fits},
            "limits": limits,
            "time": time,
            "notes": self.notes(),
        }

    def device_record(self) -> Result:
        """The GPU's memory by phase, with cuBLAS's workspace."""
        step, phases = self.step, {}
        for name in PHASES:
            before, peak = step.before[name] + self.workspace, step.phase(name) + self.workspace
            phases[name] = {"before_bytes": before, "extra_bytes": peak - before, "peak_bytes": peak}
        return {
            "fixed_bytes": self.run.fixed,
            "phases": phases,
            "workspace_bytes": self.workspace,
            "peak_bytes": step.highest + self.workspace,
            "outside_bytes": self.outside,
            "total_bytes": self.total(step),
            "usable_bytes": int(self.usable) if self.gpu else None,
        }

    def notes(self) -> list[str]:
        """Assumptions behind the figures."""
        config, chunk = self.config, self.chunks[0] or self.local
        counts = self.model.counts(self.local, self.chunks)
        kept = ", ".join(f"{n} of {count} {name} chunks" for name, n, count in zip(TOWERS, self.step.kept, counts))
        notes = {
            f"cache.chunk=auto: {chunk} assumed; the run finds its own by trial, for speed": self.assumed,
            "model.compile=true: predicted as if not compiled": config.model.compile,
            f"assumed: captions of {CAPTION_TOKENS} tokens on average, sorted and cut to their length": self.gpu
            and caption_width(config, self.run) < self.run.context_length,
            f"graphs that are kept between the passes: {kept}": any(self.step.kept),
            f"assumed: {format_bytes(self.outside)} outside of torch's allocator (context, NCCL), "
            f"{format_bytes(self.workspace)} of cuBLAS workspace, {RESERVE:.0%} left free": self.gpu,
            f"assumed: {IMAGE_BYTES / 1000:g} kB a picture in the shards, and the host memory of processes": True,
        }
        return [note for note, applies in notes.items() if applies]


def conclusion(result: Result) -> str:
    """Whether it fits, and if not, what to change: one line."""
    device, limits, host = result["device"], result["limits"], result["host"]
    total, usable = device["total_bytes"], device["usable_bytes"]
    if usable is None:
        return f"{format_bytes(total)} in each process, in addition to the host's share"
    sizes = f"{format_bytes(total)} of {format_bytes(usable)} usable on each GPU"
    node = f"{format_bytes(host['node_bytes'])} of host memory on each node"
    if result["fits"]:
        return f"fits: {sizes}, {node}"
    if host["fits"] is False:
        sizes += f", {node} of {format_bytes(host['memory_bytes'])}"
    advice = [" ".join(remedy["settings"]) for remedy in result["remedies"]]
    if limits["batch"]:
        advice.append(f"batch={limits['batch']}")
    if not advice:
        return (
            f"does not fit: {sizes}; no setting that was tried helps: take larger GPUs, more nodes or a smaller model"
        )
    return f"does not fit: {sizes}; try {', or '.join(advice)}"
