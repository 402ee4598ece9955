"""Processes that are killed while they save or load leave a checkpoint from which a run goes on."""

import os
import random
import time
from pathlib import Path

import pytest
import torch

from clipscale import checkpoint
from clipscale.config.sections import CheckpointConfig
from clipscale.distributed import World
from tests.ranks import forks

ALONE = World(0, 1, torch.device("cpu"))
KILLS = 20


def values(step: int) -> dict:
    return {"model": {str(i): torch.full((40_000,), float(step)) for i in range(8)}, "loss": float(step)}


def work(run: Path) -> None:
    """Resume and save, again and again, until killed."""
    checkpoint.remove_temporary(run)
    path = checkpoint.to_resume(run, "auto", ALONE)
    step = checkpoint.load(path)["step"] if path else 0
    saver = checkpoint.Saver(run, ALONE, CheckpointConfig(keep=2))
    while True:
        step += 1
        saver.save(step, values(step))
        saver.wait()
        (run / "complete").write_text(str(step))


@pytest.mark.slow
def test_a_kill_at_any_moment_of_a_save_or_load_loses_no_complete_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = int(os.environ.get("CLIPSCALE_SEED", time.time_ns() % 2**32))
    numbers = random.Random(seed)
    checkpoint.make_folder(tmp_path)
    reached = []
    for _ in range(KILLS):
        process = forks().Process(target=work, args=(tmp_path,))
        process.start()
        time.sleep(numbers.uniform(0.05, 2.0))
        process.kill()
        process.join()
        written = tmp_path / "complete"
        complete = int(written.read_text() or 0) if written.exists() else 0
        path = checkpoint.to_resume(tmp_path, "auto", ALONE)
        step = checkpoint.load(path)["step"] if path else 0
        assert step >= complete, f"seed {seed}: step {complete} was complete, and {path} is the newest"
        if path:
            assert all(
                torch.equal(t, torch.full((40_000,), float(step))) for t in checkpoint.load(path)["model"].values()
            )
        reached.append(step)
    assert not list((tmp_path / "checkpoints").glob("*.damaged")), f"seed {seed}: a half checkpoint was taken for whole"
    with capsys.disabled():
        print(f"{KILLS} kills, seed {seed}, steps reached {reached}")
