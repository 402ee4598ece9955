"""The plan of a run that starts: the run waits for it, and may be refused (the rest: tools/plan/test_planner)."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from clipscale.checkpoint.format import meta_text, values_text
from clipscale.cli.planned import planning
from clipscale.cli.planned import send_plan as planners
from clipscale.config.train_config import TrainConfig
from clipscale.run_folder.paths import META, checkpoint_path
from clipscale.tools.plan import start
from tests.cli.conftest import Cli, tiny


def refuse(connection: Connection, config: TrainConfig) -> None:
    time.sleep(0.5)  # a run that did not wait would have begun
    connection.send(({"fits": False, "lines": ["does not fit: 20 GiB of 16 GiB"]}, ""))


def connect_to_nobody(_: BaseProcess) -> None:
    raise EOFError


def die(*_: Any) -> None:
    os._exit(3)


def moved(connection: Connection, config: TrainConfig) -> None:
    """Do the planner's work after torch has moved the private modules that it imports."""
    sys.modules["clipscale.tools.plan.planner"] = None
    planners(connection, config)


@pytest.mark.parametrize(
    ("work", "reason"),
    [(die, "its process has ended"), (moved, f"ModuleNotFoundError: import of {start.__package__}.planner")],
)
def test_a_planner_that_fails_costs_a_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], work: Callable[..., None], reason: str
) -> None:
    monkeypatch.setattr("clipscale.cli.planned.send_plan", work)
    with planning(TrainConfig(device="cpu"), forked=False) as check_plan:
        check_plan()
    said = capfd.readouterr().err
    assert f"no plan: {reason}" in said and said.count("\n") == 1, said


def test_a_run_whose_server_dies_while_it_imports_starts_without_a_plan(
    cli: Cli, shards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BaseProcess, "start", connect_to_nobody)
    status, _, err = cli(*tiny(f"data.train={shards}", "run=a", "samples=32", "plan=true", "data.workers=0"))
    assert status == 0, err
    assert "no plan: its process has ended" in err


@pytest.mark.parametrize("procs", [1, 2])
def test_a_run_that_cannot_fit_this_machine_is_refused(
    cli: Cli, shards: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, procs: int
) -> None:
    """The run would last for hours. One process waits for its plan, and so leaves nothing."""
    monkeypatch.setattr("clipscale.cli.planned.send_plan", refuse)
    words = tiny(f"data.train={shards}", "run=a", "samples=32M", "plan=true", f"launch.procs={procs}")
    status, _, err = cli(*words)
    assert status == 2, err
    assert "error: this run does not fit: 20 GiB of 16 GiB; plan=false starts it all the same" in err
    assert procs > 1 or not (tmp_path / "runs/a").exists()


@pytest.mark.slow  # it starts the command, whose workers print
def test_the_plan_of_several_processes_is_printed_once(
    shards: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    """They do not wait for it."""
    words = tiny(f"data.train={shards}", "run=a", "samples=32M", "plan=true", "launch.procs=2")
    command = [sys.executable, "-m", "clipscale", *words]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        said = ""
        while not ("plan: fits" in said and "step=" in said):
            line = process.stdout.readline()
            assert line, said
            said += line
        process.terminate()
        rest, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (said + rest).count("plan: fits") == 1
    assert process.returncode == 128 + signal.SIGTERM


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

    @contextmanager
    def planning(config: TrainConfig, *, forked: bool) -> Iterator[None]:
        planned_runs.append(config)
        yield

    monkeypatch.setattr("clipscale.cli.train_verb.planning", planning)
    monkeypatch.setattr("clipscale.launch.local.launch", lambda config, main, **_: {"run": config.run})
    for run, step, written in (("a", 4, 16), ("b", 2, 32), ("b", 9, 64)):
        path = checkpoint_path(tmp_path / "runs" / run, step)
        path.mkdir(parents=True)
        (path / META).write_text(meta_text(values_text({"batch": written}), {}))
    resume = resume.format(path=checkpoint_path(Path("runs/b"), 2))
    words = tiny(f"data.train={shards}", "run=a", "plan=true", f"batch={batch}", f"resume={resume}")
    assert cli(*words)[0] == 0
    assert len(planned_runs) == plans
