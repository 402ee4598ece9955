"""Processes that are killed at any moment leave a checkpoint from which a run goes on as if undisturbed.

CLIPSCALE_KILLS and CLIPSCALE_SEED repeat what a failure has printed. Each process is a fork of this one, which has
imported everything and trained before, so a kill costs no more than the time that the process had.
"""

import os
import random
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from clipscale.config.model import ModelConfig
from clipscale.config.sections import CacheConfig, CheckpointConfig
from clipscale.run_folder.paths import checkpoints_of, step_of
from clipscale.run_folder.records import read_metrics
from clipscale.train import train
from tests.support.runs import ARCHITECTURE, ten_step_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3000),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]
SEED = int(os.environ.get("CLIPSCALE_SEED", time.time_ns() % 2**32))


def begin(work: Callable[..., Any], given: Any) -> int:
    """`work(given)` in a fork of this process, which prints nothing but the traceback of a failure."""
    if child := os.fork():
        os.setpgid(child, child)
        return child
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        work(given)
        status = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def kill(child: int) -> None:
    """Kill a process. Fails if it has ended by itself."""
    ended, status = os.waitpid(child, os.WNOHANG)
    assert not ended, f"it ended by itself with status {os.waitstatus_to_exitcode(status)}"
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)


def until(true: Callable[[], bool], work: Callable[..., Any], given: Any) -> float:
    """Let a process work until something is true, and kill it. Returns how long it took."""
    begun = time.monotonic()
    child = begin(work, given)
    while not true():
        time.sleep(0.005)
        assert time.monotonic() - begun < 1000
    taken = time.monotonic() - begun
    kill(child)
    return taken


def newest_step(run: Path) -> int:
    return max(map(step_of, checkpoints_of(run)), default=0)


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(run / "metrics.jsonl")]


@pytest.mark.parametrize("copied", [False, True])
def test_a_run_that_is_killed_again_and_again_has_the_undisturbed_curve(
    demo: Path, tmp_path: Path, request: pytest.FixtureRequest, copied: bool
) -> None:
    """The curves are equal bit for bit, with patch dropout, whose random state has to come back.

    Half of the kills come at any moment of the start or the steps. The others come in the step that follows a new one,
    or in its save. No kill takes back what was saved. `copied`: whether the run is copied to S3; then half of the kills
    of each kind also remove the run's folder.
    """
    numbers = random.Random(SEED)
    run = tmp_path / "killed"
    kills = int(os.environ.get("CLIPSCALE_KILLS", 20 if copied else 100))
    model = ModelConfig(name="test", patch_dropout=0.3, architecture=ARCHITECTURE)
    config = ten_step_config(demo, run, batch=16, samples=16 * 10**6, model=model)
    chunks = CacheConfig(chunk=["6", "8"])
    often = CheckpointConfig(every="1", keep=2)
    if copied:
        request.getfixturevalue("s3")
        often = replace(often, copy="s3://bucket/killed")
    config = replace(config, cache=chunks, checkpoint=often)
    first = replace(config, samples=32, run=str(tmp_path / "first"), checkpoint=CheckpointConfig())
    train(first)  # imports, tokenizer, counts of operations
    longest = 2 * until(lambda: len(losses(run)) >= 2, train, config)
    saved = [newest_step(run)]
    for number in range(kills):
        child = begin(train, config)
        begun = time.monotonic()
        while number % 2 and newest_step(run) <= saved[-1]:
            time.sleep(0.005)
            assert time.monotonic() - begun < 300, f"seed {SEED}, kill {number}: no checkpoint within 300 s"
        time.sleep(numbers.uniform(0.001, longest / 4 if number % 2 else longest))
        kill(child)
        newest = newest_step(run)
        assert newest >= saved[-1], f"seed {SEED}, kill {number}: {saved[-1]} steps were saved, now {newest}"
        saved.append(newest)
        if copied and number % 4 < 2:
            shutil.rmtree(run, ignore_errors=True)  # it may not have begun
            saved.append(0)
    assert not list((run / "checkpoints").glob("*.damaged")), f"seed {SEED}: a half checkpoint was taken for whole"
    further = sum(after > before for before, after in pairwise(saved))
    assert further >= kills // 2, f"seed {SEED}: only {further} of {kills} processes lived to save a step"
    whole = tmp_path / "whole"
    until(lambda: len(losses(whole)) >= saved[-1], train, replace(first, samples=config.samples, run=str(whole)))
    pairs = zip(losses(run)[: saved[-1]], losses(whole)[: saved[-1]], strict=True)
    differing = [step for step, (disturbed, expected) in enumerate(pairs, 1) if disturbed != expected]
    assert not differing, f"seed {SEED}: {len(differing)} of {saved[-1]} steps differ, the first is {differing[0]}"
