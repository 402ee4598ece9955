"""Whole runs on a small demo set: they learn, resume after a kill, and do not depend on the number of processes."""

import fcntl
import json
import math
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from clipscale import checkpoint
from clipscale.autotune import CHUNKS, save_chunk_sizes, saved_chunk_sizes
from clipscale.cli import main as cli
from clipscale.config.sections import (
    CacheConfig,
    CheckpointConfig,
    EvalConfig,
    LaunchConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    ScheduleConfig,
)
from clipscale.config.train import TrainConfig, check
from clipscale.data.demo import paths, render_demo
from clipscale.data.loader.stream import DataConfig
from clipscale.data.loader.to_device import ChunkLoader, copy_stream
from clipscale.distributed import World
from clipscale.errors import StoppedError, UserError
from clipscale.launch import local
from clipscale.models.towers import build_model, load_model
from clipscale.train import Run, train
from tests.ranks import forks, run_ranks

ARCHITECTURE = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 30, "layers": 1, "width": 32, "head_width": 16, "patch_size": 10},
    "text_cfg": {"context_length": 24, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}
FIELDS = [
    "step",
    "samples",
    "loss",
    "logit_scale",
    "lr",
    "grad_norm",
    "time",
    "samples_per_s",
    "samples_per_s_wall",
    "samples_per_s_per_gpu",
    "data_wait_frac",
    "step_s",
    "encode_s",
    "loss_s",
    "replay_s",
    "optim_s",
    "mem_peak_bytes",
    "mem_encode_bytes",
    "mem_loss_bytes",
    "mem_replay_bytes",
    "mem_optim_bytes",
    "host_rss_bytes",
    "host_pinned",
    "broken",
    "broken_by",
    "faults",
    "faults_by",
    "caption_tokens",
    "mfu",
]


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One set for all of pytest's workers: whoever comes first renders it."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    with (root / "demo.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        render_demo(root / "demo", train_samples=640)
    return root / "demo"


def settings(demo: Path, run: Path, **changes: Any) -> TrainConfig:
    """A run of ten steps of 64 in chunks of 24 and 32, with every part that could break exactness at work."""
    base = TrainConfig(
        batch=64,
        samples=640,
        run=str(run),
        seed=3,
        device="cpu",
        model=ModelConfig(name="test", architecture=ARCHITECTURE),
        data=DataConfig(train=[paths(demo).train], workers=0),
        cache=CacheConfig(image_chunk=24, text_chunk=32),
        optim=OptimConfig(lr=1e-3),
        schedule=ScheduleConfig(warmup="2"),
        log=LogConfig(progress=False, report=False, every=5),
        launch=LaunchConfig(threads=1),
    )
    return check(replace(base, **changes))


def curve(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == list(range(1, len(records) + 1)), "one line a step, in order"
    return [r["loss"] for r in records]


@pytest.fixture(scope="session")
def finished(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run, to which others are compared."""
    run = tmp_path_factory.mktemp("runs") / "finished"
    sets = EvalConfig(every=5, sets=[str(demo / "objects"), str(demo / "retrieval")], limit=64)
    result = train(settings(demo, run, eval=sets, log=LogConfig(progress=False)))
    assert result["step"] == 10
    assert set(result["eval"]) == {"objects (limit 64)", "retrieval (limit 64)"}
    return run


def test_a_run_learns_and_leaves_its_record(finished: Path) -> None:
    losses = curve(finished)
    assert len(losses) == 10
    assert losses[0] == pytest.approx(math.log(64), abs=1.5), (
        f"an untrained model's loss is about ln 64, not {losses[0]:.3f}"
    )
    assert losses[-1] < losses[0] - 0.1, f"loss {losses[0]:.3f} -> {losses[-1]:.3f}"
    record = json.loads((finished / "metrics.jsonl").read_text().splitlines()[-1])
    assert not set(FIELDS) - set(record), f"missing: {set(FIELDS) - set(record)}"
    assert record["samples"] == 640
    records = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert all(one["samples_per_s_wall"] <= one["samples_per_s"] for one in records)
    between = sum(one["batch"] / one["samples_per_s_wall"] for one in records[1:])
    assert between == pytest.approx(records[-1]["time"] - records[0]["time"], rel=0.05), "evaluations are in it"
    assert [one["start_s"] > 0 for one in records if "start_s" in one] == [True] and "start_s" in records[0]
    assert record["step_s"] == pytest.approx(sum(record[f"{p}_s"] for p in ("encode", "loss", "replay", "optim")))
    for name in (
        "config.yaml",
        "env.json",
        "report.html",
        "report.png",
        "eval/step_00000005.json",
        "eval/step_00000010.json",
    ):
        assert (finished / name).stat().st_size > 0, name
    assert [p.name for p in checkpoint.found(finished)] == ["step_00000010"]


def test_a_refused_start_leaves_no_folder_and_takes_nothing_away(demo: Path, finished: Path, tmp_path: Path) -> None:
    nothing = DataConfig(train=[str(tmp_path / "none-*.tar")], workers=0)
    with pytest.raises(UserError, match="matches no shard"):
        train(settings(demo, tmp_path / "runs/new", data=nothing))
    assert not (tmp_path / "runs/new").exists()
    before = sorted(path for path in finished.rglob("*") if path.is_file())
    with pytest.raises(UserError, match="matches no shard"):
        train(settings(demo, finished, data=nothing))
    assert sorted(path for path in finished.rglob("*") if path.is_file()) == before


def test_resuming_a_finished_run_says_so_and_trains_no_further(
    demo: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = curve(finished)
    assert train(settings(demo, finished))["step"] == 10
    printed = capsys.readouterr().out
    assert "going on after step 10 of 10; changed: eval.every 5 -> 0, eval.sets [" in printed, printed
    assert "is complete at step 10: nothing is left to train" in printed
    assert curve(finished) == before


def test_the_trained_model_is_loaded_as_it_was_saved(finished: Path) -> None:
    model, _, step = load_model(finished)
    assert step == 10
    state = checkpoint.load(checkpoint.found(finished)[-1])["model"]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def train_in_process(demo: Path, run: Path) -> None:
    """A whole run with patch dropout, so that resuming has to restore the random state."""
    model = ModelConfig(name="test", architecture=ARCHITECTURE, patch_dropout=0.3)
    try:
        train(settings(demo, run, model=model, checkpoint=CheckpointConfig(every=3)))
    except BaseException:
        (run / "error").write_text(traceback.format_exc())
        raise


def start(demo: Path, run: Path) -> ForkServerProcess:
    process = forks().Process(target=train_in_process, args=(demo, run))
    process.start()
    return process


def wait_for_lines(process: ForkServerProcess, path: Path, lines: int) -> None:
    deadline = time.monotonic() + 120
    while not path.exists() or len(path.read_text().splitlines()) < lines:
        assert process.is_alive(), f"ended early: {(path.parent / 'error').read_text()}"
        assert time.monotonic() < deadline, "no progress within 120 s"
        time.sleep(0.005)


def test_a_killed_run_resumes_to_the_same_losses_bit_for_bit(demo: Path, tmp_path: Path) -> None:
    whole = start(demo, tmp_path / "whole")
    killed = start(demo, tmp_path / "killed")
    wait_for_lines(killed, tmp_path / "killed/metrics.jsonl", 5)
    killed.kill()
    killed.join()
    assert len(checkpoint.found(tmp_path / "killed")) >= 1
    done = len((tmp_path / "killed/metrics.jsonl").read_text().splitlines())
    assert done < 10, "the run must be killed before its end for this to test anything"
    again = start(demo, tmp_path / "killed")
    for process in (whole, again):
        process.join(180)
        assert process.exitcode == 0, process
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")
    records = [json.loads(line) for line in (tmp_path / "killed/metrics.jsonl").read_text().splitlines()]
    assert [one["step"] % 3 for one in records if "start_s" in one] == [1, 1], "of the start, and after a checkpoint"


def test_a_second_run_of_the_same_name_is_refused_and_changes_nothing(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(demo, tmp_path / "run")
    wait_for_lines(first, tmp_path / "run/metrics.jsonl", 1)
    monkeypatch.setattr("clipscale.launch.run_lock.SAME_HOST_S", 0.0)
    with pytest.raises(UserError, match=rf"run={tmp_path}/run is in use by process {first.pid} on "):
        train(settings(demo, tmp_path / "run"))
    first.join(180)
    assert first.exitcode == 0
    assert len(curve(tmp_path / "run")) == 10


def test_a_full_disk_costs_a_checkpoint_but_not_the_run(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = iter([0, 2**40, 0])
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=next(free)))
    config = settings(demo, tmp_path / "run", samples=192, checkpoint=CheckpointConfig(every=1))
    with pytest.raises(
        UserError, match=r"step_00000003.*are free\); the newest complete one is step_00000002; free some"
    ):
        train(config)
    (notice,) = [line for line in caplog.messages if "could not be written" in line]
    assert "step_00000001 could not be written" in notice
    assert notice.endswith("there is no earlier one; training goes on without it, free some space")
    assert len(curve(tmp_path / "run")) == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_saves_before_the_end(demo: Path, tmp_path: Path, number: signal.Signals) -> None:
    process = start(demo, tmp_path / "run")
    wait_for_lines(process, tmp_path / "run/metrics.jsonl", 1)
    assert process.pid
    os.kill(process.pid, number)
    process.join(120)
    assert process.exitcode != 0
    assert "stopped by a signal after step" in (tmp_path / "run/error").read_text()
    step = len(curve(tmp_path / "run"))
    assert checkpoint.found(tmp_path / "run")[-1] == checkpoint.path_of(tmp_path / "run", step)


def test_a_run_that_was_stopped_ends_with_the_signals_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(argv: list[str]) -> int:
        raise StoppedError("stopped by a signal after step 3; go on with run=a resume=auto")

    monkeypatch.setattr(cli, "dispatch", stopped)
    assert cli.main(["train"]) == 143
    assert capsys.readouterr().err == "error: stopped by a signal after step 3; go on with run=a resume=auto\n"


def on_a_rank(rank: int, world: int, config: TrainConfig) -> None:
    train(config)


def signalled_on_one_rank(rank: int, world: int, config: TrainConfig, number: int, victim: int) -> tuple[int, int, int]:
    """A rank gets the signal within its second step. Its status and step, and how many collectives decide on a step's save."""
    step, due, all_reduce = Run.optimizer_step, Run.save_due, torch.distributed.all_reduce
    calls: list[int] = []
    steps: list[int] = []

    def with_signal(run: Run) -> dict[str, Any]:
        if rank == victim and run.step == 1:
            os.kill(os.getpid(), number)
        return step(run)

    def counted(run: Run) -> bool:
        with (
            patch.object(torch.distributed, "all_reduce", lambda *a, **k: calls.append(1) or all_reduce(*a, **k)),
            patch.object(torch.distributed, "broadcast_object_list", side_effect=AssertionError("two broadcasts")),
        ):
            steps.append(run.step)
            return due(run)

    with patch.object(Run, "optimizer_step", with_signal), patch.object(Run, "save_due", counted):
        try:
            train(config)
        except StoppedError as stopped:
            return stopped.number, steps[-1], len(calls)
    return 0, steps[-1], len(calls)


@pytest.mark.parametrize(
    ("number", "victim"),
    [
        (signal.SIGTERM, 1),
        pytest.param(signal.SIGTERM, 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, 1, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_any_rank_stops_all_at_one_step_with_a_save(
    demo: Path, tmp_path: Path, number: signal.Signals, victim: int
) -> None:
    found = run_ranks(signalled_on_one_rank, 2, settings(demo, tmp_path / "run"), int(number), victim)
    assert found == [(signal.SIGTERM, 2, 2)] * 2, "status, step, and one reduction in each of two steps"
    assert [path.name for path in checkpoint.found(tmp_path / "run")] == ["step_00000002"]


@pytest.mark.parametrize("started", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["forked", "started"])
@pytest.mark.parametrize("procs", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_number_of_processes_does_not_change_the_curve(
    demo: Path, finished: Path, tmp_path: Path, procs: int, started: bool
) -> None:
    config = settings(demo, tmp_path / "run", cache=CacheConfig(chunk="12"))
    if started:  # as users start them, each with loader processes
        data = DataConfig(train=[paths(demo).train], workers=2)
        local.run(replace(config, data=data, launch=LaunchConfig(procs=procs, threads=1)))
    else:
        run_ranks(on_a_rank, procs, config)
    one, several = curve(finished), curve(tmp_path / "run")
    worst = max(abs(a - b) / a for a, b in zip(one, several, strict=True))
    assert worst < 1e-4, f"{procs} processes: {several} instead of {one}"


def test_a_run_goes_on_with_another_number_of_processes_and_another_parallelism(demo: Path, tmp_path: Path) -> None:
    constant = ScheduleConfig(name="constant", warmup="0")
    for samples, procs in ((320, 2), (640, 1)):
        config = settings(demo, tmp_path / "run", samples=samples, schedule=constant)
        run_ranks(on_a_rank, procs, replace(config, launch=LaunchConfig(threads=1, parallel="fsdp")))
    train(settings(demo, tmp_path / "whole", schedule=constant))
    worst = max(abs(a - b) / a for a, b in zip(curve(tmp_path / "run"), curve(tmp_path / "whole"), strict=True))
    assert worst < 1e-4, f"{curve(tmp_path / 'run')} instead of {curve(tmp_path / 'whole')}"


def test_chunks_found_on_another_device_are_found_anew(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They may be too large for it. Without dropout the curve stays the same to rounding; with it, a line says that it does not."""
    for rate, said in ((0.0, False), (0.3, True)):
        run = tmp_path / f"run{rate}"
        model = ModelConfig(name="test", architecture=ARCHITECTURE, patch_dropout=rate)
        config = settings(
            demo, run, samples=128, model=model, cache=CacheConfig(), checkpoint=CheckpointConfig(every=1)
        )
        train(replace(config, samples=64))
        card = {"image": 16, "text": 16, "device": "NVIDIA H200, 140 GiB"}
        save_chunk_sizes(run, card)
        checkpoint.save(run, 1, checkpoint.load(checkpoint.path_of(run, 1)) | {"chunks": card}, keep=0)
        capsys.readouterr()
        train(config)
        out = " ".join(capsys.readouterr().out.split())
        assert (
            "cache.chunk=auto: 16 and 16 samples were found on NVIDIA H200, 140 GiB; on cpu they are 64 and 64" in out
        )
        assert ("resumed with chunks of [64, 64] samples instead of [16, 16]: the towers draw other" in out) == said, (
            out
        )
        assert saved_chunk_sizes(run) == {"image": 64, "text": 64, "device": "cpu"}


@pytest.mark.slow
def test_a_run_goes_on_with_any_number_of_processes(
    demo: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """From 1 to 3, which share the 64 shard streams unevenly. The global batches stay the same."""
    constant = ScheduleConfig(name="constant", warmup="0")
    given = {"batch": 48, "schedule": constant, "cache": CacheConfig(chunk="8")}
    train(settings(demo, tmp_path / "run", samples=96, **given))
    run_ranks(on_a_rank, 3, settings(demo, tmp_path / "run", samples=192, **given))
    assert "other random numbers" not in capfd.readouterr().out, "there are none"
    train(settings(demo, tmp_path / "whole", samples=192, **given))
    worst = max(abs(a - b) / a for a, b in zip(curve(tmp_path / "run"), curve(tmp_path / "whole"), strict=True))
    assert worst < 1e-4, f"{curve(tmp_path / 'run')} instead of {curve(tmp_path / 'whole')}"


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_half_precision_follows_the_same_curve(demo: Path, finished: Path, tmp_path: Path, precision: str) -> None:
    train(settings(demo, tmp_path / "run", precision=PrecisionConfig(name=precision)))
    worst = max(abs(a - b) for a, b in zip(curve(finished), curve(tmp_path / "run"), strict=True))
    assert worst < 0.15, f"{precision}: {curve(tmp_path / 'run')} instead of {curve(finished)}"


def test_kept_graphs_do_not_change_the_curve(demo: Path, finished: Path, tmp_path: Path) -> None:
    train(settings(demo, tmp_path / "run", cache=CacheConfig(image_chunk=24, text_chunk=32, keep="auto")))
    assert curve(tmp_path / "run") == pytest.approx(curve(finished), rel=1e-5)


def test_negatives_from_the_chunk_alone_are_those_of_plain_accumulation(demo: Path, tmp_path: Path) -> None:
    """At a small logit scale every candidate is about as likely, so the first loss is the logarithm of how many there are."""
    model = ModelConfig(name="test", architecture=ARCHITECTURE, init_scale=0.1)
    for negatives, candidates in (("batch", 64), ("chunk", 16)):
        cache = CacheConfig(image_chunk=16, text_chunk=32, negatives=negatives)
        train(settings(demo, tmp_path / negatives, samples=64, model=model, cache=cache))
        loss = curve(tmp_path / negatives)[0]
        assert abs(loss - math.log(candidates)) < 0.1, (
            f"{negatives}: {loss:.3f}, ln {candidates} is {math.log(candidates):.3f}"
        )


def test_pictures_of_another_size_are_for_towers_without_positions(demo: Path, tmp_path: Path) -> None:
    data = DataConfig(train=[paths(demo).train], workers=0, image_size=20)
    with pytest.raises(UserError, match=r"^data.image_size=20: model.name=test has learned positions for 30 pixels"):
        train(settings(demo, tmp_path / "vit", data=data))
    assert not (tmp_path / "vit").exists()


def test_a_frozen_tower_does_not_change(demo: Path, tmp_path: Path) -> None:
    train(
        settings(demo, tmp_path / "run", model=ModelConfig(name="test", architecture=ARCHITECTURE, freeze_image=True))
    )
    torch.manual_seed(3)
    fresh = build_model(ModelConfig(name="test", architecture=ARCHITECTURE)).state_dict()
    trained = checkpoint.load(checkpoint.found(tmp_path / "run")[-1])["model"]
    for name, value in fresh.items():
        if name.startswith("image"):
            assert torch.equal(value, trained[name]), f"{name} of the frozen tower changed"
    assert not torch.equal(fresh["text.encoder.text_projection"], trained["text.encoder.text_projection"])


def diverging(demo: Path, run: Path, on_divergence: str) -> TrainConfig:
    return settings(
        demo,
        run,
        optim=OptimConfig(lr=1e30, weight_decay=0.0, on_divergence=on_divergence),
        schedule=ScheduleConfig(name="constant", warmup="0"),
        checkpoint=CheckpointConfig(every=1),
    )


def test_a_diverging_run_stops_and_keeps_its_checkpoints(demo: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"training has diverged.*lower optim.lr"):
        train(diverging(demo, tmp_path / "run", "stop"))
    assert checkpoint.found(tmp_path / "run"), "the step before the divergence must be there"
    (left,) = (tmp_path / "run/diverged").iterdir()
    state = torch.load(left, weights_only=True)
    assert len(state["samples"].unique()) == 64, "the ids of the batch at which it happened"
    assert not math.isfinite(state["loss"]) or not math.isfinite(state["grad_norm"])


def test_half_precision_that_overflows_at_any_loss_scale_has_diverged(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fp16 a step that overflows is skipped and halves the loss scale, but not for ever."""
    monkeypatch.setattr("clipscale.precision.LEAST_LOSS_SCALE", 2.0**14)
    config = replace(diverging(demo, tmp_path / "run", "stop"), precision=PrecisionConfig("fp16"))
    with pytest.raises(UserError, match="training has diverged"):
        train(config)
    found = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert sum(record["skipped"] for record in found) >= 2, "the scales 65,536 and 32,768 were tried"


def test_a_run_taken_back_goes_on_from_there(demo: Path, tmp_path: Path) -> None:
    config = settings(demo, tmp_path / "run", samples=256, checkpoint=CheckpointConfig(every=1, keep=0))
    train(config)
    folder = tmp_path / "run/checkpoints"
    train(replace(config, samples=192, resume=str(folder / "step_00000002")))
    assert sorted(path.name for path in folder.iterdir()) == [
        "step_00000001",
        "step_00000002",
        "step_00000003",
        "step_00000003.aside",
        "step_00000004.aside",
    ]


def test_steps_that_are_not_finite_can_be_skipped(demo: Path, tmp_path: Path) -> None:
    train(diverging(demo, tmp_path / "run", "skip"))
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(records) == 10
    assert records[-1]["skipped"]
    assert not records[0]["skipped"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache": CacheConfig(chunk="65")}, "cache.chunk=65: one process holds 64 samples"),
        ({"cache": CacheConfig(text_chunk=200)}, "cache.text_chunk=200"),
        ({"cache": CacheConfig(keep="some")}, "cache.keep=some: give none, auto, or bytes"),
        ({"samples": 32}, "samples=32 is less than one batch=64"),
        ({"data": DataConfig(train=["/nowhere/*.tar"], workers=0)}, "/nowhere"),
        ({"run": "/proc/run"}, "run=/proc/run cannot be written"),
        ({"resume": "/nowhere.pt"}, "resume=/nowhere.pt: there is no such file or run folder"),
    ],
)
def test_mistakes_are_named(demo: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        train(settings(demo, **{"run": tmp_path / "run", **changes}))


def test_what_does_not_fit_a_checkpoint_is_named(demo: Path, finished: Path) -> None:
    other = {**ARCHITECTURE, "embed_dim": 16}
    for changes, message in (
        ({"model": ModelConfig(name="test", architecture=other)}, "model.architecture"),
        ({"resume": "none"}, "already holds checkpoints"),
        ({"batch": 128, "cache": CacheConfig(chunk="64")}, "trained with batch=64; go on with that"),
        ({"optim": OptimConfig(name="lamb")}, "optimizer is adamw, not optim.name=lamb"),
        (
            {"model": ModelConfig(name="test", architecture=ARCHITECTURE, freeze_image=True)},
            "does not fit this model's parameters",
        ),
    ):
        with pytest.raises(UserError, match=message):
            train(settings(demo, finished, **changes))
    assert len(curve(finished)) == 10, "a refused resume changes nothing"


# -- several ranks that do not see the same --------------------------------------------------------------------------------


class WithPeer(World):
    """A world with an imaginary second rank, whose value is `answer(own value)`."""

    answer: Callable[[Any], Any]

    def gather(self, value: Any) -> list[Any]:
        return [value, self.answer(value)]


def with_peer(answer: Callable[[Any], Any]) -> WithPeer:
    world = WithPeer(0, 1, torch.device("cpu"))
    vars(world)["answer"] = answer
    return world


def test_ranks_that_find_different_checkpoints_do_not_start(demo: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"different checkpoints \(rank 0: none, rank 1: step 7\)"):
        Run(settings(demo, tmp_path / "run"), with_peer(lambda value: 7 if value is None else value))


def test_ranks_that_see_different_shards_do_not_start(demo: Path, tmp_path: Path) -> None:
    def other(value: Any) -> Any:
        return {**value, "order": "other"} if isinstance(value, dict) and "order" in value else value

    with pytest.raises(UserError, match="the processes see different shards"):
        Run(settings(demo, tmp_path / "run"), with_peer(other))


def test_a_rank_judges_the_memory_before_others_take_theirs(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def look() -> int:
        events.append("looked")
        return 2**30

    monkeypatch.setattr("clipscale.state.start.free_memory", look)
    monkeypatch.setattr("clipscale.data.loader.memory.free_memory", lambda: 0)  # the others have been quicker

    class Waits(World):
        def gather(self, value: Any) -> list[Any]:
            events.append("waited")
            return [value]

    run = Run(settings(demo, tmp_path / "run"), Waits(0, 1, torch.device("cpu")))
    run.stream.close()
    assert events[events.index("looked") + 1] == "waited"
    assert "of 1.00 GiB free" in run.stream.memory


def test_chunk_sizes_are_replaced_atomically_while_other_ranks_read_them(tmp_path: Path) -> None:
    save_chunk_sizes(tmp_path, {"image": 64, "text": 128})
    with (tmp_path / CHUNKS).open() as reading:
        save_chunk_sizes(tmp_path, {"image": 32, "text": 32})
        assert json.load(reading) == {"image": 64, "text": 128}
    assert saved_chunk_sizes(tmp_path) == {"image": 32, "text": 32}
    assert [path.name for path in tmp_path.iterdir()] == [CHUNKS]


def test_batches_share_one_stream_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch cycles through 32 streams, and its allocator keeps memory for each."""
    copy_stream.cache_clear()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    device = torch.device("cuda", 0)
    try:
        streams = [ChunkLoader(lambda a, b: torch.empty(0), 1, device, resident=False).copies for _ in range(3)]
    finally:
        copy_stream.cache_clear()
    assert len({id(stream) for stream in streams}) == 1
