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


def settings(text: dict[str, Any], tokens: float) -> PlanConfig:
    architecture = SMALL | {"text_cfg": SMALL["text_cfg"] | {"context_length": 77} | text}
    return PlanConfig(model=ModelConfig(name="small", architecture=architecture), caption_tokens=tokens)


def run_of(model: ModelConfig) -> Any:
    """Stands for a dry run: what the time depends on."""
    built = build_model(model)
    towers = [SimpleNamespace(trained=True), SimpleNamespace(trained=True)]
    state = SimpleNamespace(model=built, stored=None, cache=SimpleNamespace(towers=towers))
    return SimpleNamespace(
        state=state, context_length=built.context_length, width=built.width, gradient_bytes=lambda: 0, ranks=1
    )


@pytest.mark.parametrize(
    ("text", "sort", "tokens", "width"),
    [({}, True, 20, 24), ({}, True, 75, 77), ({}, False, 20, 77), ({"no_causal_mask": True}, True, 20, 77)],
)
def test_sorted_captions_are_planned_at_their_own_width(
    text: dict[str, Any], sort: bool, tokens: float, width: int
) -> None:
    config = settings(text, tokens)
    config.data.sort_captions = sort
    assert caption_width(config, run_of(config.model)) == width


def test_a_step_of_short_captions_is_shorter() -> None:
    short, long = settings({}, 12), settings({}, 70)
    run = run_of(short.model)
    assert step_time(short, GPU, run, 64, (0, 0)).step < 0.95 * step_time(long, GPU, run, 64, (0, 0)).step


def test_kept_exponentials_save_a_quarter_of_the_loss() -> None:
    none, some, everything = (settings({}, 12) for _ in range(3))
    batch = 1024
    some.loss.keep, everything.loss.keep = str(batch * batch), "1G"
    times = [step_time(one, GPU, run_of(one.model), batch, (0, 0)).loss for one in (none, some, everything)]
    assert times == pytest.approx([times[0], 0.875 * times[0], 0.75 * times[0]])
