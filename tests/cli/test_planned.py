"""The plan of a run that starts: a refusal reaches the run, whatever it does (the rest: tools/plan/test_planner)."""

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from clipscale.checkpoint.format import meta_text, values_text
from clipscale.cli.planned import PlanProcess, planned
from clipscale.cli.planned import send_plan as planners
from clipscale.common.errors import UserError
from clipscale.common.record import Record
from clipscale.config.train_config import TrainConfig
from clipscale.lifecycle.stopping import exit_on_signal
from clipscale.run_folder.names import META, path_of
from clipscale.tools.plan import start
from tests.cli.conftest import Cli, tiny

REFUSED = {"fits": False, "lines": ["does not fit: 20 GiB of 16 GiB"]}


def answer(_: PlanProcess) -> tuple[Record, str]:
    time.sleep(0.5)  # a run that did not wait would have begun
    return REFUSED, ""


def connect_to_nobody(_: BaseProcess) -> None:
    raise EOFError


def die(*_: Any) -> None:
    os._exit(3)


def moved(connection: Connection, config: TrainConfig) -> None:
    """Do the planner's work after torch has moved the private modules that it imports."""
    sys.modules["clipscale.tools.plan.planner"] = None  # type: ignore[assignment]
    planners(connection, config)


@pytest.mark.parametrize(
    ("work", "reason"),
    [(die, "its process ended with status 3"), (moved, f"ModuleNotFoundError: import of {start.__package__}.planner")],
)
def test_a_planner_that_fails_costs_a_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], work: Callable[..., None], reason: str
) -> None:
    monkeypatch.setattr("clipscale.cli.planned.send_plan", work)
    said = ""
    with planned(PlanProcess(TrainConfig(device="cpu"), forked=False)):
        while "no plan" not in said:
            time.sleep(0.05)
            said += capfd.readouterr().err
    assert f"no plan: {reason}" in said and said.count("\n") == 1, said


def test_a_run_whose_server_dies_while_it_imports_starts_without_a_plan(
    cli: Cli, shards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BaseProcess, "start", connect_to_nobody)
    status, _, err = cli(*tiny(f"data.train={shards}", "run=a", "samples=32", "plan=true", "data.workers=0"))
    assert status == 0, err
    assert "no plan: its process does not start: EOFError" in err


def test_a_run_that_cannot_fit_this_machine_is_refused(
    cli: Cli, shards: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run would last for hours. It waits for its plan, and so leaves nothing."""
    monkeypatch.setattr(PlanProcess, "_answer", answer)
    status, _, err = cli(*tiny(f"data.train={shards}", "run=a", "samples=32M", "plan=true"))
    assert status == 2, err
    assert "error: this run does not fit: 20 GiB of 16 GiB; plan=false starts it all the same" in err
    assert not (tmp_path / "runs/a").exists()


@pytest.mark.parametrize("loading", [signal.default_int_handler, signal.SIG_IGN])
def test_a_refusal_that_is_lost_while_the_run_loads_ends_it_where_it_handles_signals(
    monkeypatch: pytest.MonkeyPatch, loading: Any
) -> None:
    """An import swallows the interrupt, or a background script ignores it."""
    monkeypatch.setattr(PlanProcess, "_answer", answer)
    before = signal.signal(signal.SIGINT, loading)
    try:
        plan_process = PlanProcess(TrainConfig(), forked=False)
        with pytest.raises(UserError, match="does not fit: 20 GiB"), planned(plan_process):
            with suppress(KeyboardInterrupt):
                time.sleep(2)
            with exit_on_signal():
                time.sleep(60)
                pytest.fail("the run goes on")
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("resume", "batch", "plans"),
    [
        ("auto", 16, 1),
        ("auto", 32, 0),
        ("{path}", 16, 0),
        ("{path}", 32, 1),  # its own checkpoint, and a later one beside the path, are of other batches
    ],
)
def test_a_run_that_is_refused_for_its_checkpoints_batch_is_not_planned(
    cli: Cli, shards: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, resume: str, batch: int, plans: int
) -> None:
    planned_runs: list[TrainConfig] = []

    monkeypatch.setattr("clipscale.cli.train_verb.PlanProcess", lambda config, **_: planned_runs.append(config))
    monkeypatch.setattr("clipscale.launch.local.launch", lambda config, **_: {"run": config.run})
    for run, step, written in (("a", 4, 16), ("b", 2, 32), ("b", 9, 64)):
        path = path_of(tmp_path / "runs" / run, step)
        path.mkdir(parents=True)
        (path / META).write_text(meta_text(values_text({"batch": written}), {}))
    resume = resume.format(path=path_of(Path("runs/b"), 2))
    words = tiny(f"data.train={shards}", "run=a", "plan=true", f"batch={batch}", f"resume={resume}")
    assert cli(*words)[0] == 0
    assert len(planned_runs) == plans
