"""The predicted time counts captions at the width at which the run will compute them."""

from types import SimpleNamespace
from typing import Any

import pytest

from clipscale.common.hardware import HARDWARE
from clipscale.config.sections import ModelConfig
from clipscale.config.tools import PlanConfig
from clipscale.models.towers import build_model
from clipscale.plan.step_time import caption_width, step_time
from tests.models.test_towers import SMALL

GPU = next(iter(HARDWARE.values()))


def settings(text: dict[str, Any], *, sort: bool) -> PlanConfig:
    architecture = SMALL | {"text_cfg": SMALL["text_cfg"] | {"context_length": 77} | text}
    config = PlanConfig(model=ModelConfig(name="small", architecture=architecture))
    config.data.sort_captions = sort
    return config


def run_of(model: ModelConfig) -> Any:
    """Stands for a dry run: what the time depends on."""
    built = build_model(model)
    towers = [SimpleNamespace(trained=True), SimpleNamespace(trained=True)]
    state = SimpleNamespace(model=built, stored=None, cache=SimpleNamespace(towers=towers))
    return SimpleNamespace(
        state=state, context_length=built.context_length, width=built.width, gradient_bytes=lambda: 0, ranks=1
    )


@pytest.mark.parametrize(
    ("text", "sort", "width"), [({}, True, 24), ({}, False, 77), ({"no_causal_mask": True}, True, 77)]
)
def test_sorted_captions_are_planned_at_their_own_width(text: dict[str, Any], sort: bool, width: int) -> None:
    config = settings(text, sort=sort)
    assert caption_width(config, run_of(config.model)) == width


def test_a_step_of_short_captions_is_shorter() -> None:
    short, long = settings({}, sort=True), settings({}, sort=False)
    run = run_of(short.model)
    assert step_time(short, GPU, run, 64, (0, 0)).step < 0.95 * step_time(long, GPU, run, 64, (0, 0)).step
