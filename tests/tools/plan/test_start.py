"""The plan that a start prints (what it refuses: cli/test_planned)."""

import re

import pytest

from clipscale.cli.compose import compose_settings
from clipscale.tools.plan import step_time
from clipscale.tools.plan.start import start_plan
from tests.conftest import TINIEST


def test_the_plan_of_a_start_says_how_many_cores_the_data_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipscale.tools.plan.start.gpu_here", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr("clipscale.tools.plan.start.cores", lambda: 3)
    monkeypatch.setattr(step_time, "MIN_FLOPS", 0)  # models of any size have a speed
    words = [*TINIEST, "data=demo", "batch=4096", "cache.chunk=1k", "launch.procs=1"]
    text = "\n".join(start_plan(compose_settings("train", words))["lines"])
    found = re.search(r"^decoding .* about (\d+) cores .* 256 pixels, (\d+) cores for 512; .* has 3$", text, re.M)
    assert found and int(found[2]) > int(found[1]) > 3, text
