"""Faults of processes and clocks, with real processes: the first cause is named, nothing saved is lost, and the resumed curve is the
undisturbed one. All are slow; the logic has quick tests beside it (test_heartbeat.py, test_workers.py)."""

import io
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch

from clipscale import checkpoint
from clipscale.checkpoint.saving import Writer
from clipscale.common.errors import StoppedError
from clipscale.config.sections import CheckpointConfig, EvalConfig, LaunchConfig
from clipscale.config.train import TrainConfig
from clipscale.eval.encode import Encoder
from clipscale.launch import heartbeat, local
from clipscale.train import Run, train
from tests.conftest import TINY
from tests.launch.test_local import LONG, TRAIN, Start, gone, has_steps, start, training, wait_until
from tests.support.forks import forks
from tests.support.ranks import _entry, run_ranks
from tests.support.runs import curve, on_a_rank, settings

__all__ = ["start"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 6
PLACES: dict[str, tuple[Any, str, int]] = {
    "save": (Writer, "write_data", 1),
    "load": (checkpoint.Saved, "__init__", 1),
    "evaluation": (Encoder, "text", 2),
}
"""Phase -> a method that it calls, and the number of the call in its midst."""


def some_steps(demo: Path, run: Path, **changes: Any) -> TrainConfig:
    """Six steps with a checkpoint after every second and an evaluation after the third."""
    sets = EvalConfig(every=3, sets=[str(demo / "objects")], limit=16, batch=4)
    fixed = {"samples": 64 * STEPS, "eval": sets, "checkpoint": CheckpointConfig(every=2), **changes}
    return settings(demo, run, **fixed)


def interrupted(rank: int, world: int, config: TrainConfig, steps: int) -> None:
    """A rank of a run that a signal stops after some steps, with a save."""
    step = Run.optimizer_step

    def disturbed(run: Run) -> dict[str, Any]:
        record = step(run)
        if run.step + 1 == steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return record

    with patch.object(Run, "optimizer_step", disturbed), pytest.raises(StoppedError):
        train(config)


@pytest.fixture(scope="module")
def alone(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The undisturbed curve of one process."""
    run = tmp_path_factory.mktemp("runs") / "alone"
    train(some_steps(demo, run))
    return curve(run)


# -- ranks that are killed or hang -------------------------------------------------------------------------------------


def killed_at(rank: int, world: int, config: TrainConfig, phase: str, victims: tuple[int, ...]) -> None:
    """A rank of a run. The victims kill themselves in the midst of a phase, when a part of its work is done."""
    owner, name, call = PLACES[phase]
    original, calls = getattr(owner, name), 0

    def fatal(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and rank in victims:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*given, **named)

    with patch.object(owner, name, fatal), patch.object(heartbeat, "BEAT_S", 0.1):
        train(config)


def outcomes(folder: Path, function: Callable[..., Any], world: int, *args: Any) -> list[tuple[int | None, str]]:
    """Of each rank of a group: the status it ended with, and its traceback, if it could still send one."""
    pipes, processes = [], []
    for rank in range(world):
        receive, send = forks().Pipe(duplex=False)
        process = forks().Process(
            target=_entry, args=(send, folder / "store", function, rank, world, args), daemon=True
        )
        process.start()
        send.close()
        pipes.append(receive)
        processes.append(process)
    found = []
    for pipe, process in zip(pipes, processes):
        text = ""
        try:
            assert pipe.poll(120), "a rank neither failed nor ended"
            text = str(torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)[1])
        except EOFError:
            pass
        process.join(20)
        found.append((process.exitcode, text))
        process.kill()
    return found


@pytest.fixture(scope="module")
def together(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The undisturbed curve of two ranks."""
    run = tmp_path_factory.mktemp("runs") / "together"
    run_ranks(on_a_rank, 2, some_steps(demo, run))
    return curve(run)


@pytest.mark.parametrize("victims", [(1,), (0,), (0, 1)], ids=["rank 1", "rank 0", "all"])
@pytest.mark.parametrize("phase", ["save", "load", "evaluation"])
def test_killed_ranks_are_named_and_the_run_goes_on(
    demo: Path, together: list[float], tmp_path: Path, phase: str, victims: tuple[int, ...]
) -> None:
    config = some_steps(demo, tmp_path / "run")
    if phase == "load":
        run_ranks(interrupted, 2, config, 3)
    found = outcomes(tmp_path, killed_at, 2, config, phase, victims)
    for rank, (status, text) in enumerate(found):
        if rank in victims:
            assert status == -signal.SIGKILL
        else:
            who = rf"LostRankError: rank {victims[0]} on {re.escape(socket.gethostname())} \(process \d+\) has died, last seen in "
            assert re.search(who, text), text
            at = {"save": "writing a checkpoint|save", "load": "in load;", "evaluation": "evaluation of step 3"}
            assert re.search(at[phase], text.splitlines()[-1]), text
    run_ranks(on_a_rank, 2, config)
    assert curve(tmp_path / "run") == pytest.approx(together, rel=1e-6)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_named_within_the_time_out(start: Start, shards: str, tmp_path: Path, rank: int) -> None:
    words = ("launch.timeout_s=6", "data.workers=0", "launch.grace_s=1")
    process, _, everyone = training(start, shards, tmp_path, *words)
    beats = {beat.rank: beat for beat in heartbeat.read(tmp_path / "runs/long")}
    victim = beats[rank]
    begun = time.monotonic()
    os.kill(victim.pid, signal.SIGSTOP)
    other = psutil.Process(beats[1 - rank].pid)
    assert not psutil.wait_procs([other], timeout=30)[1], "the other rank waits for ever"
    taken = time.monotonic() - begun
    _, errors = process.communicate(timeout=100)  # torch's launcher gives the stopped process 30 s
    assert process.returncode == 1, errors
    last = errors.splitlines()[-1]
    who = rf"error: rank {rank} on {re.escape(socket.gethostname())} \(process {victim.pid}\) is stopped in \w+.* of step \d+"
    assert re.match(who, last), errors
    assert errors.count("Traceback") == 0, errors
    assert taken < 6 + 10, f"{taken:.1f} s after a time-out of 6 s"
    assert gone(everyone, 15)


def slow_phase(config: TrainConfig) -> dict[str, Any]:
    """`train` for a launcher whose ranks take five seconds in the phase that the run's name says, and say when they are in it."""
    folder = Path(config.run)
    owner, name, _ = PLACES[folder.name]
    original, said = getattr(owner, name), folder.parent / f"in-{os.environ['RANK']}"

    def slow(*given: Any, **named: Any) -> Any:
        if not said.exists():
            said.touch()
            time.sleep(5)
        return original(*given, **named)

    with patch.object(owner, name, slow):
        return train(config)


def launcher(config: TrainConfig) -> None:
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    local.run(config, "tests.launch.test_faults:slow_phase")


@pytest.mark.parametrize("phase", ["save", "load", "evaluation"])
def test_a_killed_parent_takes_its_ranks_along_and_the_run_goes_on(
    demo: Path, together: list[float], tmp_path: Path, phase: str
) -> None:
    config = some_steps(demo, tmp_path / phase, launch=LaunchConfig(procs=2, threads=1))
    if phase == "load":
        run_ranks(interrupted, 2, replace(config, launch=LaunchConfig(threads=1)), 3)
    parent = forks().Process(target=launcher, args=(config,))
    parent.start()
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("in-*")):
        assert parent.is_alive() and time.monotonic() < deadline
        time.sleep(0.1)
    assert parent.pid
    everyone = psutil.Process(parent.pid).children(recursive=True)
    parent.kill()
    parent.join()
    assert gone(everyone, 60), [left.cmdline() for left in everyone if left.is_running()]
    run_ranks(on_a_rank, 2, config)
    assert curve(tmp_path / phase) == pytest.approx(together, rel=1e-6)


# -- clocks ------------------------------------------------------------------------------------------------------------


def test_a_clock_that_jumps_changes_nothing(
    demo: Path, alone: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a day, back and forth, at every look: no save by minutes comes of it, no grace or time-out ends, and no rate is negative."""
    real, looks = time.time, 0

    def jumping() -> float:
        nonlocal looks
        looks += 1
        return real() + (-1) ** looks * 86_400

    monkeypatch.setattr(time, "time", jumping)
    saves: list[int] = []
    save = checkpoint.Saver.save
    monkeypatch.setattr(
        checkpoint.Saver, "save", lambda self, step, *a, **k: saves.append(step) or save(self, step, *a, **k)
    )
    train(some_steps(demo, tmp_path / "run", checkpoint=CheckpointConfig(every=4, minutes=60)))
    assert looks > STEPS and saves == [4, 6]
    assert curve(tmp_path / "run") == alone
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(record["samples_per_s_wall"] > 0 and record["step_s"] > 0 for record in records)


# -- ctrl-c, and runs side by side -----------------------------------------------------------------------------------------


def test_ctrl_c_ends_everything_within_seconds_and_leaves_nothing(start: Start, shards: str, tmp_path: Path) -> None:
    """Two ranks with two loaders each, and a background save; no process, no file in shared memory, no temporary file stays."""
    shm, temporary = tmp_path / "shm", tmp_path / "tmp"
    shm.mkdir()
    temporary.mkdir()
    private = f'mount --bind {shm} /dev/shm && exec env TMPDIR={temporary} "$@"'
    if os.geteuid() or subprocess.run(["unshare", "-m", "sh", "-c", "mount --bind /tmp /dev/shm"]).returncode:
        pytest.skip("only root may mount here")
    words = (*TRAIN, *LONG, f"data.train={shards}", "run=long", "checkpoint.every=1")
    process = start("unshare", "-m", "sh", "-c", private, "sh", *words, "data.workers=2", "offload=disk")
    wait_until(lambda: has_steps(tmp_path / "runs/long"), process)
    everyone = psutil.Process(process.pid).children(recursive=True)
    assert len(everyone) >= 2 + 4
    begun = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    taken = time.monotonic() - begun
    assert process.returncode == 130, errors
    assert taken < 40, f"{taken:.1f} s; a few where the cores are free"
    assert gone(everyone, 5), [left.cmdline() for left in everyone if left.is_running()]
    assert [path for folder in (shm, temporary) for path in folder.rglob("*")] == []
    assert not list((tmp_path / "runs/long").rglob("*.tmp"))
    assert not (tmp_path / "runs/long" / heartbeat.FOLDER).exists()


def test_a_second_ctrl_c_ends_a_run_whose_rank_hangs(start: Start, shards: str, tmp_path: Path) -> None:
    """The other rank waits for it in native code, and cannot react."""
    process, _, everyone = training(start, shards, tmp_path)
    (victim,) = [beat.pid for beat in heartbeat.read(tmp_path / "runs/long") if beat.rank == 1]
    os.kill(victim, signal.SIGSTOP)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(2)
    assert process.poll() is None, "one Ctrl-C leaves time for a save"
    begun = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    taken = time.monotonic() - begun
    assert process.returncode == 130, errors
    assert taken < 15, f"{taken:.1f} s"
    assert gone(everyone, 5)


def test_runs_that_start_at_once_do_not_collide(start: Start, shards: str, tmp_path: Path) -> None:
    """Three unnamed runs of two ranks in the same folder and second: each has its own folder, port and shared memory."""
    words = (*TRAIN, *TINY, f"data.train={shards}", "launch.procs=2", "data.workers=1")
    several = [start(*words) for _ in range(3)]
    for process in several:
        _, errors = process.communicate(timeout=400)
        assert process.returncode == 0, errors
    runs = sorted((tmp_path / "runs").iterdir())
    assert len(runs) == 3
    assert curve(runs[0]) == curve(runs[1]) == curve(runs[2])
