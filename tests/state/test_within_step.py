"""A step that is killed in its midst goes on from the chunk at which its progress was saved, bit for bit."""

import io
import json
import shutil
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from clipscale.common.errors import StoppedError, UserError
from clipscale.config.sections import (
    CacheConfig,
    CheckpointConfig,
    LaunchConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
)
from clipscale.config.train import TrainConfig
from clipscale.distributed.world import World
from clipscale.launch.stopping import AbandonedError
from clipscale.state.within_step import WithinStep
from clipscale.train import Run, train
from tests.support.ranks import run_ranks
from tests.support.runs import ARCHITECTURE, BF16, small


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
    from clipscale.step.grad_cache import _Tower

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


@pytest.mark.slow
@pytest.mark.parametrize(("step", "call"), [(0, 4), (1, 3), (1, 6)], ids=["checkpointed", "whole", "second pass"])
def test_a_killed_step_loses_its_kept_graphs_and_nothing_else(
    shards: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: list[tuple[float, float]],
    step: int,
    call: int,
) -> None:
    """Their chunks are replayed with the random numbers of the first pass. Sums of gradients come in another order."""
    cache = CacheConfig(image_chunk=4, text_chunk=6, keep="1G")
    config = long_steps(shards, tmp_path / "run", cache=cache)
    killed_at(config, step, call, monkeypatch)
    train(config)
    for found, wanted in zip(losses(tmp_path / "run"), undisturbed, strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)


WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no about": lambda saved: saved.pop("about"),
    "no cache": lambda saved: saved.update(cache=None),
    "another tower": lambda saved: saved["cache"]["towers"].pop(),
    "wide features": lambda saved: saved["cache"]["towers"][0].update(features=torch.zeros(12, 3)),
    "many features": lambda saved: saved["cache"]["towers"][0].update(features=torch.zeros(13, 8)),
    "more replayed": lambda saved: saved["cache"]["towers"][0].update(replayed=2**40),
    "random of nothing": lambda saved: saved["cache"].update(random=(torch.zeros(1), None)),
    "random of another kind": lambda saved: saved["cache"]["towers"][0]["random"].append(3),
    "random state": lambda saved: saved["cache"].update(random=(torch.full_like(torch.get_rng_state(), 255), None)),
    "gradients": lambda saved: saved["gradients"].update({"image.0": torch.zeros(1)}),
    "gradient of nothing": lambda saved: saved["gradients"].update({"image.x": torch.zeros(1)}),
    "complete": lambda saved: saved["gradients"].update(complete=["x"]),
}


@pytest.fixture(scope="module")
def killed(shards: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, Path]:
    """A run that was killed in its first step, and the file with its progress."""
    config = long_steps(shards, tmp_path_factory.mktemp("killed") / "run")
    with pytest.MonkeyPatch.context() as patch:
        killed_at(config, 0, 5, patch)
    (file,) = Path(config.run).glob("checkpoints/*.within/*")
    return config, file


@pytest.mark.parametrize("change", ["chunks", "data"])
def test_progress_of_other_settings_is_left_out(
    killed: tuple[TrainConfig, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    config = replace(killed[0], run=str(tmp_path / "run"))
    shutil.copytree(killed[0].run, config.run)
    if change == "chunks":
        config = replace(config, cache=CacheConfig(image_chunk=6, text_chunk=6))
    else:
        config = replace(config, data=replace(config.data, max_pixels=10**7))
    train(config)
    out = " ".join(capsys.readouterr().out.split())
    assert f"step 1 starts over: its progress was saved with other {change}" in out


@pytest.fixture(scope="module")
def begun(killed: tuple[TrainConfig, Path]) -> Iterator[Run]:
    """The killed run, started again: it has found its progress."""
    run = Run(killed[0], World(0, 1, torch.device("cpu")))
    assert run.within.found is not None
    yield run
    run.stream.close()


@pytest.mark.parametrize("name", WRONG)
def test_progress_that_no_run_of_ours_leaves_is_left_out(
    killed: tuple[TrainConfig, Path], begun: Run, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its checksums are right: a stranger has written it."""
    _, file = killed
    whole = file.read_bytes()
    saved = torch.load(io.BytesIO(whole), weights_only=True)
    WRONG[name](saved)
    torch.save(saved, file)
    begun.within.found = None
    try:
        begun.within.load(begun.step, begun.last_loss)
    finally:
        file.write_bytes(whole)
    assert begun.within.found is None and f"{file} is damaged (" in caplog.text, caplog.text


def test_progress_in_other_chunks_is_one_line(killed: tuple[TrainConfig, Path], tmp_path: Path) -> None:
    config, file = killed
    shutil.copytree(config.run, tmp_path / "run")
    (file,) = (tmp_path / "run").glob("checkpoints/*.within/*")
    saved = torch.load(file, weights_only=True)
    saved["cache"]["towers"][0]["features"] = saved["cache"]["towers"][0]["features"][:-1].clone()
    torch.save(saved, file)
    with pytest.raises(UserError, match=r"of another batch; delete its folder"):
        train(replace(config, run=str(tmp_path / "run")))


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


@pytest.mark.parametrize("call", [4, 7], ids=["first pass", "second pass"])
def test_an_abandoned_step_holds_no_graphs_while_it_is_saved(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    graphs: list[weakref.ref[torch.Tensor]] = []
    calls, save = 0, WithinStep.save

    def before_chunk(run: Run) -> None:
        nonlocal calls
        calls += 1
        graphs.extend(weakref.ref(out) for tower in run.state.cache.towers for out in tower.graphs.outputs)
        if calls == call:
            raise AbandonedError

    def saved(within: WithinStep) -> None:
        assert graphs and not any(graph() is not None for graph in graphs)
        save(within)

    monkeypatch.setattr(Run, "before_chunk", before_chunk)
    monkeypatch.setattr(WithinStep, "save", saved)
    with pytest.raises(StoppedError):
        train(long_steps(shards, tmp_path / "run", cache=CacheConfig(image_chunk=4, text_chunk=6, keep="1G")))


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
