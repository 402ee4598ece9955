"""The plan of a run that starts: a refusal reaches the run, whatever it does (the rest: tools/plan/test_planner)."""

import json
import os
import signal
import time
from contextlib import suppress
from typing import Any

import pytest

from clipscale.cli.planned import Planner, planned
from clipscale.common.errors import StoppedError, UserError
from clipscale.config.train import TrainConfig

REFUSED = json.dumps({"fits": False, "lines": ["does not fit: 20 GiB of 16 GiB"]})


def stop(number: int, _: Any) -> None:
    raise StoppedError("stopped", number)


def answer(_: Planner) -> tuple[str, str]:
    time.sleep(0.5)  # the run has begun
    return REFUSED, ""


def die(*_: Any) -> None:
    os._exit(3)


def test_a_planner_that_dies_costs_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("clipscale.cli.planned.answer", die)
    said = ""
    with planned(TrainConfig()):
        while "no plan" not in said:
            time.sleep(0.05)
            said += capsys.readouterr().err
    assert "no plan: its process ended with status 3" in said


@pytest.mark.parametrize("loading", [signal.default_int_handler, signal.SIG_IGN])
def test_a_refusal_that_is_lost_while_the_run_loads_ends_it_at_its_steps(
    monkeypatch: pytest.MonkeyPatch, loading: Any
) -> None:
    """By an import that swallows it, or since a script's background ignores it."""
    monkeypatch.setattr(Planner, "_answer", answer)
    before = signal.signal(signal.SIGINT, loading)
    try:
        with pytest.raises(UserError, match="does not fit: 20 GiB"), planned(TrainConfig()):
            with suppress(KeyboardInterrupt):
                time.sleep(2)
            signal.signal(signal.SIGINT, stop)
            time.sleep(10)
            pytest.fail("the run goes on")
    finally:
        signal.signal(signal.SIGINT, before)
