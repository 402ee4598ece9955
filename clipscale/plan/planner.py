"""Plans a run on any machine (chunk sizes, memory, time, what would fit), or compares a run with its plan."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from clipscale import checkpoint
from clipscale.common.errors import UserError
from clipscale.common.hardware import hardware_of
from clipscale.common.terminal import say
from clipscale.common.units import format_bytes
from clipscale.config.parse import typed
from clipscale.config.secrets import restored
from clipscale.config.tools import PlanConfig, existing_run, target_gpu
from clipscale.config.train import TrainConfig
from clipscale.plan.dry_run import PHASES, TOWERS, dry_run
from clipscale.plan.memory import IMAGE_BYTES, MIB, Chunks, MemoryModel, host_memory, keep_bytes
from clipscale.plan.step_time import CAPTION_TOKENS, caption_width, step_time
from clipscale.report.metrics import read_metrics
from clipscale.step.chunk_sizes import CPU_CHUNK, batch_norm_chunk, sizes_of_settings

CONTEXT = NCCL = 600 * MIB
"""Assumed: memory that the driver, torch's kernels and cuBLAS take on a GPU outside of torch's allocator; and NCCL's
buffers, with several GPUs."""
WORKSPACE, HOPPER_WORKSPACE = 2 * 8 * MIB, 2 * 32 * MIB
"""cuBLAS's workspaces, which torch allocates: one for the thread that calls forward and one for autograd's (torch's
documentation, CUBLAS_WORKSPACE_CONFIG: 4096 KiB x 2 + 16 KiB x 8, from Hopper on 4096 KiB x 8)."""
RESERVE = 0.05
"""Share of a GPU's memory that is left free, as for fragmentation."""
AUTO_CHUNK = 512
"""Largest chunk assumed for cache.chunk=auto: larger ones are hardly faster on a GPU."""
LARGEST_BATCH = 2**28
"""The search for the largest batch ends here."""
FIRST = 2
"""Steps are compared from here on, if there are several: the first creates the optimizer's state and DDP's buckets."""
Result = dict[str, Any]


def plan(config: PlanConfig) -> Result:
    """The object that `json=true` prints (docs/plan.md). Raises UserError."""
    result = predicted(config)
    if result["limits"] and not result["fits"]:
        say("it does not fit; planning it with other settings, one by one", error=True)
        result["remedies"] = remedies(config, result)
    return result | {"conclusion": conclusion(result)}


def predicted(config: PlanConfig, *, search: bool = True) -> Result:
    """The plan of these settings, without remedies. Raises UserError for settings that do not go together.

    `search`: also look for what would fit.
    """
    gpu, ranks = target_gpu(config), config.gpus * config.nodes
    local = config.batch // ranks
    sizes_of_settings(config.cache, local)  # refused before the dry run
    outside = (CONTEXT + (NCCL if ranks > 1 else 0)) if gpu else 0
    workspace = 0 if gpu is None else HOPPER_WORKSPACE if gpu.capability >= 90 else WORKSPACE
    usable = int(gpu.memory_bytes * (1 - RESERVE)) if gpu else None
    free = math.inf if usable is None else usable - workspace - outside
    limits = time = None
    say(f"dry run of {config.model.name} on {ranks} x {config.hardware}: usually 10 to 60 seconds", error=True)
    with dry_run(config, ranks, gpu.capability if gpu else None) as run:
        model = MemoryModel(run, caption_width(config, run) / run.context_length)
        chunks = chunk_sizes(config, model, free)
        keep = keep_bytes(config.cache.keep, model.at(local, chunks), free)
        step, counts = model.at(local, chunks, keep), model.counts(local, chunks)
        host = host_memory(config, run, local, chunks[0])
        if gpu:
            time = step_time(config, gpu, run, [kept / count for kept, count in zip(step.kept, counts)])
            limits = what_fits(config, model, chunks, keep, free) if search else None
    phases = {}
    for name in PHASES:
        before, peak = step.before[name] + workspace, step.phase(name) + workspace
        phases[name] = {"before_bytes": before, "extra_bytes": peak - before, "peak_bytes": peak}
    kept = " and ".join(f"{n} of {count} {name} chunks" for name, n, count in zip(TOWERS, step.kept, counts))
    return {
        "fits": step.highest <= free and host["node_bytes"] <= (config.host_memory or math.inf),
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
        "time": time,
        "notes": [
            f"keeps the graphs of {kept}; with cache.chunk=auto the run finds its own chunks by trial, for speed",
            f"assumed: {format_bytes(outside)} outside of torch's allocator (context, NCCL), {format_bytes(workspace)} "
            f"of cuBLAS workspace, {RESERVE:.0%} of a GPU left free",
            f"assumed: captions of {CAPTION_TOKENS} tokens, {IMAGE_BYTES / 1000:g} kB a picture in the shards, and the "
            "host memory of processes",
            *(["not counted: an evaluation's list of samples, and their features"] if config.eval.wanted else ()),
        ],
    }


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
        host = host_memory(config, model.run, batch, chunks[0])["node_bytes"]
        return model.at(batch, chunks, keep).highest <= free and host <= (config.host_memory or math.inf)

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


def remedies(config: PlanConfig, result: Result) -> list[Result]:
    """Settings with which a run fits, the one that helps most first, found by planning the run with each of a short
    list. If none of them suffices, all those that help, if they suffice together.
    """
    gpu_share, host_share = shares(result)
    exchange = "none" if config.loss.exchange == "none" else "auto"
    for_gpu = [
        ["loss.backend=auto", f"loss.exchange={exchange}"],
        [f"cache.chunk={result['limits']['chunk']}"],
        ["cache.keep=none"],
        ["model.grad_checkpointing=true"],
        ["launch.parallel=fsdp"],
        ["offload=host"],
    ]
    for_host = [["data.buffers=1"], ["offload=encoded"], ["offload=disk"]]

    def tried(words: list[str]) -> tuple[float, list[str]]:
        """The larger share of the memory that the run takes with other settings; infinite where they are refused."""
        values = asdict(config)
        for key, _, value in (word.partition("=") for word in words):
            *sections, name = key.split(".")
            section: dict[str, Any] = reduce(getitem, sections, values)
            section[name] = yaml.safe_load(value)
        try:
            return max(shares(predicted(typed(PlanConfig, values), search=False))), words
        except UserError:
            return math.inf, words

    trials = sorted(map(tried, (for_gpu if gpu_share > 1 else []) + (for_host if host_share > 1 else [])))
    if trials[0][0] > 1:
        helpful = [words for share, words in trials if share < max(gpu_share, host_share)]
        trials = [tried([word for words in helpful[::-1] for word in words])]
    return [{"settings": words, "share": share} for share, words in trials if share <= 1]


def shares(result: Result) -> tuple[float, float]:
    """The shares of the GPU's and of the host's memory that a run takes. It fits up to 1."""
    device, host = result["device"], result["host"]
    return device["total_bytes"] / device["usable_bytes"], host["node_bytes"] / (host["memory_bytes"] or math.inf)


def conclusion(result: Result) -> str:
    """Whether it fits, and if not, what to change: one line."""
    device, host, limits = result["device"], result["host"], result["limits"]
    total, usable, most = device["total_bytes"], device["usable_bytes"], host["memory_bytes"]
    node = (
        f"{format_bytes(host['node_bytes'])}{f' of {format_bytes(most)}' if most else ''} of host memory on each node"
    )
    if not limits:
        return f"{format_bytes(total)} in each process, {node}"
    sizes = f"{format_bytes(total)} of {format_bytes(usable)} usable on each GPU"
    largest_batch = f"batch={limits['batch']} is the largest that does"
    if result["fits"] and not most:
        unchecked = "which are needed and not checked: give what a node has, as in host_memory=128G"
        return f"fits the GPUs: {sizes}; {largest_batch}; {node}, {unchecked}"
    if result["fits"]:
        return f"fits: {sizes}, {node}; {largest_batch}"
    advice = [" ".join(remedy["settings"]) for remedy in result["remedies"]]
    advice += [f"batch={limits['batch']}"] if limits["batch"] else []
    return f"does not fit: {sizes}, {node}; try {', or '.join(advice) or 'larger GPUs, more nodes or a smaller model'}"


# ---- against a run ----


def compare(config: PlanConfig) -> Result:
    """The object that `run=NAME json=true` prints (docs/plan.md). Raises UserError."""
    folder = existing_run(config.run)
    run_config = settings_of(config, folder)
    records = read_metrics(folder / "metrics.jsonl")
    records = [record for record in records if record["step"] >= FIRST] or records
    if not records:
        raise UserError(f"run={config.run}: metrics.jsonl holds no step yet")
    result = predicted(run_config, search=False)
    phases, process = result["device"]["phases"], result["host"]["process_bytes"]
    sizes = {name: (f"mem_{name}_bytes", phase["extra_bytes"]) for name, phase in phases.items()}
    sizes["peak"] = ("mem_peak_bytes", result["device"]["peak_bytes"])
    # On a CPU the run asks for the resident memory right after the optimizer's step, whose memory malloc still holds.
    resident = phases["optim"]["peak_bytes"] if run_config.hardware == "cpu" else 0
    sizes["host"] = ("host_rss_bytes", process["process"] + process["batch"] + resident)
    compared: Result = {}
    for name, (key, size) in sizes.items():
        values = [record[key] for record in records if record.get(key) is not None]
        measured = round(median(values)) if values else None
        ratio = size / measured if measured else None
        compared[name] = {"predicted_bytes": size, "measured_bytes": measured, "ratio": ratio}
    errors = [abs(entry["ratio"] - 1) for name, entry in compared.items() if name != "host" and entry["ratio"]]
    machine = {name: getattr(run_config, name) for name in ("hardware", "gpus", "nodes")}
    plan = {name: result[name] for name in ("chunk", "notes")}
    steps = {"steps": len(records), "compared": compared, "largest_error": max(errors, default=None)}
    return {"run": str(folder)} | machine | plan | steps


def settings_of(config: PlanConfig, folder: Path) -> PlanConfig:
    """The run's settings, with its newest checkpoint's chunk sizes, on its machine unless `config` names another."""
    trained = typed(TrainConfig, restored(yaml.safe_load((folder / "config.yaml").read_text())))
    env = json.loads((folder / "env.json").read_text())
    processes, gpus = env["processes"], env["gpus"] if trained.device != "cpu" else []
    device = config.hardware or (hardware_of(gpus[0]) if gpus else "cpu")
    if not device:
        raise UserError(f"run={config.run}: {gpus[0]} is not in the table of GPUs; give the nearest with hardware=NAME")
    if saved := checkpoint.checkpoints_of(folder):
        chunks = checkpoint.read_values(saved[-1])["chunks"]
        trained.cache = replace(trained.cache, image_chunk=chunks["image"], text_chunk=chunks["text"])
    per_node = min(processes, len(gpus)) if gpus else processes
    settings = replace(config, **{field.name: getattr(trained, field.name) for field in fields(TrainConfig)})
    return replace(settings, run="", hardware=device, gpus=per_node, nodes=processes // per_node)
