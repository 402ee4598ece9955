"""Plans a run on any machine: chunk sizes, memory, time, what would fit, and the published methods beside it."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import yaml

from clipscale.common.errors import UserError
from clipscale.common.hardware import Hardware
from clipscale.common.terminal import say
from clipscale.common.units import format_bytes
from clipscale.config import stages
from clipscale.config.tools import PlanConfig, target_gpu
from clipscale.plan import ASSUMED
from clipscale.plan.dry_run import PHASES, TOWERS, dry_run
from clipscale.plan.memory import Chunks, MemoryModel, host_memory, keep_bytes
from clipscale.plan.published import Published, method_of, outside_torch
from clipscale.plan.step_time import StepTime, caption_width
from clipscale.step.chunk_sizes import CPU_CHUNK, batch_norm_chunk, sizes_of_settings

OFFLOADS = ("none", "host", "encoded", "disk")
"""Where pixels wait, the fastest first."""
NOTES = (
    "keeps the graphs of {kept}; with cache.chunk=auto the run finds its own chunks by trial, for speed",
    "assumed: {outside} outside of torch's allocator (context, NCCL), {workspace} of cuBLAS workspace, {reserve:.0%} of a "
    "GPU left free",
    "assumed: captions of {caption_tokens} tokens, {picture:,} bytes a picture in the shards, the host memory of processes",
    "not counted: an evaluation's list of samples; on a GPU its features",
)
Result = dict[str, Any]


def plan(config: PlanConfig, *, search: bool = True) -> Result:
    """The object that `json=true` prints (docs/plan.md). Raises UserError."""
    result = fitted(config) if config.fit else predicted(config, search=search)
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
    sizes_of_settings(config.cache, local, config.data.captions_per_step)  # refused before the dry run
    method = method_of(config) if config.published else ""
    workspace = 0 if gpu is None else ASSUMED.workspace_hopper if gpu.capability >= 90 else ASSUMED.workspace
    usable = int(gpu.memory_bytes * (1 - ASSUMED.reserve)) if gpu else None
    outside = outside_torch(ranks) if gpu else 0
    free = math.inf if usable is None else usable - workspace - outside
    say(f"dry run of {config.model.name} on {ranks} x {config.hardware}: usually 5 to 60 seconds", error=True)
    published = Published(config) if gpu and search and (method or config.compare) else None
    extra: Result = {"limits": None, "scaling": None, "compare": None}
    with dry_run(config, ranks, gpu.capability if gpu else None) as run:
        model = MemoryModel(run, caption_width(config, run) / run.context_length)
        chunks = chunk_sizes(config, model, free)
        keep = float(run.state.keep.bytes)  # on a CPU
        keep = keep_bytes(config.cache.keep, model.at(local, chunks), free) if gpu else keep
        step, counts = model.at(local, chunks, keep), model.counts(local, chunks)
        host = host_memory(config, run, local, chunks[0], step.highest)
        time = StepTime(config, gpu, run, [kept / count for kept, count in zip(step.kept, counts)])
        estimates = time.estimates()
        if search and (gpu or config.host_memory):
            extra["limits"] = what_fits(config, model, chunks, keep, free)
        if search and gpu and config.scaling:
            extra["scaling"] = time.scaling(estimates[0]["share"])
        if published and gpu and config.compare:
            extra["compare"] = methods(config, model, chunks, published, gpu, workspace + outside)
    if published and gpu and method:
        extra |= {"published": method} | published.facts(method, config.batch, gpu.memory_bytes)
    at = {name: (step.before[name] + workspace, step.phase(name) + workspace) for name in PHASES}
    phases = {k: {"before_bytes": x, "extra_bytes": y - x, "peak_bytes": y} for k, (x, y) in at.items()}
    peak = step.highest + workspace
    facts = vars(ASSUMED) | {"outside": format_bytes(outside), "workspace": format_bytes(workspace)}
    facts["kept"] = " and ".join(f"{n} of {count} {name} chunks" for name, n, count in zip(TOWERS, step.kept, counts))
    return {
        "fits": step.highest <= free and host["node_bytes"] <= (config.host_memory or math.inf),
        "peak_bytes": peak,
        "loss_bytes": phases["loss"]["extra_bytes"],
        "host_bytes": host["node_bytes"],
        "step_s": estimates[0]["step_s"] if estimates else None,
        "step_range_s": [time.step()["step_s"], max((each["step_s"] for each in estimates), default=None)],
        "model": config.model.name,
        **{name: getattr(config, name) for name in ("batch", "hardware", "gpus", "nodes", "offload")},
        "local_batch": local,
        "chunk": dict(zip(TOWERS, model.sizes(local, chunks))),
        "device": {"phases": phases, "peak_bytes": peak, "total_bytes": peak + outside, "usable_bytes": usable},
        "host": host | {"memory_bytes": config.host_memory},
        "time": estimates[0] if estimates else None,
        "estimates": estimates,
        **extra,
        "notes": [note.format(**facts) for note in (NOTES if config.eval.wanted else NOTES[:-1])],
    }


def chunk_sizes(config: PlanConfig, model: MemoryModel, free: float) -> Chunks:
    """Chunk sizes as set, or assumed: the largest up to `auto_chunk` that fits."""
    state, local, sizes = model.run.state, config.batch // model.run.ranks, []
    settings = sizes_of_settings(config.cache, local, model.run.captions)
    for name, tower, rows in zip(TOWERS, (state.model.image, state.model.text), model.sizes(local, (None, None))):
        whole = batch_norm_chunk(tower, name, settings[name], rows) or (state.stored and name == "image")
        sizes.append(None if whole else settings[name] or 0)
    if 0 in sizes:
        most = min(CPU_CHUNK if free == math.inf else ASSUMED.auto_chunk, local)
        assumed = largest(most, 1, most, lambda size: model.at(local, (size, size)).highest <= free) or 1
        sizes = [assumed if size == 0 else size for size in sizes]
    return sizes[0], sizes[1]


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

    batch = largest(local, max(chunk or 1 for chunk in chunks), ASSUMED.largest_batch // ranks, batch_fits)
    most = 0 if None in chunks or model.loss(local) > free else max(chunk or 0 for chunk in chunks)
    chunk = largest(most, 1, most, lambda size: model.at(local, (size, size)).highest <= free)
    return {"batch": ranks * batch, "chunk": chunk}


def largest(size: int, least: int, most: int, fits: Callable[[int], bool]) -> int:
    """The largest that fits of a size, its halves down to `least`, and its doubles up to `most`; 0: none."""
    while size >= least and not fits(size):
        size //= 2
    while least <= size <= most // 2 and fits(2 * size):
        size *= 2
    return size if size >= least else 0


def changed(config: PlanConfig, words: str) -> PlanConfig:
    """The settings with others, `SECTION.NAME=VALUE` and so on."""
    for name, _, value in (word.partition("=") for word in words.split()):
        text = name in ("cache.chunk", "cache.keep")
        config = stages.changed(config, name, value if text else yaml.safe_load(value))
    return config


def fitted(config: PlanConfig) -> Result:
    """The plan of the largest batch, with the fastest place of its pixels, and the fastest chunks and kept graphs."""
    best, most = config, 0
    for offload in OFFLOADS:
        trial = changed(config, f"offload={offload} cache.chunk=auto cache.keep=none")
        batch = (predicted(trial)["limits"] or {"batch": 0})["batch"]
        if batch > most:
            best, most = replace(trial, batch=batch), batch
    keeps = ("none",) if config.hardware == "cpu" else ("none", "auto")
    plans = [predicted(changed(best, f"cache.keep={keep}")) | {"keep": keep} for keep in keeps]
    result = min((each for each in plans if each["fits"]), key=lambda each: each["step_range_s"][0], default=plans[0])
    words = "batch={batch} offload={offload} cache.image_chunk={chunk[image]} cache.text_chunk={chunk[text]}"
    return result | {"fit": f"{words} cache.keep={{keep}}".format(**result)}


def remedies(config: PlanConfig, result: Result) -> list[Result]:
    """Settings with which a run fits, the one that helps most first, found by planning the run with each of a short
    list. If none of them suffices, all those that help, if they suffice together. Last, the largest batch.
    """
    limits, share = result["limits"] or {"batch": 0, "chunk": 0}, shares(result)

    def tried(words: str) -> tuple[float, str]:
        """The larger share of the memory that the run takes with other settings; infinite where they are refused."""
        try:
            return max(shares(predicted(changed(config, words), search=False)).values()), words
        except UserError:
            return math.inf, words

    lists = [words.format(**limits) for part in share if share[part] > 1 for words in ASSUMED.remedies[part]]
    one = config.loss.exchange == "none"  # there is no other rank
    trials = sorted(tried(words.replace("exchange=auto", "exchange=none") if one else words) for words in lists)
    if trials[0][0] > 1:
        trials = [tried(" ".join(words for less, words in trials[::-1] if less < max(share.values())))]
    if limits["batch"]:
        trials.append(tried(f"batch={limits['batch']}"))
    return [{"settings": words, "share": less} for less, words in trials if less <= 1]


def shares(result: Result) -> dict[str, float]:
    """The shares of the GPU's and of the host's memory that a run takes. It fits up to 1."""
    device, host = result["device"], result["host"]
    gpu = device["total_bytes"] / (device["usable_bytes"] or math.inf)
    return {"gpu": gpu, "host": host["node_bytes"] / (host["memory_bytes"] or math.inf)}


def conclusion(result: Result) -> str:
    """Whether it fits, and if not, what to change: one line."""
    device, limits, most = result["device"], result["limits"], result["host"]["memory_bytes"]
    total, node = format_bytes(device["total_bytes"]), format_bytes(result["host_bytes"])
    usable = device["usable_bytes"]
    sizes = f"{total} of {format_bytes(usable)} usable on each GPU" if usable else f"{total} in each process"
    node += (f" of {format_bytes(most)}" if most else "") + " of host memory on each node"
    if not result["fits"]:
        advice = ", or ".join(remedy["settings"] for remedy in result["remedies"])
        return f"does not fit: {sizes}, {node}; try {advice or 'larger GPUs, more nodes or a smaller model'}"
    if "fit" in result:
        return f"the largest and fastest that fits: {result['fit']}; {sizes}, {node}"
    next_batch = f"; batch={limits['batch']} is the largest that does" if limits else ""
    unchecked = "which are needed and not checked: give what a node has, as in host_memory=128G"
    return f"fits: {sizes}, {node}{next_batch}" if most else f"fits the GPUs: {sizes}{next_batch}; {node}, {unchecked}"


def methods(config: PlanConfig, model: MemoryModel, chunks: Chunks, known: Published, gpu: Hardware, fixed: int) -> Any:
    """Memory of the methods `compare` at many batches, as published and with this program's code, in records."""
    run, rows = model.run, []
    least = run.ranks * max(chunk or 1 for chunk in chunks)
    for name in config.compare.split(","):
        exchange = "none" if run.ranks == 1 else ASSUMED.published[name]["exchange"]
        loss = {"objective": "softmax", "exchange": exchange, "backend": ASSUMED.published[name]["backend"]}
        run.state.config = replace(config, loss=replace(config.loss, **loss))
        loss_bytes = MemoryModel(run).loss  # of this method; all else is as in `model`
        for batch in (2**i for i in range(11, 23) if 2**i >= least and 2**i % run.ranks == 0):
            step, taken = model.at(batch // run.ranks, chunks), loss_bytes(batch // run.ranks)
            others = max(step.phase(phase) for phase in PHASES if phase != "loss")
            peak = max(step.before["loss"] + taken, others) + fixed
            fits = peak <= gpu.memory_bytes * (1 - ASSUMED.reserve)
            ours = {"loss_bytes": taken, "peak_bytes": peak, "fits": fits}
            rows.append({"method": name, "batch": batch} | known.facts(name, batch, gpu.memory_bytes) | ours)
    run.state.config = config
    return rows
