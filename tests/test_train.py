"""Whole runs on a small demo set: they learn, resume after a kill, and do not depend on the number of processes."""

import gc
import math
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from clipscale import __version__, checkpoint
from clipscale.cli.train_verb import launch_training
from clipscale.common.errors import LoaderError, UserError
from clipscale.config.model import ModelConfig
from clipscale.config.sections import (
    CacheConfig,
    CheckpointConfig,
    EvalConfig,
    LaunchConfig,
    OptimConfig,
    ScheduleConfig,
)
from clipscale.config.train_config import TrainConfig
from clipscale.data.loader.workers import InProcessWorker
from clipscale.data.train_transform import TrainTransform
from clipscale.eval.classification import ClassificationSet
from clipscale.eval.sets.item import Measurement
from clipscale.run.train_loop import TrainLoop
from clipscale.run_folder.paths import checkpoints_of, step_of
from clipscale.run_folder.records import StepRecord
from clipscale.step.cache.grad_cache import GradCache
from clipscale.step.train_step import StepResult
from clipscale.tools.trained_model import load_model
from clipscale.train import train
from tests.support.checkpoints import ONE_RANK, steps
from tests.support.ranks import run_ranks
from tests.support.runs import (
    ARCHITECTURE,
    curve,
    four_step_config,
    records,
    ten_step_config,
    train_loop,
    train_on_rank,
)
from tests.support.user_errors import refused

FIELDS = {
    "step", "samples", "loss", "logit_scale", "lr", "grad_norm", "time", "samples_per_s", "samples_per_s_wall",
    "samples_per_s_per_gpu", "data_wait_frac", "step_s", "encode_s", "loss_s", "replay_s", "optim_s",
    "mem_peak_bytes", "mem_encode_bytes", "mem_loss_bytes", "mem_replay_bytes", "mem_optim_bytes", "host_rss_bytes",
    "host_pinned", "broken", "broken_by", "faults", "faults_by", "caption_tokens", "mfu",
}  # fmt: skip


def test_the_last_line_names_a_run_so_that_it_can_be_pasted(
    shards: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(four_step_config(shards, tmp_path / "my run", samples=12))
    assert f"clipscale report '{tmp_path}/my run' shows it" in capsys.readouterr().out


def test_a_start_says_that_a_batch_is_too_large_for_its_samples(
    shards: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clipscale.config.advice.BEST_BATCHES", {12_800_000: 2})
    train(four_step_config(shards, tmp_path / "run", samples=12))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "was best" in line]
    assert "warning: batch=12 for 12 samples: in published sweeps of that length 2 was best" in line


def test_the_best_step_is_saved_and_stays_also_after_a_resume(
    shards: str, demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = iter([0.1, 0.9, 0.3, 0.5, 0.9, 0.2])  # after steps 1 to 4 and, resumed, 5 and 6
    monkeypatch.setattr(ClassificationSet, "measure", lambda *_: Measurement([{"top1": next(values)}], Counter()))
    config = four_step_config(
        shards,
        tmp_path / "run",
        eval=EvalConfig(every=1, sets=[str(demo / "objects")], limit=8),
        checkpoint=CheckpointConfig(every="0", keep=1, best="objects/top1"),
    )
    train(config)
    assert steps(tmp_path / "run") == [2, 4]
    assert "best by objects/top1: step 2" in capsys.readouterr().out
    train(replace(config, samples=72))
    assert steps(tmp_path / "run") == [2, 6], "of equal ones the first"
    assert load_model(tmp_path / "run", "best")[2] == 2
    with refused(r"checkpoint\.best=birds/top1.*objects"):
        train(replace(config, run=str(tmp_path / "other"), checkpoint=CheckpointConfig(best="birds/top1")))


@pytest.mark.slow  # beside the test above
def test_the_best_step_is_kept_where_all_are_worse_than_the_start(
    finished: Path,
    shards: str,
    demo: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = iter([0.9, 0.1, 0.3, 0.2, 0.2])  # of the start, and after steps 1 to 4
    monkeypatch.setattr(ClassificationSet, "measure", lambda *_: Measurement([{"top1": next(values)}], Counter()))
    config = four_step_config(
        shards,
        tmp_path / "run",
        model=ModelConfig(name="test", architecture=ARCHITECTURE, weights=str(finished)),
        eval=EvalConfig(every=1, sets=[str(demo / "objects")], limit=8),
        checkpoint=CheckpointConfig(every="0", keep=1, best="objects/top1"),
    )
    train(config)
    assert steps(tmp_path / "run") == [2, 4]
    assert "best by objects/top1: step 2; the start was better" in capsys.readouterr().out


def test_a_run_learns_and_leaves_its_record(finished: Path) -> None:
    losses = curve(finished)
    assert len(losses) == 10
    assert losses[0] == pytest.approx(math.log(64), abs=1.5), (
        f"an untrained model's loss is about ln 64, not {losses[0]:.3f}"
    )
    assert losses[-1] < losses[0] - 0.1, f"loss {losses[0]:.3f} -> {losses[-1]:.3f}"
    logged = records(finished)
    record = logged[-1]
    assert not FIELDS - set(record), f"missing: {FIELDS - set(record)}"
    assert record["samples"] == 640
    assert [line["lr"] for line in logged[:2]] == [5e-4, 1e-3], "a warm-up of two steps"
    assert all(line["samples_per_s_wall"] <= line["samples_per_s"] for line in logged)
    between = sum(line["batch"] / line["samples_per_s_wall"] for line in logged[1:])
    assert between == pytest.approx(record["time"] - logged[0]["time"], rel=0.05), "evaluations are in it"
    assert record["step_s"] == pytest.approx(sum(record[f"{p}_s"] for p in ("encode", "loss", "replay", "optim")))
    evaluations = ("eval/step_00000005.json", "eval/step_00000010.json")
    for name in ("config.yaml", "env.json", *evaluations):
        assert (finished / name).stat().st_size > 0, name
    (last,) = checkpoints_of(finished)
    assert last.name == "step_00000010"
    assert checkpoint.read_description(last).version == __version__


def test_a_record_has_the_fields_that_are_declared(finished: Path) -> None:
    found = {name for line in records(finished) for name in line}
    parts = ("encode", "loss", "replay", "optim")
    measured = {"step_s", "mem_peak_bytes", *(f"{part}_s" for part in parts), *(f"mem_{part}_bytes" for part in parts)}
    a_captioners = {"contrastive_loss", "caption_loss"}
    assert found == StepRecord.__annotations__.keys() - a_captioners | measured


def test_waiting_for_data_is_a_share_of_the_step(shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first samples take long, and are waited for before the step begins; those of the third step within it."""
    decode = TrainTransform.__call__
    late = chain([0.2] * 12, [0.0] * 12, [0.1] * 12, repeat(0.0))

    def delayed(*given: Any) -> None:
        time.sleep(next(late))
        decode(*given)

    monkeypatch.setattr(TrainTransform, "__call__", delayed)
    train(four_step_config(shards, tmp_path / "run", samples=36))
    shares, seconds = zip(*((record["data_wait_frac"], record["step_s"]) for record in records(tmp_path / "run")))
    assert max(shares) <= 1 and shares[2] * seconds[2] > 0.6, (shares, seconds)


@pytest.mark.parametrize("started", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["forked", "started"])
@pytest.mark.parametrize("procs", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_number_of_processes_does_not_change_the_curve(
    demo: Path, finished: Path, tmp_path: Path, procs: int, started: bool
) -> None:
    config = ten_step_config(demo, tmp_path / "run", cache=CacheConfig(chunk=["12"]))
    if started:  # as users start them, each with loader processes
        data = replace(config.data, workers=2)
        launch_training(replace(config, data=data, launch=LaunchConfig(procs=procs)))
    else:
        run_ranks(train_on_rank, procs, config)
    assert curve(tmp_path / "run") == pytest.approx(curve(finished), rel=1e-4)


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_half_precision_follows_the_same_curve(demo: Path, finished: Path, tmp_path: Path, precision: str) -> None:
    train(ten_step_config(demo, tmp_path / "run", precision=precision))
    assert curve(tmp_path / "run") == pytest.approx(curve(finished), abs=0.02)  # 0.003 on a CPU; the curve falls by 0.9


def diverging(demo: Path, run: Path, precision: str = "fp32", **optim: Any) -> TrainConfig:
    """A first step so large that the second is not finite."""
    return ten_step_config(
        demo,
        run,
        samples=256,
        optim=OptimConfig(lr=1e30, weight_decay=0.0, **optim),
        schedule=ScheduleConfig(name="constant", warmup="0"),
        precision=precision,
        checkpoint=CheckpointConfig(every="1"),
    )


def test_a_diverging_run_stops_and_keeps_its_checkpoints(demo: Path, tmp_path: Path) -> None:
    config = diverging(demo, tmp_path / "run")
    with refused(r"training has diverged.*lower optim.lr"):
        train(config)
    assert checkpoints_of(tmp_path / "run"), "the step before the divergence must be there"


def test_half_precision_that_overflows_at_any_loss_scale_has_diverged(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An fp16 step that overflows is skipped and halves the loss scale, but not for ever."""
    monkeypatch.setattr("clipscale.step.precision.MIN_LOSS_SCALE", 2.0**15)
    with refused("training has diverged"):
        train(diverging(demo, tmp_path / "run", "fp16"))
    assert sum(record["skipped"] for record in records(tmp_path / "run")) >= 2, (
        "the scales 65,536 and 32,768 were tried"
    )


def losing_a_loader(rank: int, world_size: int, config: TrainConfig, error: Exception) -> None:
    """A rank of a run; the last one's loader is lost in the fourth step."""
    fill, receive = InProcessWorker.fill, InProcessWorker.receive
    filled = []

    def record(loader: InProcessWorker, step: int) -> None:
        filled.append(step)
        fill(loader, step)

    def lose(loader: InProcessWorker, needed: Sequence[int], *poll: Any) -> Any:
        if rank == world_size - 1 and filled[-1] == 3 and needed:
            raise error
        return receive(loader, needed, *poll)

    with (
        mock.patch.multiple(InProcessWorker, fill=record, receive=lose),
        pytest.raises(UserError, match="was killed by SIGKILL") as ended,
    ):
        train(config)
    assert ended.value.exit_status == LoaderError.exit_status, "the same command may succeed later"


def mistaken_alone(rank: int, world_size: int, config: TrainConfig) -> bool:
    """A rank of a run; the last one raises an error of the user after two steps, on which the ranks do not agree. The
    others lose it. Returns whether this rank saves."""
    run_step = TrainLoop.run_step
    error = (
        UserError("found by one rank alone") if rank == world_size - 1 else RuntimeError("Connection closed by peer")
    )

    def step(run: TrainLoop) -> StepResult:
        if run.step == 2:
            raise error
        return run_step(run)

    with (
        mock.patch.object(TrainLoop, "run_step", step),
        mock.patch.object(TrainLoop, "save_at_once") as save,
        pytest.raises(type(error), match=str(error)),
    ):
        train(config)
    return bool(save.called)


@pytest.mark.parametrize(("world_size", "saves"), [(1, True), pytest.param(2, False, marks=pytest.mark.slow)])
def test_a_rank_that_fails_alone_saves_nothing(shards: str, tmp_path: Path, world_size: int, saves: bool) -> None:
    """A save is a collective, in which it would wait for the others. If there are none, it saves."""
    config = four_step_config(shards, tmp_path / "run", samples=12 * 6, checkpoint=CheckpointConfig(every="0"))
    run = run_ranks if world_size > 1 else lambda function, ranks, *given: [function(0, ranks, *given)]
    assert run(mistaken_alone, world_size, config) == [saves] * world_size


@pytest.mark.parametrize(
    ("world_size", "error"),
    [
        (1, LoaderError("was killed by SIGKILL")),
        # Another error takes the same path.
        pytest.param(1, KeyError("was killed by SIGKILL"), marks=pytest.mark.slow),
        pytest.param(2, LoaderError("was killed by SIGKILL"), marks=pytest.mark.slow),
        pytest.param(2, KeyError("was killed by SIGKILL"), marks=pytest.mark.slow),
    ],
)
def test_a_lost_loader_saves_the_run_on_all_ranks(
    shards: str, tmp_path: Path, world_size: int, error: Exception
) -> None:
    """The others may be in the middle of a step. The run goes on as if nothing had happened."""
    config = four_step_config(shards, tmp_path / "run", samples=12 * 6, checkpoint=CheckpointConfig(every="0"))
    run = run_ranks if world_size > 1 else lambda function, ranks, *given: function(0, ranks, *given)
    run(losing_a_loader, world_size, config, error)
    assert len(curve(tmp_path / "run")) == 3
    (saved,) = checkpoints_of(tmp_path / "run")
    assert step_of(saved) == 3
    run(train_on_rank, world_size, config)
    run(train_on_rank, world_size, replace(config, run=str(tmp_path / "whole")))
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def test_out_of_memory_names_the_phase_the_chunks_and_what_to_run(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore")

    expected = "out of memory in replay, in chunks of 4 images and 6 captions"
    with monkeypatch.context() as patch, refused(expected) as raised:
        patch.setattr(GradCache, "replay", too_large)
        train(four_step_config(shards, tmp_path / "run"))
    line = str(raised.value)
    assert line.startswith("step 1: ")
    assert line.endswith("; clipscale plan with the settings of this run says what fits")


def test_a_run_that_is_let_go_frees_its_model_at_once(shards: str, tmp_path: Path) -> None:
    """It needs no garbage collector: the next stage's model is built in the memory of the last one's."""
    run = train_loop(four_step_config(shards, tmp_path / "run", ema=0.9), ONE_RANK)
    for _ in range(2):
        run.run_step()
    run.stream.close()
    model = weakref.ref(run.train_step.model)
    gc.disable()
    try:
        del run
        assert model() is None
    finally:
        gc.enable()
