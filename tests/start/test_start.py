"""How a run begins: refused with one line, resumed, taken back, or alike on every rank."""

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from clipscale.cli.complete_run import result_if_complete
from clipscale.common.errors import UserError
from clipscale.config.data import DataConfig
from clipscale.config.model import ModelConfig, TowerConfig
from clipscale.config.sections import (
    CacheConfig,
    CheckpointConfig,
    EvalConfig,
    LaunchConfig,
    LossConfig,
    OptimConfig,
    ScheduleConfig,
)
from clipscale.config.stages import StageConfig
from clipscale.config.train_config import TrainConfig
from clipscale.data.loader.open_stream import open_stream
from clipscale.data.loader.position import DataPosition
from clipscale.data.loader.stream import TrainStream
from clipscale.distributed.agreement import AgreedError
from clipscale.distributed.fsdp import fsdp_modules
from clipscale.distributed.world import World
from clipscale.eval.run import ResultsFile
from clipscale.models.towers import build_model, image_size_and_tokenizer
from clipscale.run_folder.paths import RESULT, checkpoints_of
from clipscale.run_folder.set_aside import set_aside_for_resume
from clipscale.start.build import build
from clipscale.start.resolve import precision_notices, resolve
from clipscale.step.chunk_sizes import ChunkProbe
from clipscale.tools.report.runs import read_runs
from clipscale.train import train
from tests.conftest import Capture
from tests.eval.sets import classification_set
from tests.support.checkpoints import ONE_RANK, save_model
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


def contents(folder: Path) -> dict[Path, bytes]:
    """The files of a folder, and what is in them."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_refused_start_takes_nothing_away(demo: Path, finished: Path, tmp_path: Path) -> None:
    nothing = DataConfig(train=[str(tmp_path / "none-*.tar")], workers=0)
    before = contents(finished)
    with refused("matches no shard"):
        train(ten_step_config(demo, finished, data=nothing))
    assert contents(finished) == before


def test_resuming_a_finished_run_says_so_and_trains_no_further(demo: Path, finished: Path, capsys: Capture) -> None:
    before = curve(finished)
    assert train(ten_step_config(demo, finished))["step"] == 10
    printed = capsys.readouterr().out
    assert "is complete at step 10 of 10; changed: eval.every 5 -> 0, eval.sets [" in printed, printed
    assert "nothing is left to train" in printed
    assert "learning rate" not in printed, "it is the same"
    assert curve(finished) == before


@pytest.mark.parametrize("has_bf16", [True, False])
def test_a_cpu_without_instructions_for_bf16_is_said(monkeypatch: pytest.MonkeyPatch, *, has_bf16: bool) -> None:
    monkeypatch.setattr("clipscale.start.resolve.cpu_has_bf16", lambda: has_bf16)
    notices = precision_notices(TrainConfig(precision="bf16"), "cpu")
    assert ["precision=fp32" in notice for notice in notices] == [True] * (not has_bf16)
    assert precision_notices(TrainConfig(precision="bf16"), "cuda") == []
    assert precision_notices(TrainConfig(precision="fp32"), "cpu") == []


def test_a_longer_run_says_that_its_learning_rate_jumps(shards: str, tmp_path: Path, capsys: Capture) -> None:
    config = four_step_config(shards, tmp_path / "run", schedule=ScheduleConfig(warmup="0"))
    train(config)
    train(replace(config, samples=192))
    last, following = [record["lr"] for record in records(tmp_path / "run")[3:5]]
    assert last < 2e-4 and following > 8e-4
    assert f"learning rate of this step {last:.1e} -> " in capsys.readouterr().out


def started(rank: int, world_size: int, *configs: TrainConfig) -> tuple[list[int], list[bool]]:
    """Start the runs. Only rank 1 knows that these are other attempts.

    Returns their first steps, and for each tower whose chunk size is looked for whether it is sharded.
    """
    steps, is_sharded = list[int](), list[bool]()

    def find(probe: ChunkProbe, rows: int, *, keeps_graphs: bool) -> int:
        is_sharded.append(bool(fsdp_modules(probe.encoder)))
        return 4

    with (
        mock.patch.dict(os.environ, {"TORCHELASTIC_RESTART_COUNT": str(rank)}),
        mock.patch("clipscale.step.chunk_sizes.find_chunk", find),
    ):
        for config in configs:
            run = train_loop(config, World(rank, world_size, torch.device("cpu")))
            run.stream.close()
            steps.append(run.step)
    return steps, is_sharded


@pytest.mark.slow  # a run of two ranks, and two starts
def test_ranks_start_alike_whatever_each_knows_and_measures(shards: str, tmp_path: Path) -> None:
    """torchrun's agent counts only its own restarts, and a rank with little memory tries fewer sizes."""
    config = four_step_config(
        shards, tmp_path / "run", launch=LaunchConfig(parallel="zero3"), checkpoint=CheckpointConfig("2")
    )
    run_ranks(train_on_rank, 2, replace(config, samples=24))
    other = replace(config, run=str(tmp_path / "other"), cache=CacheConfig())
    resumed = replace(other, run=str(tmp_path / "resumed"), resume=str(tmp_path / "run"))
    assert run_ranks(started, 2, other, resumed) == [([0, 2], [False, False])] * 2


def started_from(rank: int, world_size: int, config: TrainConfig) -> str:
    """Begin a run. Only rank 0 sees the newest checkpoint of the run that it begins from. Returns the locked tower."""
    seen = mock.patch(
        "clipscale.run_folder.chosen_checkpoint.checkpoints_of", lambda run: checkpoints_of(run)[: 2 - rank]
    )
    with seen:
        run = train_loop(config, World(rank, world_size, torch.device("cpu")))
    run.stream.close()
    return run.train_step.model.image.digest()


def test_ranks_start_from_one_checkpoint_of_a_run_that_trains_on(shards: str, tmp_path: Path) -> None:
    config = four_step_config(shards, tmp_path / "run", precision="fp32")
    for step in (2, 4):
        torch.manual_seed(step)
        newest = build_model(config.model)
        save_model(tmp_path / "run", newest, config.model, step)
    model = replace(config.model, weights=str(tmp_path / "run"), image=TowerConfig(train="none"))
    tuned = replace(config, run=str(tmp_path / "tuned"), model=model)
    assert run_ranks(started_from, 2, tuned) == [newest.image.digest()] * 2


@pytest.mark.parametrize(("batch", "times"), [(48, ""), (120, "2.5 times")])
def test_a_batch_larger_than_the_data_is_warned_of(
    shards: str, tmp_path: Path, capsys: Capture, batch: int, times: str
) -> None:
    """The data has 48 pairs."""
    train_loop(four_step_config(shards, tmp_path / "run", batch=batch, samples=batch), ONE_RANK).stream.close()
    printed = capsys.readouterr().err
    assert ("batch=48 or less" in printed) == bool(times) and times in printed, printed


def test_a_run_taken_back_goes_on_from_there(shards: str, tmp_path: Path) -> None:
    config = four_step_config(shards, tmp_path / "run", checkpoint=CheckpointConfig(every="1", keep=0))
    train(config)
    folder = tmp_path / "run/checkpoints"
    before = curve(tmp_path / "run")
    ResultsFile(tmp_path / "run", 4).add("set", {"top1": 0.0}, {})
    train(replace(config, samples=36, resume=str(folder / "step_00000002")))
    assert curve(tmp_path / "run/earlier") == before
    assert (tmp_path / "run/earlier/step_00000004.json").is_file() and not [*tmp_path.glob("run/eval/*")]
    assert sorted(path.name for path in folder.iterdir()) == [
        "step_00000001",
        "step_00000002",
        "step_00000003",
        "step_00000003.aside",
        "step_00000004.aside",
    ]


def test_what_does_not_fit_a_checkpoint_is_named(demo: Path, finished: Path) -> None:
    other = {**ARCHITECTURE, "embed_dim": 16}
    before = contents(finished)
    stages = [StageConfig(samples=160, batch=32), StageConfig(samples=480)]
    for changes, message in (
        ({"model": ModelConfig(name="test", architecture=other)}, "model.architecture"),
        ({"model": ModelConfig(name="other", architecture=ARCHITECTURE)}, "model.name='other': .* trained with 'test'"),
        ({"stages": stages, "samples": None}, "has seen 640 samples in 10 steps, which these stages"),
        ({"resume": "none"}, "already holds checkpoints"),
        ({"batch": 128, "cache": CacheConfig(chunk=["64"])}, "batch=128: the checkpoint was trained with 64"),
        ({"batch": 32, "cache": CacheConfig(chunk=["64"])}, "batch=32: the checkpoint was trained with 64"),
        ({"optim": OptimConfig(name="lamb")}, "trained with .adamw."),
        (
            {"model": ModelConfig(name="test", architecture=ARCHITECTURE, image=TowerConfig(train="none"))},
            "does not fit this model's parameters: only the checkpoint trains image.encoder",
        ),
        (
            {"model": ModelConfig(name="test", architecture=ARCHITECTURE, init_bias=-10.0)},
            "only this run trains logit_bias; train the same ones",
        ),
    ):
        with refused(message):
            train(ten_step_config(demo, finished, **changes))
    assert contents(finished) == before, "a refused resume changes nothing"


def test_ranks_that_see_different_shards_do_not_start(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_peer(world: World, value: Any) -> list[Any]:
        return [value, replace(value, order_fingerprint="other") if isinstance(value, DataPosition) else value]

    monkeypatch.setattr(World, "all_gather_object", with_peer)
    with refused("the processes see different shards"):
        train_loop(ten_step_config(demo, tmp_path / "run"), ONE_RANK)


@pytest.mark.parametrize("part", ["clipscale.start.build.build_model", "clipscale.start.build.Flops.of_model"])
def test_data_workers_start_before_the_model_is_built_and_end_if_a_later_part_fails(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    streams = []

    def opened(*arguments: Any, **options: Any) -> TrainStream:
        streams.append(open_stream(*arguments, **options))
        return streams[0]

    def impossible(*_: Any, **__: Any) -> None:
        assert streams[0].workers.processes[0].exitcode is None
        raise UserError("impossible")

    monkeypatch.setattr("clipscale.start.open_data.open_stream", opened)
    monkeypatch.setattr(part, impossible)
    config = four_step_config(shards, tmp_path / "run")
    with refused("impossible"):
        train_loop(replace(config, data=replace(config.data, workers=1)), ONE_RANK)
    assert streams[0].workers.processes[0].exitcode is not None


def test_a_start_refuses_settings_that_nobody_has_checked_before_it_starts_workers(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line has checked them; a caller of `train` may not have."""
    monkeypatch.setattr("clipscale.start.start_run.build", lambda *_: pytest.fail("it has begun to build"))
    config = four_step_config(shards, tmp_path / "run")
    for changes, message in (
        ({"checkpoint": CheckpointConfig(every="soon")}, "checkpoint.every=soon"),
        ({"expected": {"top1": "about 60"}}, "expected"),
    ):
        with refused(message):
            train_loop(replace(config, **changes), ONE_RANK)


@pytest.mark.parametrize("name", ["ViT-B-32", "RN50", "ViT-B-16-SigLIP-256", "MobileCLIP2-S0"])
def test_workers_know_the_inputs_of_a_model_before_it_is_built(name: str) -> None:
    config = ModelConfig(name=name)
    image_size, tokenizer = image_size_and_tokenizer(config)
    with torch.device("meta"):
        model = build_model(config)
    assert (image_size, tokenizer.length) == (model.image_size, model.context_length)


def test_flops_are_those_of_the_model_that_runs(shards: str, tmp_path: Path) -> None:
    """A checkpoint says the sizes that the settings leave open."""
    larger = ModelConfig(name="test", architecture=ARCHITECTURE, image_size=60)
    train(four_step_config(shards, tmp_path / "larger", samples=12, model=larger))
    checkpoint = str(tmp_path / "larger/checkpoints/step_00000001")
    rates = []
    for name, model in (("given", larger), ("left open", replace(larger, image_size=None))):
        config = four_step_config(shards, tmp_path / name, samples=24, model=model, resume=checkpoint)
        built = build(resolve(config, Path(checkpoint), ONE_RANK), ONE_RANK)
        rates.append(built.flops.per_sample())
        built.stream.close()
    assert rates[0] == rates[1]


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "run.lock", "checkpoints/step_9", "thesis/a"])
def test_a_folder_of_somebody_else_is_refused_and_keeps_its_files(shards: str, tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with refused(f"^run={tmp_path} is not the folder of a run: it holds {name[:6]}.*; choose another run=NAME"):
        train(four_step_config(shards, tmp_path))
    assert [path.read_text() for path in tmp_path.rglob("*") if path.is_file()] == ["mine"]


def test_a_folder_with_a_log_alone_is_taken(shards: str, tmp_path: Path) -> None:
    """A shell has made the log, and no run has the folder."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/job.out").touch()
    assert train(four_step_config(shards, tmp_path / "run"))["step"] == 4


def test_a_run_whose_checkpoints_were_removed_begins_beside_its_records(
    shards: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = four_step_config(shards, tmp_path / "run", samples=12)
    for _ in range(3):
        train(config)
        (tmp_path / "run/eval").mkdir(exist_ok=True)
        shutil.rmtree(tmp_path / "run/checkpoints")
    assert curve(tmp_path / "run/earlier") == curve(tmp_path / "run/earlier-2") == curve(tmp_path / "run")
    assert len([*(tmp_path / "run/earlier-2").iterdir()]) == 5, "with its settings, its result and evaluations"
    assert caplog.text.count("begins again") == 2


SLOW = pytest.mark.slow


# The others take the same path: a list is JSON of another kind, and half a line is no JSON, as zeros are none.
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(b"\0\0\n", marks=SLOW),
        pytest.param(b"[1]\n", marks=SLOW),
        pytest.param(b'{"step": [\n', marks=SLOW),
        b"caf\xe9: [\n",
    ],
)
def test_a_damaged_record_is_one_line_and_the_run_goes_on(
    shards: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes
) -> None:
    run = tmp_path / "run"
    config = four_step_config(shards, run)
    train(replace(config, samples=24))
    results = ResultsFile(run, 2)
    results.add("set", {"top1": 0.0}, {})
    records = [run / "config.yaml", run / "metrics.jsonl", results.path, run / RESULT]
    for path in records:
        path.write_bytes(path.read_bytes() * (path.name == "metrics.jsonl") + damage)
        if path.name != RESULT:
            with refused(f"{path}.*; .*again"):
                read_runs([run])
            path.rename(path.with_suffix(".kept"))
    for path in records[:-1]:
        path.with_suffix(".kept").rename(path)
    assert result_if_complete(replace(config, samples=24)) is None
    results.add("set", {"top1": 1.0}, {})
    assert train(config)["step"] == len(curve(run)) == 4
    assert read_runs([run])[0].evaluations[0]["results"] == {"set": {"top1": 1.0}}
    assert sum(path.read_bytes().endswith(damage) for path in run.rglob("*.damaged")) == len(records)
    assert sum("is damaged" in message and "continues" in message for message in caplog.messages) == len(records)


def start_on_a_full_disk(rank: int, world_size: int, config: TrainConfig) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", str(Path(config.run) / "env.json"))
    with (
        mock.patch("clipscale.start.start_run.open_run_log", side_effect=full),
        pytest.raises(AgreedError, match=r"run=.*env\.json cannot be written \(No space left on device\)"),
    ):
        train(config)


def test_a_record_that_cannot_be_written_ends_the_start_of_all_ranks(shards: str, tmp_path: Path) -> None:
    """Rank 0 alone writes records."""
    run_ranks(start_on_a_full_disk, 2, four_step_config(shards, tmp_path / "run"))


def test_a_best_checkpoint_may_be_that_of_a_size(shards: str, tmp_path: Path) -> None:
    """Without the size the goal means the whole features."""
    sets = EvalConfig(sets=[str(classification_set(tmp_path / "classes"))])
    config = four_step_config(shards, tmp_path / "run", eval=sets, loss=LossConfig(sizes=[8]))
    for goal in ("classes (size 8)/top1", "classes/top1"):
        train_loop(replace(config, checkpoint=CheckpointConfig(best=goal)), ONE_RANK).stream.close()
    with refused(r"classes \(size 9\)/top1: no such set .* classes, classes \(size 8\)"):
        train_loop(replace(config, checkpoint=CheckpointConfig(best="classes (size 9)/top1")), ONE_RANK)


def test_results_after_the_resumed_step_are_set_aside_without_a_later_checkpoint(tmp_path: Path) -> None:
    """The run was killed between an evaluation and its next save."""
    for step in (2, 4):
        ResultsFile(tmp_path, step).add("birds", {"top1": 0.5}, {})
    set_aside_for_resume(tmp_path, 2, starts_from_other_folder=False)
    assert [path.name for path in (tmp_path / "eval").iterdir()] == ["step_00000002.json"]
    assert [path.name for path in (tmp_path / "earlier").iterdir()] == ["step_00000004.json"]
