"""Plans a run on a machine that need not be here (chunk sizes, memory, time, and what would fit), or compares the plan
of a run with what the run has measured.
"""

import json
import math
from collections.abc import Callable
from dataclasses import fields, replace
from functools import reduce
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from clipscale import checkpoint
from clipscale.common.errors import UserError
from clipscale.common.hardware import hardware_of
from clipscale.common.terminal import say
from clipscale.common.units import format_bytes
from clipscale.config.checks import begun_run
from clipscale.config.parse import typed
from clipscale.config.secrets import restored
from clipscale.config.tools import PlanConfig, target_gpu
from clipscale.config.train import TrainConfig
from clipscale.plan.dry_run import PHASES, TOWERS, dry_run
from clipscale.plan.memory import IMAGE_BYTES, MIB, Chunks, MemoryModel, host_memory, keep_bytes
from clipscale.plan.step_time import CAPTION_TOKENS, caption_width, step_time
from clipscale.report.metrics import read_metrics
from clipscale.step.chunk_sizes import CPU_CHUNK, SMALLEST, batch_norm_chunk, sizes_of_settings

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
"""Steps are compared from here on: the first creates the optimizer's state and DDP's buckets."""
Result = dict[str, Any]


def plan(config: PlanConfig) -> Result:
    """The object that `json=true` prints (docs/plan.md). Prints lines for a user who waits. Raises UserError."""
    announce(config)
    result = predicted(config)
    if result["limits"] and not result["fits"]:
        say("it does not fit; planning it with other settings", error=True)
        result["remedies"] = remedies(config, result)
    return result | {"conclusion": conclusion(result)}


def announce(config: PlanConfig) -> None:
    """The line for a user who waits."""
    where = f"{config.gpus * config.nodes} x {config.hardware}"
    say(f"dry run of {config.model.name} on {where}, without memory or data: usually 10 to 60 seconds", error=True)


def predicted(config: PlanConfig, tried: dict[str, Any] | None = None, *, search: bool = True) -> Result:
    """The plan of these settings, without remedies. Raises UserError for settings that do not go together.

    `tried`: chunk sizes by tower that the run has chosen itself. `search`: also look for what would fit.
    """
    gpu, ranks = target_gpu(config), config.gpus * config.nodes
    local = config.batch // ranks
    outside = (CONTEXT + (NCCL if ranks > 1 else 0)) if gpu else 0
    workspace = 0 if gpu is None else HOPPER_WORKSPACE if gpu.capability >= 90 else WORKSPACE
    usable = int(gpu.memory_bytes * (1 - RESERVE)) if gpu else None
    free = math.inf if usable is None else usable - workspace - outside
    limits = time = None
    with dry_run(config, ranks, gpu.capability if gpu else None) as run:
        tokens = caption_width(config, run)
        model = MemoryModel(run, tokens / run.context_length)
        chunks = chunk_sizes(config, model, tried or {}, free)
        keep = keep_bytes(config.cache.keep, model.at(local, chunks), free)
        step, counts = model.at(local, chunks, keep), model.counts(local, chunks)
        host = host_memory(config, run, local, chunks[0])
        if gpu:
            time = step_time(config, gpu, run, [kept / count for kept, count in zip(step.kept, counts)])
            limits = what_fits(config, model, chunks, keep, free) if search else None
    host_fits = host["node_bytes"] <= config.host_memory if config.host_memory else None
    phases = {}
    for name in PHASES:
        before, peak = step.before[name] + workspace, step.phase(name) + workspace
        phases[name] = {"before_bytes": before, "extra_bytes": peak - before, "peak_bytes": peak}
    kept = ", ".join(f"{n} of {count} {name} chunks" for name, n, count in zip(TOWERS, step.kept, counts))
    notes = {
        "cache.chunk=auto: chunks are assumed; the run finds its own by trial, for speed": config.cache.chunk == "auto"
        and not tried,
        "model.compile=true: predicted as if not compiled": config.model.compile,
        f"assumed: captions of {CAPTION_TOKENS} tokens on average, sorted and cut to their length": gpu
        and tokens < run.context_length,
        f"graphs that are kept between the passes: {kept}": any(step.kept),
        f"assumed: {format_bytes(outside)} outside of torch's allocator (context, NCCL), "
        f"{format_bytes(workspace)} of cuBLAS workspace, {RESERVE:.0%} left free": gpu,
        f"assumed: {IMAGE_BYTES / 1000:g} kB a picture in the shards, and the host memory of processes": True,
    }
    return {
        "fits": step.highest <= free and host_fits is not False,
        "settings": {
            "model": config.model.name,
            **{name: getattr(config, name) for name in ("batch", "hardware", "gpus", "nodes", "offload")},
            "local_batch": local,
            "chunk": {name: chunk or local for name, chunk in zip(TOWERS, chunks)},
            "precision": config.precision.name,
            "optim": config.optim.name,
            "parallel": config.launch.parallel,
        },
        "device": {
            "fixed_bytes": run.fixed,
            "phases": phases,
            "workspace_bytes": workspace,
            "outside_bytes": outside,
            "peak_bytes": step.highest + workspace,
            "total_bytes": step.highest + workspace + outside,
            "usable_bytes": usable,
        },
        "host": host | {"memory_bytes": config.host_memory, "fits": host_fits},
        "limits": limits,
        "time": time,
        "notes": [note for note, applies in notes.items() if applies],
    }


def chunk_sizes(config: PlanConfig, model: MemoryModel, tried: dict[str, Any], free: float) -> Chunks:
    """Chunk sizes as set, as tried, or assumed: the largest up to AUTO_CHUNK that fits."""
    state, local = model.run.state, config.batch // model.run.ranks
    set_sizes = sizes_of_settings(config.cache, local)
    sizes: list[int | None] = []
    for name, tower in zip(TOWERS, (state.model.image, state.model.text)):
        whole = batch_norm_chunk(tower, name, set_sizes[name], local) or (state.stored and name == "image")
        sizes.append(None if whole else set_sizes[name] or tried.get(name) or 0)
    if 0 in sizes:
        most = min(CPU_CHUNK if free == math.inf else AUTO_CHUNK, local)
        chunk = largest(most, SMALLEST, most, lambda size: model.at(local, (size, size)).highest <= free)
        sizes = [size if size != 0 else chunk or min(SMALLEST, local) for size in sizes]
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
    return {"batch": batch, "chunk": largest(most, SMALLEST, most, chunk_fits)}


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
    for_gpu: list[Result] = [
        {"loss.backend": "auto", "loss.exchange": exchange},
        {"cache.chunk": str(result["limits"]["chunk"])},
        {"cache.keep": "none"},
        {"model.grad_checkpointing": True},
        {"launch.parallel": "fsdp"},
        {"offload": "host"},
    ]
    for_host: list[Result] = [{"data.buffers": 1}, {"offload": "encoded"}, {"offload": "disk"}]

    def tried(settings: Result) -> tuple[float, Result]:
        """The larger share of the memory that the run takes with other settings; infinite where they are refused."""
        try:
            planned = predicted(reduce(with_setting, settings.items(), config), search=False)
        except UserError:
            return math.inf, settings
        return max(shares(planned)), settings

    settings = (for_gpu if gpu_share > 1 else []) + (for_host if host_share > 1 else [])
    trials = sorted(map(tried, settings), key=lambda trial: trial[0])
    if trials[0][0] > 1:
        helpful = [settings for share, settings in trials if share < max(gpu_share, host_share)]
        trials = [tried({name: value for settings in helpful[::-1] for name, value in settings.items()})]
    return [
        {"settings": [f"{name}={str(value).lower()}" for name, value in settings.items()], "share": share}
        for share, settings in trials
        if share <= 1
    ]


def with_setting(config: Any, setting: tuple[str, Any]) -> Any:
    """The settings with another value of a dotted name."""
    (section, _, rest), value = setting[0].partition("."), setting[1]
    return replace(config, **{section: with_setting(getattr(config, section), (rest, value)) if rest else value})


def shares(result: Result) -> tuple[float, float]:
    """The shares of the GPU's and of the host's memory that a run takes. It fits up to 1."""
    device, host = result["device"], result["host"]
    return device["total_bytes"] / device["usable_bytes"], host["node_bytes"] / (host["memory_bytes"] or math.inf)


def conclusion(result: Result) -> str:
    """Whether it fits, and if not, what to change: one line."""
    device, host = result["device"], result["host"]
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
    if result["limits"]["batch"]:
        advice.append(f"batch={result['limits']['batch']}")
    advice = advice or ["larger GPUs, more nodes or a smaller model: no setting helps"]
    return f"does not fit: {sizes}; try {', or '.join(advice)}"


# ---- against a run ----


def compare(config: PlanConfig) -> Result:
    """The object that `run=NAME json=true` prints (docs/plan.md). Raises UserError."""
    folder = begun_run(config.run)
    run_config = settings_of(config, folder)
    records = [record for record in read_metrics(folder / "metrics.jsonl") if record["step"] >= FIRST]
    if not records:
        raise UserError(f"run={config.run}: metrics.jsonl holds no second step yet")
    announce(run_config)
    saved = checkpoint.found(folder)
    result = predicted(run_config, checkpoint.read_values(saved[-1])["chunks"] if saved else None, search=False)
    phases, process = result["device"]["phases"], result["host"]["process_bytes"]
    # On a CPU the run asks for the resident memory right after the optimizer's step, whose memory malloc still holds.
    resident = phases["optim"]["peak_bytes"] if run_config.hardware == "cpu" else 0
    sizes = {f"mem_{name}_bytes": phase["extra_bytes"] for name, phase in phases.items()}
    sizes["mem_peak_bytes"] = result["device"]["peak_bytes"]
    sizes["host_rss_bytes"] = process["process"] + process["batch"] + resident
    compared: Result = {}
    for key, size in sizes.items():
        values = [record[key] for record in records if record.get(key) is not None]
        measured = round(median(values)) if values else None
        name = key.removeprefix("mem_").partition("_")[0]
        compared[name] = {
            "predicted_bytes": int(size),
            "measured_bytes": measured,
            "ratio": size / measured if measured else None,
        }
    ratios = [entry["ratio"] for name, entry in compared.items() if name != "host" and entry["ratio"]]
    return {
        "run": str(folder),
        "settings": result["settings"],
        "steps": len(records),
        "compared": compared,
        "largest_error": max(abs(ratio - 1) for ratio in ratios) if ratios else None,
        "notes": result["notes"],
    }


def settings_of(config: PlanConfig, folder: Path) -> PlanConfig:
    """The run's settings, on the machine it ran on unless `config` names another."""
    trained = typed(TrainConfig, restored(yaml.safe_load((folder / "config.yaml").read_text())))
    env = json.loads((folder / "env.json").read_text())
    processes, gpus = env["processes"], env["gpus"] if trained.device != "cpu" else []
    device = config.hardware or (hardware_of(gpus[0]) if gpus else "cpu")
    if not device:
        raise UserError(f"run={config.run}: {gpus[0]} is not in the table of GPUs; give the nearest with hardware=NAME")
    per_node = min(processes, len(gpus)) if gpus else processes
    settings = replace(config, **{field.name: getattr(trained, field.name) for field in fields(TrainConfig)})
    return replace(settings, run="", hardware=device, gpus=per_node, nodes=processes // per_node)
