"""Plans a run on any machine: its prediction, the largest batch, and settings with which it fits."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import takewhile

from clipscale.common.errors import UserError
from clipscale.common.hardware import Hardware
from clipscale.common.record import Record
from clipscale.common.terminal import show_task
from clipscale.config.setting import with_setting
from clipscale.data.shards.counts import count_if_quick
from clipscale.data.shards.listing import local_shards
from clipscale.step.chunk_sizes import check_sizes
from clipscale.tools.plan.assumed import ASSUMED
from clipscale.tools.plan.dry_run import DryRun, dry_run
from clipscale.tools.plan.prediction import Prediction
from clipscale.tools.plan.render import render
from clipscale.tools.plan.settings import PlanConfig, target_gpu


def plan(config: PlanConfig, *, search: bool = True) -> Record:
    """The object that `json=true` prints (docs/plan.md). Raises UserError for settings that do not go together.

    `search`: also look for the largest batch.
    """
    gpu = target_gpu(config)
    with open_prediction(config, gpu) as prediction:
        result = prediction.result()
        if search and (gpu or config.host_memory):
            result["largest_batch"] = prediction.largest_batch()
        remedies = [] if result["fits"] else possible_remedies(config)
        shared = [remedy for remedy in remedies if remedy.shares_dry_run]
        best_shared = first_fitting(shared, gpu, prediction.dry_run)
    # The other remedies need dry runs of their own. Those after `best_shared` are not tried.
    better = list(takewhile(lambda remedy: remedy is not best_shared, remedies))
    best = first_fitting([remedy for remedy in better if not remedy.shares_dry_run], gpu) or best_shared
    result["remedies"] = [best.words] if best else []
    result["epoch_samples"] = epoch_samples(config)
    return result | {"conclusion": render("conclusion", **result)}


@contextmanager
def open_prediction(config: PlanConfig, gpu: Hardware | None, known: DryRun | None = None) -> Iterator[Prediction]:
    """A prediction by a dry run of its own, or by one that is `known`. Raises UserError."""
    check_sizes(config.cache.sizes, config.local_batch, config.data.text_layout.texts_per_sample)
    if known:
        yield Prediction(config, gpu, known)
        return
    show_task(f"planning: a dry run of {config.model.name} on {config.ranks} x {config.hardware}")
    with dry_run(config, config.ranks, gpu.capability if gpu else None, config.nodes) as own:
        yield Prediction(config, gpu, own)


def epoch_samples(config: PlanConfig) -> int | None:
    """The samples of an epoch with sample weights; None without weights, or if the data does not say: a plan needs no
    data."""
    if config.data.sample_weights:
        with suppress(UserError, OSError):
            return count_if_quick(config.data, local_shards(config.data))
    return None


# ---- settings with which a run fits ----


@dataclass(frozen=True)
class Remedy:
    """A setting, and the run with it."""

    # The setting as a user types it.
    words: str
    config: PlanConfig
    # Whether the dry run of the planned run also serves this one: only chunks, kept graphs and buffers differ.
    shares_dry_run: bool


def possible_remedies(config: PlanConfig) -> list[Remedy]:
    """The settings of assumed.yaml that change the run, but not its objective (loss=infcl would), the best first."""
    remedies = []
    for words, values in ASSUMED.remedies.items():
        changed_config = config
        for name, value in values.items():
            changed_config = with_setting(changed_config, name, value)
        has_same_objective = changed_config.loss.objective == config.loss.objective
        if changed_config != config and has_same_objective:
            remedies.append(Remedy(words, changed_config, has_same_step(changed_config, config)))
    return remedies


def has_same_step(changed_config: PlanConfig, config: PlanConfig) -> bool:
    """Whether two runs differ in nothing but chunks, kept graphs and buffers."""
    data = replace(changed_config.data, buffers=config.data.buffers)
    return replace(changed_config, cache=config.cache, data=data) == config


def first_fitting(remedies: Iterable[Remedy], gpu: Hardware | None, known: DryRun | None = None) -> Remedy | None:
    """The first remedy with which the run fits; None if there is none. `known`: see `open_prediction`."""
    for remedy in remedies:
        # a UserError is raised for a remedy that the run's other settings exclude
        with suppress(UserError), open_prediction(remedy.config, gpu, known) as prediction:
            if prediction.fits(prediction.local_batch):
                return remedy
    return None
