"""Plans a run on any machine: chunk sizes, memory, time, what would fit, and the published methods beside it."""

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import reduce
from operator import getitem
from typing import Any

import yaml

from clipscale.common.errors import UserError
from clipscale.common.terminal import say
from clipscale.common.units import format_bytes
from clipscale.config.parse import typed
from clipscale.config.tools import PlanConfig, target_gpu
from clipscale.plan.dry_run import PHASES, TOWERS, dry_run
from clipscale.plan.memory import IMAGE_BYTES, MIB, Chunks, MemoryModel, host_memory, keep_bytes, outside_torch
from clipscale.plan.published import METHODS, Published, method_of
from clipscale.plan.step_time import CAPTION_TOKENS, StepTime, caption_width, earlier
from clipscale.step.chunk_sizes import CPU_CHUNK, batch_norm_chunk, sizes_of_settings

WORKSPACE, HOPPER_WORKSPACE = 2 * 8 * MIB, 2 * 32 * MIB
"""cuBLAS's workspaces, which torch allocates: one for the thread that calls forward and one for autograd's (torch's
documentation, CUBLAS_WORKSPACE_CONFIG: 4096 KiB x 2 + 16 KiB x 8, from Hopper on 4096 KiB x 8)."""
RESERVE = 0.05
"""Share of a GPU's memory that is left free, as for fragmentation."""
AUTO_CHUNK = 512
"""Largest chunk assumed for cache.chunk=auto: larger ones are hardly faster on a GPU."""
LARGEST_BATCH = 2**28
"""The search for the largest batch ends here."""
OFFLOADS = ("none", "host", "encoded", "disk")
"""Where pixels wait, the fastest first."""
Result = dict[str, Any]


def plan(config: PlanConfig) -> Result:
    """The object that `json=true` prints (docs/plan.md). Raises UserError."""
    result = fitted(config) if config.fit else predicted(config)
    if not result["fits"]:
        say("it does not fit; planning it with other settings, one by one", error=True)
        result["remedies"] = remedies(config, result)
    return result | {"conclusion": conclusion(result)}


def predicted(config: PlanConfig, *, search: bool = True) -> Result:
    """The plan of these settings, without remedies. Raises UserError for settings that do not go together.

    `search`: also look for what would fit, and add what `config` asks for beside the plan.
    """
    gpu, ranks = target_gpu(config), config.gpus * config.nodes
    local = config.batch // ranks
    sizes_of_settings(config.cache, local)  # refused before the dry run
    method = method_of(config) if config.published else None
    outside = outside_torch(ranks) if gpu else 0
    workspace = 0 if gpu is None else HOPPER_WORKSPACE if gpu.capability >= 90 else WORKSPACE
    usable = int(gpu.memory_bytes * (1 - RESERVE)) if gpu else None
    free = math.inf if usable is None else usable - workspace - outside
    limits = scaling = compared = None
    say(f"dry run of {config.model.name} on {ranks} x {config.hardware}: usually 5 to 60 seconds", error=True)
    with dry_run(config, ranks, gpu.capability if gpu else None) as run:
        model = MemoryModel(run, caption_width(config, run) / run.context_length)
        chunks = chunk_sizes(config, model, free)
        keep = keep_bytes(config.cache.keep, model.at(local, chunks), free)
        step, counts = model.at(local, chunks, keep), model.counts(local, chunks)
        host = host_memory(config, run, local, chunks[0], step.highest)
        timing = StepTime(config, gpu, run, [kept / count for kept, count in zip(step.kept, counts)])
        estimates = timing.estimates(earlier(config))
        if search and (gpu or config.host_memory):
            limits = what_fits(config, model, chunks, keep, free)
        if search and gpu and config.scaling:
            scaling = timing.scaling(estimates[0]["share"])
        if search and gpu and config.compare:
            compared = methods(config, model, chunks, workspace + outside, gpu.memory_bytes)
    phases = {}
    for name in PHASES:
        before, peak = step.before[name] + workspace, step.phase(name) + workspace
        phases[name] = {"before_bytes": before, "extra_bytes": peak - before, "peak_bytes": peak}
    kept = " and ".join(f"{n} of {count} {name} chunks" for name, n, count in zip(TOWERS, step.kept, counts))
    result = {
        "fits": step.highest <= free and host["node_bytes"] <= (config.host_memory or math.inf),
        "peak_bytes": step.highest + workspace,
        "loss_bytes": phases["loss"]["extra_bytes"],
        "host_bytes": host["node_bytes"],
        "step_s": estimates[0]["step_s"] if estimates else None,
        "step_range_s": [timing.step()["step_s"], max((each["step_s"] for each in estimates), default=None)],
        "model": config.model.name,
        "batch": config.batch,
        "hardware": config.hardware,
        "gpus": config.gpus,
        "nodes": config.nodes,
        "offload": config.offload,
        "local_batch": local,
        "chunk": {name: chunk or local for name, chunk in zip(TOWERS, chunks)},
        "device": {
            "phases": phases,
            "peak_bytes": step.highest + workspace,
            "total_bytes": step.highest + workspace + outside,
            "usable_bytes": usable,
        },
        "host": host | {"memory_bytes": config.host_memory},
        "limits": limits,
        "time": estimates[0] if estimates else None,
        "estimates": estimates,
        "scaling": scaling,
        "compare": compared,
        "notes": [
            f"keeps the graphs of {kept}; with cache.chunk=auto the run finds its own chunks by trial, for speed",
            f"assumed: {format_bytes(outside)} outside of torch's allocator (context, NCCL), {format_bytes(workspace)} "
            f"of cuBLAS workspace, {RESERVE:.0%} of a GPU left free",
            f"assumed: captions of {CAPTION_TOKENS} tokens, {IMAGE_BYTES / 1000:g} kB a picture in the shards, and the "
            "host memory of processes",
            *(
                ["not counted: an evaluation's list of samples, and on a GPU their features"]
                if config.eval.wanted
                else ()
            ),
        ],
    }
    if method and gpu:
        result |= {"published": method} | Published(config).facts(method, config.batch, gpu.memory_bytes)
    return result


def chunk_sizes(config: PlanConfig, model: MemoryModel, free: float) -> Chunks:
    """Chunk sizes as set, or assumed: the largest up to AUTO_CHUNK that fits."""
    state, local = model.run.state, config.batch // model.run.ranks
    settings, sizes = sizes_of_settings(config.cache, local), []
    for name, tower in (("image", state.model.image), ("text", state.model.text)):
        whole = batch_norm_chunk(tower, name, settings[name], local) or (state.stored and name == "image")
        sizes.append(None if whole else settings[name] or 0)
    if 0 in sizes:
        most = min(CPU_CHUNK if free == math.inf else AUTO_CHUNK, local)
        assumed = largest(most, 1, most, lambda size: model.at(local, (size, size)).highest <= free) or 1
        sizes = [assumed if size == 0 else size for size in sizes]
    return sizes[0], sizes[1]


# ---- what would fit ----


def what_fits(config: PlanConfig, model: MemoryModel, chunks: Chunks, keep: float, free: float) -> dict[str, int]:
    """`batch`: the largest that fits with these chunks, of this one's halves and doubles. `chunk`: the largest of this
    one and its halves that fits at this batch. 0: none does.
    """
    ranks = model.run.ranks
    local = config.batch // ranks

    def batch_fits(batch: int) -> bool:
        step = model.at(batch, chunks, keep).highest
        host = host_memory(config, model.run, batch, chunks[0], step)["node_bytes"]
        return step <= free and host <= (config.host_memory or math.inf)

    def chunk_fits(chunk: int) -> bool:
        return model.at(local, (chunk, chunk)).highest <= free

    batch = ranks * largest(local, max(chunk or 1 for chunk in chunks), LARGEST_BATCH // ranks, batch_fits)
    most = 0 if None in chunks or model.loss(local) > free else max(chunk or 0 for chunk in chunks)
    return {"batch": batch, "chunk": largest(most, 1, most, chunk_fits)}


def largest(size: int, least: int, most: int, fits: Callable[[int], bool]) -> int:
    """The largest that fits of a size, its halves down to `least`, and its doubles up to `most`; 0: none."""
    while size >= least and not fits(size):
        size //= 2
    while least <= size <= most // 2 and fits(2 * size):
        size *= 2
    return size if size >= least else 0


def changed(config: PlanConfig, words: list[str]) -> PlanConfig:
    """The settings with others: `SECTION.NAME=VALUE`. Raises UserError."""
    values = asdict(config)
    for key, _, value in (word.partition("=") for word in words):
        *sections, name = key.split(".")
        section: dict[str, Any] = reduce(getitem, sections, values)
        section[name] = yaml.safe_load(value)
    return typed(PlanConfig, values)


def fitted(config: PlanConfig) -> Result:
    """The plan of the largest batch, with the fastest place of its pixels, and the fastest chunks and kept graphs."""
    best, most = config, 0
    for offload in OFFLOADS:
        trial = changed(config, [f"offload={offload}", "cache.chunk=auto"])
        limits = predicted(trial)["limits"]
        if limits and limits["batch"] > most:
            best, most = replace(trial, batch=limits["batch"]), limits["batch"]
        elif most:  # a slower place that is no larger
            break
    plans = [predicted(changed(best, [f"cache.keep={keep}"]) if keep else best) for keep in ("", "auto")]
    result = min((each for each in plans if each["fits"]), key=lambda each: each["step_range_s"][0], default=plans[0])
    words = [f"{name}={result[name]}" for name in ("batch", "offload")]
    words += [f"cache.{name}_chunk={size}" for name, size in result["chunk"].items()]
    return result | {"fit": words + (["cache.keep=auto"] if result is plans[1] else [])}


def remedies(config: PlanConfig, result: Result) -> list[Result]:
    """Settings with which a run fits, the one that helps most first, found by planning the run with each of a short
    list. If none of them suffices, all those that help, if they suffice together. Last, the largest batch.
    """
    gpu_share, host_share = shares(result)
    exchange = "none" if config.loss.exchange == "none" else "auto"
    limits = result["limits"] or {"batch": 0, "chunk": 0}
    for_gpu = [
        ["loss.backend=auto", f"loss.exchange={exchange}"],
        [f"cache.chunk={limits['chunk']}"],
        ["cache.keep=none"],
        ["model.grad_checkpointing=true"],
        ["launch.parallel=fsdp"],
        ["offload=host"],
    ]
    for_host = [["data.buffers=1"], ["offload=encoded"], ["offload=disk"]]

    def tried(words: list[str]) -> tuple[float, list[str]]:
        """The larger share of the memory that the run takes with other settings; infinite where they are refused."""
        try:
            return max(shares(predicted(changed(config, words), search=False))), words
        except UserError:
            return math.inf, words

    trials = sorted(map(tried, (for_gpu if gpu_share > 1 else []) + (for_host if host_share > 1 else [])))
    if trials[0][0] > 1:
        helpful = [words for share, words in trials if share < max(gpu_share, host_share)]
        trials = [tried([word for words in helpful[::-1] for word in words])]
    if limits["batch"]:
        trials.append(tried([f"batch={limits['batch']}"]))
    return [{"settings": words, "share": share} for share, words in trials if share <= 1]


def shares(result: Result) -> tuple[float, float]:
    """The shares of the GPU's and of the host's memory that a run takes. It fits up to 1."""
    device, host = result["device"], result["host"]
    gpu = device["total_bytes"] / device["usable_bytes"] if device["usable_bytes"] else 0
    return gpu, host["node_bytes"] / (host["memory_bytes"] or math.inf)


def conclusion(result: Result) -> str:
    """Whether it fits, and if not, what to change: one line."""
    device, host, limits = result["device"], result["host"], result["limits"]
    total, usable, most = device["total_bytes"], device["usable_bytes"], host["memory_bytes"]
    node = (
        f"{format_bytes(host['node_bytes'])}{f' of {format_bytes(most)}' if most else ''} of host memory on each node"
    )
    sizes = f"{format_bytes(total)} of {format_bytes(usable)} usable on each GPU" if usable else "no GPU"
    sizes = f"{sizes}, {node}"
    if not limits:
        return f"{format_bytes(total)} in each process, {node}" if not usable else f"fits: {sizes}"
    if result["fits"] and "fit" in result:
        return f"the largest and fastest that fits: {' '.join(result['fit'])} ({sizes})"
    largest_batch = f"batch={limits['batch']} is the largest that does"
    if result["fits"] and not most:
        unchecked = "which are needed and not checked: give what a node has, as in host_memory=128G"
        return f"fits the GPUs: {sizes}; {largest_batch}; {node}, {unchecked}"
    if result["fits"]:
        return f"fits: {sizes}; {largest_batch}"
    advice = [" ".join(remedy["settings"]) for remedy in result["remedies"]]
    return f"does not fit: {sizes}; try {', or '.join(advice) or 'larger GPUs, more nodes or a smaller model'}"


# ---- methods side by side ----


def methods(config: PlanConfig, model: MemoryModel, chunks: Chunks, fixed: int, memory: int) -> list[Result]:
    """Memory of the methods `compare` at batches around the run's, as published and with this program's code."""
    published, ranks = Published(config), model.run.ranks
    least = ranks * max(chunk or 1 for chunk in chunks)
    batches = [batch for batch in (2**i for i in range(11, 23)) if batch % ranks == 0 and batch >= least]
    rows = []
    for name in config.compare.split(","):
        options = {"objective": "softmax"} | METHODS[name].loss | ({"exchange": "none"} if ranks == 1 else {})
        model.run.state.config = replace(config, loss=replace(config.loss, **options))
        loss = MemoryModel(model.run)  # of this method; all else is as in `model`
        for batch in batches:
            step = model.at(batch // ranks, chunks)
            others = [size for stage, size in step.peak.items() if stage != "loss"]
            loss_bytes = loss.loss(batch // ranks)
            peak = max(*others, step.before["loss"] + loss_bytes) + fixed
            ours = {"loss_bytes": loss_bytes, "peak_bytes": peak, "fits": peak <= memory * (1 - RESERVE)}
            rows.append({"method": name, "batch": batch} | published.facts(name, batch, memory) | ours)
    model.run.state.config = config
    return rows
