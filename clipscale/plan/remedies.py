"""Finds settings with which a run that does not fit would fit, by planning the run with each of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from clipscale.config.sections import LossConfig
from clipscale.config.tools import PlanConfig
from clipscale.step.optim import SHARDED


class Needs(NamedTuple):
    """Memory that a run takes of one GPU and of one node's host, each as a share of what there is. It fits up to 1."""

    gpu: float
    host: float
    fixed: float = 0.0
    """The part of `gpu` that is there between steps."""
    phase: str = ""
    """The phase of the step that takes the most."""

    @property
    def worst(self) -> float:
        return max(self.gpu, self.host)


class Remedy(NamedTuple):
    """Changes of the settings that were tried together, as on the command line: `loss=infcl`."""

    words: tuple[str, ...]
    config: PlanConfig
    needs: Needs


def remedies(
    config: PlanConfig, needs: Needs, measure: Callable[[PlanConfig], Needs], chunk: int | None = None
) -> list[Remedy]:
    """Changes with which the run fits, the one that helps most first; empty if none was changes.

    Tries single settings. While none of them suffices, keeps the one that helps most and tries further ones. `measure`
    plans a changed run, `needs` is what the run takes unchanged, `chunk` is a chunk size that is expected to fit.
    """
    best = Remedy((), config, needs)
    while True:
        for_host = best.needs.host >= best.needs.gpu
        changes = _for_host(best.config) if for_host else _for_gpu(best.config, best.needs, chunk)
        tried = [Remedy((*best.words, word), changed, measure(changed)) for word, changed in changes.items()]
        tried.sort(key=lambda remedy: remedy.needs.worst)
        fitting = [remedy for remedy in tried if remedy.needs.worst <= 1]
        if fitting or not tried or tried[0].needs.worst >= best.needs.worst:
            return fitting
        best = tried[0]


def _for_gpu(config: PlanConfig, needs: Needs, chunk: int | None) -> dict[str, PlanConfig]:
    """Settings that change the phase with the highest peak: only they can help."""
    changes: dict[str, PlanConfig] = {}
    loss, cache = config.loss, config.cache
    if needs.phase == "loss" and (loss.backend != "auto" or loss.exchange not in ("auto", "none")):
        tiled = replace(loss, backend="auto", exchange="none" if loss.exchange == "none" else "auto")
        word = "loss=infcl" if tiled == LossConfig() else f"loss.backend=auto loss.exchange={tiled.exchange}"
        changes[word] = replace(config, loss=tiled)
    own_chunks = cache.image_chunk or cache.text_chunk
    if needs.phase in ("encode", "replay") and chunk and cache.chunk != str(chunk) and not own_chunks:
        changes[f"cache.chunk={chunk}"] = replace(config, cache=replace(cache, chunk=str(chunk)))
    if cache.keep != "none":
        changes["cache.keep=none"] = replace(config, cache=replace(cache, keep="none"))
    if needs.phase == "replay" and not config.model.grad_checkpointing:
        model = replace(config.model, grad_checkpointing=True)
        changes["model.grad_checkpointing=true"] = replace(config, model=model)
    # FSDP2 shards what is there between steps, so it can only remove an excess that is smaller than that.
    shardable = config.optim.name in SHARDED and not config.log.noise_scale
    several = config.gpus * config.nodes > 1 and config.launch.parallel == "ddp"
    if several and shardable and needs.fixed >= needs.gpu - 1:
        changes["launch.parallel=fsdp"] = replace(config, launch=replace(config.launch, parallel="fsdp"))
    if config.offload == "none":
        changes["offload=host"] = replace(config, offload="host")
    return changes


def _for_host(config: PlanConfig) -> dict[str, PlanConfig]:
    """Settings that lower the host's memory."""
    offloads = [offload for offload in ("encoded", "disk") if config.offload != offload]
    changes = {f"offload={offload}": replace(config, offload=offload) for offload in offloads}
    if config.data.buffers > 1 and config.data.workers != 0:
        changes["data.buffers=1"] = replace(config, data=replace(config.data, buffers=1))
    return changes
