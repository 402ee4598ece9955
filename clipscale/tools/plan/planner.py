"""Plans a run on any machine: chunk sizes, memory, time, what would fit, and the published methods beside it."""

import math
from collections.abc import Callable
from typing import Any

import yaml

from clipscale.common.errors import UserError
from clipscale.common.terminal import say
from clipscale.common.units import format_bytes
from clipscale.config import stages
from clipscale.config.parse import accepted
from clipscale.config.setting import settings_of
from clipscale.config.tools import PlanConfig, target_gpu
from clipscale.step.chunk_sizes import CPU_CHUNK, batch_norm_chunk, sizes_of_settings
from clipscale.tools.plan import ASSUMED
from clipscale.tools.plan.dry_run import PHASES, TOWERS, dry_run
from clipscale.tools.plan.memory import Chunks, MemoryModel, host_memory, keep_bytes
from clipscale.tools.plan.published import Published, method_of, outside_torch
from clipscale.tools.plan.step_time import StepTime, caption_width

SETTINGS = {setting.name: setting for setting in settings_of(PlanConfig)}
OFFLOADS = ("none", "host", "encoded", "disk")
"""Where pixels wait, the fastest first."""
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

    `search`: also look for the largest batch, and add what `config` asks for beside the plan.
    """
    gpu, ranks = target_gpu(config), config.gpus * config.nodes
    local, captions = config.batch // ranks, config.data.captions_per_step
    sizes_of_settings(config.cache, local, captions)  # refused before the dry run
    method = method_of(config) if config.published else None
    workspace = 0 if gpu is None else ASSUMED.workspace_hopper if gpu.capability >= 90 else ASSUMED.workspace
    outside = outside_torch(ranks) if gpu else 0
    usable = int(gpu.memory_bytes * (1 - ASSUMED.reserve)) if gpu else None
    free = usable - workspace - outside if usable else math.inf
    say(f"dry run of {config.model.name} on {ranks} x {config.hardware}: usually 5 to 60 seconds", error=True)
    published = Published(config) if gpu and search and (method or config.compare) else None
    extra: Result = {}
    with dry_run(config, ranks, gpu.capability if gpu else None) as run:
        model = MemoryModel(run, caption_width(config, run) / run.context_length)
        chunks = chunk_sizes(config, model, free)
        keep = float(run.state.keep.bytes)  # on a CPU
        keep = keep_bytes(config.cache.keep, model.at(local, chunks), free) if gpu else keep
        step, counts = model.at(local, chunks, keep), model.counts(local, chunks)
        host = host_memory(config, run, local, chunks[0], step.highest)
        time = StepTime(config, gpu, run, [kept / count for kept, count in zip(step.kept, counts)])
        estimates = time.estimates()
        least = max(chunk or 1 for chunk in chunks)

        def batch_fits(batch: int) -> bool:
            taken = model.at(batch, chunks, keep).highest
            node = host_memory(config, run, batch, chunks[0], taken)["node_bytes"]
            return taken <= free and node <= (config.host_memory or math.inf)

        if search and (gpu or config.host_memory):
            extra["largest_batch"] = ranks * largest(local, least, ASSUMED.largest_batch // ranks, batch_fits)
        if search and gpu and config.scaling:
            extra["scaling"] = time.scaling(estimates[0]["share"])
        if published and gpu and method:
            facts = published.facts(method, config.batch, gpu.memory_bytes)
            extra |= {"published": method} | {f"published_{key}": value for key, value in facts.items()}
        if published and gpu and config.compare:
            batches = [2**i for i in range(11, 23) if 2**i >= least * ranks and 2**i % ranks == 0]
            names, memory = config.compare.split(","), gpu.memory_bytes
            rows = [(name, n, published.facts(name, n, memory)) for name in names for n in batches]
            for n in batches:
                taken = model.at(n // ranks, chunks, keep).highest
                size, peak = model.loss(n // ranks), taken + workspace + outside
                rows.append(("clipscale", n, {"loss_bytes": size, "peak_bytes": peak, "fits": taken <= free}))
            extra["compare"] = [{"method": name, "batch": n} | facts for name, n, facts in rows]
    at = {name: (step.before[name] + workspace, step.phase(name) + workspace) for name in PHASES}
    peak = step.highest + workspace
    return {
        "fits": step.highest <= free and host["node_bytes"] <= (config.host_memory or math.inf),
        "peak_bytes": peak,
        "loss_bytes": at["loss"][1] - at["loss"][0],
        "host_bytes": host["node_bytes"],
        "step_s": estimates[0]["step_s"] if estimates else None,
        "step_range_s": [time.step()["step_s"], max((each["step_s"] for each in estimates), default=None)],
        "model": config.model.name,
        **{name: getattr(config, name) for name in ("batch", "hardware", "gpus", "nodes", "offload")},
        "local_batch": local,
        "chunk": dict(zip(TOWERS, model.sizes(local, chunks))),
        "kept": dict(zip(TOWERS, step.kept)),
        "device": {
            "phases": {k: {"before_bytes": x, "extra_bytes": y - x, "peak_bytes": y} for k, (x, y) in at.items()},
            "total_bytes": peak + outside,
            "usable_bytes": usable,
        },
        "host": host | {"memory_bytes": config.host_memory},
        "time": estimates[0] if estimates else None,
        "estimates": estimates,
        **extra,
        "notes": ASSUMED.notes,
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
        config = stages.changed(config, name, accepted(SETTINGS[name], yaml.safe_load(value)))
    return config


def fitted(config: PlanConfig) -> Result:
    """The plan of the largest batch, with the fastest place of its pixels, and the fastest chunks and kept graphs."""
    trials = (changed(config, f"offload={offload} cache.chunk=auto cache.keep=none") for offload in OFFLOADS)
    batches = [(predicted(trial).get("largest_batch", 0), trial) for trial in trials]
    batch, best = max(batches, key=lambda each: each[0])
    keeps = ("none",) if config.hardware == "cpu" else ("none", "auto")
    plans = [predicted(changed(best, f"batch={batch or config.batch} cache.keep={k}")) | {"keep": k} for k in keeps]
    result = min((each for each in plans if each["fits"]), key=lambda each: each["step_range_s"][0], default=plans[0])
    words = "batch={batch} offload={offload} cache.chunk=[{chunk[image]},{chunk[text]}]"
    return result | {"fit": f"{words} cache.keep={{keep}}".format(**result)}


def remedies(config: PlanConfig, result: Result) -> list[Result]:
    """Settings with which a run fits, the one that helps most first, found by planning the run with each of a short
    list. If none of them suffices, all those that help, if they suffice together. Last, the largest batch.
    """

    def tried(words: str) -> tuple[float, str]:
        """The larger share of the memory that the run takes with other settings; infinite where they are refused."""
        try:
            return max(shares(predicted(changed(config, words), search=False)).values()), words
        except UserError:
            return math.inf, words

    share, lonely = shares(result), config.loss.exchange == "none"
    lists = [words for part in share if share[part] > 1 for words in ASSUMED.remedies[part]]
    trials = sorted(tried(words.replace("exchange=auto", "exchange=none") if lonely else words) for words in lists)
    if trials[0][0] > 1:
        trials = [tried(" ".join(words for less, words in trials[::-1] if less < max(share.values())))]
    if batch := result.get("largest_batch"):
        trials.append(tried(f"batch={batch}"))
    return [{"settings": words, "share": less} for less, words in trials if less <= 1]


def shares(result: Result) -> dict[str, float]:
    """The shares of the GPU's and of the host's memory that a run takes. It fits up to 1."""
    device, host = result["device"], result["host"]
    gpu = device["total_bytes"] / (device["usable_bytes"] or math.inf)
    return {"gpu": gpu, "host": host["node_bytes"] / (host["memory_bytes"] or math.inf)}


def conclusion(result: Result) -> str:
    """Whether it fits, and if not, what to change: one line."""
    usable, most = result["device"]["usable_bytes"], result["host"]["memory_bytes"]
    total, node = format_bytes(result["device"]["total_bytes"]), format_bytes(result["host_bytes"])
    sizes = f"{total} of {format_bytes(usable)} usable on each GPU" if usable else f"{total} in each process"
    node += (f" of {format_bytes(most)}" if most else "") + " of host memory on each node"
    if not result["fits"]:
        advice = ", or ".join(remedy["settings"] for remedy in result["remedies"])
        return f"does not fit: {sizes}, {node}; try {advice or 'larger GPUs, more nodes or a smaller model'}"
    if "fit" in result:
        return f"the largest and fastest that fits: {result['fit']}; {sizes}, {node}"
    more = f"; batch={result['largest_batch']} is the largest that does" if "largest_batch" in result else ""
    unchecked = "which are needed and not checked: give what a node has, as in host_memory=128G"
    return f"fits: {sizes}, {node}{more}" if most else f"fits the GPUs: {sizes}{more}; {node}, {unchecked}"
