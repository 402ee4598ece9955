"""The remedies for a run that does not fit: settings of assumed.yaml with which it might."""

from dataclasses import dataclass, replace

from clipscale.config.setting import with_setting
from clipscale.tools.plan.assumed import ASSUMED
from clipscale.tools.plan.settings import PlanConfig


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
