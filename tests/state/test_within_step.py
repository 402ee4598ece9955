"""A step that is killed in its midst goes on from the chunk at which its progress was saved, bit for bit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clipscale.config.sections import (
    CacheConfig,
    CheckpointConfig,
    LaunchConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
)
from clipscale.config.train import TrainConfig
from clipscale.launch.stopping import AbandonedError
from clipscale.train import Run, train
from tests.ranks import run_ranks
from tests.test_precision import BF16, small
from tests.test_train import ARCHITECTURE


class KilledError(Exception):
    """The process is gone."""


def long_steps(shards: str, run: Path, **changes: Any) -> TrainConfig:
    """Two steps of 12 in 3 image chunks and 2 text chunks: 10 calls between chunks in a step."""
    return small(
        shards,
        run,
        **{
            "samples": 24,
            "model": ModelConfig(name="test", architecture=ARCHITECTURE, patch_dropout=0.3),
            "precision": PrecisionConfig(),
            "checkpoint": CheckpointConfig(within_step=1e-9),
        }
        | changes,
    )


def killed_at(
    config: TrainConfig, step: int, call: int, monkeypatch: pytest.MonkeyPatch, error: type = KilledError
) -> int:
    """Train until that chunk of that step; returns the chunks that ran in the whole time."""
    calls = 0
    runs = chunks_run(monkeypatch)

    def before_chunk(run: Run) -> None:
        nonlocal calls
        run.within.check()
        calls += run.step == step
        if run.step == step and calls > call:
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(Run, "before_chunk", before_chunk)
        with pytest.raises((KilledError, Exception)):
            train(config)
    return len(runs)


def chunks_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    from clipscale.grad_cache import _Tower

    runs: list[int] = []
    run = _Tower.run
    monkeypatch.setattr(_Tower, "run", lambda tower, a, b: runs.append(a) or run(tower, a, b))
    return runs


def losses(run: Path) -> list[tuple[float, float]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [(record["loss"], record["grad_norm"]) for record in map(json.loads, lines)]


@pytest.fixture(scope="module")
def undisturbed(shards: str, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    train(long_steps(shards, run, checkpoint=CheckpointConfig()))
    return losses(run)


@pytest.mark.parametrize(
    ("step", "call", "left"),
    [
        pytest.param(1, 4, 6, id="second tower's first pass"),
        pytest.param(0, 8, 2 + 10, id="second pass of the first step"),
        pytest.param(1, 1, 9, id="first chunk", marks=pytest.mark.slow),
        pytest.param(1, 9, 1, id="last chunk", marks=pytest.mark.slow),
    ],
)
def test_a_killed_step_goes_on_where_it_was(
    shards: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: list[tuple[float, float]],
    capsys: pytest.CaptureFixture[str],
    step: int,
    call: int,
    left: int,
) -> None:
    config = long_steps(shards, tmp_path / "run")
    killed_at(config, step, call, monkeypatch)
    assert (tmp_path / f"run/checkpoints/step_0000000{step}.within").is_dir()
    runs = chunks_run(monkeypatch)
    train(config)
    assert len(runs) == left, "chunks that ran before the kill do not run again"
    assert losses(tmp_path / "run") == undisturbed
    assert f"step {step + 1} goes on where it was" in " ".join(capsys.readouterr().out.split())
    assert not list((tmp_path / "run/checkpoints").glob("*.within")), "the finished step's progress is gone"


@pytest.mark.parametrize("change", ["chunks", "data"])
def test_progress_of_other_settings_is_left_out(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    config = long_steps(shards, tmp_path / "run")
    killed_at(config, 0, 5, monkeypatch)
    if change == "chunks":
        config = replace(config, cache=CacheConfig(image_chunk=6, text_chunk=6))
    else:
        config = replace(config, data=replace(config.data, max_pixels=10**7))
    train(config)
    out = " ".join(capsys.readouterr().out.split())
    assert f"step 1 starts over: its progress was saved with other {change}" in out


def test_damaged_progress_is_left_out(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: list[tuple[float, float]]
) -> None:
    config = long_steps(shards, tmp_path / "run")
    killed_at(config, 1, 5, monkeypatch)
    (file,) = (tmp_path / "run/checkpoints/step_00000001.within").iterdir()
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2] + b"!" + data[len(data) // 2 + 1 :])
    train(config)
    assert losses(tmp_path / "run") == undisturbed


def on_a_rank(rank: int, world: int, config: TrainConfig, call: int) -> list[str]:
    """Stopped at that chunk of the second step; -1: never."""
    calls = 0
    plain = Run.before_chunk

    def before_chunk(run: Run) -> None:
        nonlocal calls
        plain(run)
        calls += run.step == 1
        if run.step == 1 and calls == call:
            raise AbandonedError

    Run.before_chunk = before_chunk  # type: ignore[method-assign]
    try:
        train(config)
    except Exception as error:
        return [type(error).__name__]
    return [str(calls)]


@pytest.mark.slow
@pytest.mark.parametrize("precision", [PrecisionConfig(), BF16], ids=["fp32", "masters"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("call", [2, 8])
def test_ranks_go_on_within_a_step(
    shards: str, tmp_path: Path, precision: PrecisionConfig, parallel: str, call: int
) -> None:
    if parallel == "fsdp" and precision is BF16:
        pytest.skip("FSDP2 has no master weights")
    config = long_steps(
        shards,
        tmp_path / "run",
        precision=precision,
        cache=CacheConfig(image_chunk=2, text_chunk=3),
        launch=LaunchConfig(threads=1, parallel=parallel),
        checkpoint=CheckpointConfig(within_step=1e6),
        optim=OptimConfig(lr=1e-3),
    )
    assert run_ranks(on_a_rank, 2, config, call) == [["StoppedError"]] * 2
    again = run_ranks(on_a_rank, 2, config, -1)
    done = call - 1 if parallel == "ddp" or call <= 5 else 5
    assert again == [[str(10 - done)]] * 2, "the chunks that are left of the second step"
    run_ranks(on_a_rank, 2, replace(config, run=str(tmp_path / "whole"), checkpoint=CheckpointConfig()), -1)
    for found, wanted in zip(losses(tmp_path / "run"), losses(tmp_path / "whole"), strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
