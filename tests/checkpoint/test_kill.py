"""Processes that are killed at any moment leave a checkpoint from which a run goes on, and its curve is the undisturbed one.

CLIPSCALE_KILLS and CLIPSCALE_SEED repeat what a failure has printed. A kill takes a fork of a server that has imported everything.
"""

import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from clipscale import checkpoint
from clipscale.config.sections import CacheConfig, CheckpointConfig, ModelConfig
from clipscale.config.train import TrainConfig
from clipscale.distributed import World
from clipscale.report.metrics import read_metrics
from clipscale.train import train
from tests.ranks import forks
from tests.test_train import ARCHITECTURE, demo, settings

__all__ = ["demo"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
ALONE = World(0, 1, torch.device("cpu"))
KILLS = int(os.environ.get("CLIPSCALE_KILLS", "200"))
SEED = int(os.environ.get("CLIPSCALE_SEED", time.time_ns() % 2**32))


def values(step: int) -> dict:
    return {"model": {str(i): torch.full((40_000,), float(step)) for i in range(8)}, "loss": float(step)}


def save_for_ever(run: Path) -> None:
    """Resume and save, again and again."""
    checkpoint.remove_temporary(run)
    path = checkpoint.to_resume(run, "auto", ALONE)
    step = checkpoint.load(path)["step"] if path else 0
    saver = checkpoint.Saver(run, ALONE, CheckpointConfig(keep=2))
    while True:
        step += 1
        saver.save(step, values(step))
        saver.wait()
        (run / "complete").write_text(str(step))


def warm_up() -> None:
    """Let the server of the forks import everything."""
    process = forks().Process(target=random.random)
    process.start()
    process.join()


def kill(work: Callable[..., None], given: Any, seconds: float) -> None:
    """Let a process work for some seconds, and kill it."""
    process = forks().Process(target=work, args=(given,))
    process.start()
    process.join(seconds)
    assert process.is_alive(), f"it ended by itself with status {process.exitcode}"
    process.kill()
    process.join()


def test_a_kill_at_any_moment_of_a_save_or_load_loses_no_complete_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = random.Random(SEED)
    checkpoint.make_folder(tmp_path)
    warm_up()
    reached, written, begun = [], tmp_path / "complete", time.monotonic()
    process = forks().Process(target=save_for_ever, args=(tmp_path,))
    process.start()
    while not written.exists():
        process.join(0.01)
        assert process.is_alive()
    process.kill()
    process.join()
    longest = 2 * (time.monotonic() - begun)  # half of the kills come after a save, on any machine
    for _ in range(KILLS):
        kill(save_for_ever, tmp_path, numbers.uniform(0.02, longest))
        complete = int(written.read_text() or 0) if written.exists() else 0
        path = checkpoint.to_resume(tmp_path, "auto", ALONE)
        step = checkpoint.load(path)["step"] if path else 0
        assert step >= complete, f"seed {SEED}: step {complete} was complete, and {path} is the newest"
        if path:
            assert all(
                torch.equal(t, torch.full((40_000,), float(step))) for t in checkpoint.load(path)["model"].values()
            )
        reached.append(step)
    assert not list((tmp_path / "checkpoints").glob("*.damaged")), f"seed {SEED}: a half checkpoint was taken for whole"
    with capsys.disabled():
        print(f"\n{KILLS} kills of saves and loads, seed {SEED}: step {reached[-1]} reached")


def train_quietly(config: TrainConfig) -> None:
    """A run that prints nothing."""
    os.close(1)
    os.open(os.devnull, os.O_WRONLY)
    train(config)


def test_a_run_that_is_killed_again_and_again_has_the_undisturbed_curve(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bit for bit, with patch dropout, whose random state has to come back; kills come while it loads, trains and saves."""
    numbers = random.Random(SEED)
    model = ModelConfig(name="test", patch_dropout=0.3, architecture=ARCHITECTURE)
    config = settings(demo, tmp_path / "killed", batch=16, samples=16 * 10**6, model=model)
    config = replace(
        config, cache=CacheConfig(image_chunk=6, text_chunk=8), checkpoint=CheckpointConfig(every=1, keep=2)
    )
    warm_up()
    begun = time.monotonic()
    until_steps(config, 2)
    longest = 2 * (time.monotonic() - begun)  # half of the kills come after a step, on any machine
    for _ in range(KILLS):
        kill(train_quietly, config, numbers.uniform(0.05, longest))
    steps = checkpoint.newest_step(tmp_path / "killed")
    assert steps, "no kill left time for a step"
    whole = until_steps(replace(config, run=str(tmp_path / "whole")), steps)
    pairs = zip(losses(tmp_path / "killed")[:steps], whole[:steps], strict=True)
    differing = [step for step, (found, expected) in enumerate(pairs, 1) if found != expected]
    assert not differing, f"seed {SEED}: {len(differing)} of {steps} steps differ, the first is {differing[0]}"
    with capsys.disabled():
        print(f"\n{KILLS} kills of a run, seed {SEED}: {steps} steps, each with the undisturbed loss")


def until_steps(config: TrainConfig, steps: int) -> list[float]:
    """The losses of a run that is killed after so many steps."""
    process, run = forks().Process(target=train_quietly, args=(config,)), Path(config.run)
    process.start()
    while len(found := losses(run)) < steps:
        process.join(0.1)
        assert process.is_alive()
    process.kill()
    process.join()
    return found


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(run / "metrics.jsonl")]
