"""Finds settings with which a run that does not fit would fit, by planning the run with each of them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from clipscale.config.sections import LossConfig
from clipscale.config.tools import PlanConfig
from clipscale.train_state import ELEMENTWISE

MOST_NODES = 8
"""Times as many nodes as asked for are tried at most."""


@dataclass(frozen=True)
class Needs:
    """Memory that a run takes of one GPU and of one node's host, each as a share of what there is. It fits up to 1."""

    gpu: float
    host: float

    @property
    def worst(self) -> float:
        return max(self.gpu, self.host)


@dataclass(frozen=True)
class Remedy:
    """A change of the settings that was tried."""

    words: tuple[str, ...]
    """As on the command line: `loss=infcl`."""
    config: PlanConfig
    needs: Needs

    def record(self) -> dict[str, Any]:
        """For `json=true`."""
        return {"settings": list(self.words), "gpu_share": self.needs.gpu, "host_share": self.needs.host}


def remedies(
    config: PlanConfig, before: Needs, measure: Callable[[PlanConfig], Needs], chunk: int | None = None
) -> list[Remedy]:
    """Changes with which the run fits, the one that helps most first; empty if none was found.

    Tries single settings. If none of them suffices, combines those that help, and then adds nodes. `measure` plans a changed run,
    `before` is what the run takes unchanged, `chunk` is a chunk size that is expected to fit.
    """
    singles = candidates(config, before, chunk)
    tried = [Remedy((word,), changed, measure(changed)) for word, changed in singles.items()]
    tried.sort(key=lambda remedy: remedy.needs.worst)
    fitting = [remedy for remedy in tried if remedy.needs.worst <= 1]
    if fitting:
        return fitting
    best = Remedy((), config, before)
    for remedy in tried:
        if remedy.needs.worst >= before.worst:
            break
        (word,) = remedy.words
        changed = candidates(best.config, before, chunk).get(word)
        if changed is None:  # a setting of the best combination replaces it
            continue
        needs = measure(changed) if best.words else remedy.needs
        if needs.worst < best.needs.worst:
            best = Remedy((*best.words, word), changed, needs)
        if best.needs.worst <= 1:
            return [best]
    factor = 2
    while factor <= MOST_NODES and best.config.batch % (config.gpus * config.nodes * factor) == 0:
        changed = replace(best.config, nodes=config.nodes * factor)
        needs = measure(changed)
        if needs.worst <= 1:
            return [Remedy((*best.words, f"nodes={changed.nodes}"), changed, needs)]
        factor *= 2
    return []


def candidates(config: PlanConfig, needs: Needs, chunk: int | None) -> dict[str, PlanConfig]:
    """Single settings that may lower the memory that does not suffice, and the run with each of them."""
    found: dict[str, PlanConfig] = {}
    loss, cache, ranks = config.loss, config.cache, config.gpus * config.nodes
    if needs.gpu > 1:
        if chunk and cache.chunk != str(chunk) and not (cache.image_chunk or cache.text_chunk):
            found[f"cache.chunk={chunk}"] = replace(config, cache=replace(cache, chunk=str(chunk)))
        if (loss.backend, loss.exchange) != ("auto", "auto") and loss.exchange != "none":
            tiled = replace(loss, backend="auto", exchange="auto")
            name = "loss=infcl" if tiled == LossConfig() else "loss.backend=auto loss.exchange=auto"
            found[name] = replace(config, loss=tiled)
        elif loss.backend == "dense":
            found["loss.backend=auto"] = replace(config, loss=replace(loss, backend="auto"))
        if cache.keep != "none":
            found["cache.keep=none"] = replace(config, cache=replace(cache, keep="none"))
        if not config.model.grad_checkpointing:
            found["model.grad_checkpointing=true"] = replace(
                config, model=replace(config.model, grad_checkpointing=True)
            )
        allowed = config.optim.name in ELEMENTWISE and config.precision.weights == "fp32" and not config.log.noise_scale
        if ranks > 1 and config.launch.parallel == "ddp" and allowed:
            found["launch.parallel=fsdp"] = replace(config, launch=replace(config.launch, parallel="fsdp"))
        if config.offload == "none":
            found["offload=host"] = replace(config, offload="host")
    if needs.host > 1:
        for offload in ("encoded", "disk"):
            if config.offload != offload:
                found[f"offload={offload}"] = replace(config, offload=offload)
        if config.data.buffers > 1 and config.data.workers:
            found["data.buffers=1"] = replace(config, data=replace(config.data, buffers=1))
    return found
