"""The stages of a run are one run: one curve, one order of samples, resumed anywhere bit for bit."""

import shutil
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from open_clip.model import resize_pos_embed, resize_text_pos_embed

from clipscale import checkpoint
from clipscale.checkpoint.upload import copy_checkpoint
from clipscale.cli.compose import compose_settings
from clipscale.cli.main import main
from clipscale.cli.train_verb import with_defaults
from clipscale.cli.words import overrides_of
from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.config.config_file import to_yaml
from clipscale.config.data import DataConfig
from clipscale.config.model import TowerConfig
from clipscale.config.parse import dataclass_from
from clipscale.config.sections import (
    CacheConfig,
    CheckpointConfig,
    EvalConfig,
    LaunchConfig,
    OptimConfig,
    ScheduleConfig,
)
from clipscale.config.stages import OptimizerPolicy, StageConfig
from clipscale.config.train_config import TrainConfig
from clipscale.distributed.world import World
from clipscale.loss.runtime import current_runtime
from clipscale.run_folder.paths import checkpoint_path, checkpoints_of, step_of
from clipscale.start.start_run import start_run
from clipscale.train import train
from tests.eval.sets import pair_set
from tests.support import runs
from tests.support.checkpoints import ONE_RANK
from tests.support.ranks import run_ranks
from tests.support.runs import curve, four_step_config, records, train_loop
from tests.support.user_errors import refused

# Three steps and four: the first does not use the last two of its samples.
STAGES: list[dict[str, Any]] = [
    {"samples": 38, "batch": 12, "image_size": 20, "context_length": 5,
     "patch_dropout": 0.3, "lr": 2e-3},
    {"samples": 24, "batch": 6, "lr": 1e-4, "warmup": "2", "loss": "softmax_image"},
]  # fmt: skip


def staged(shards: str, run: Path, stages: list[dict] = STAGES, **changes: Any) -> TrainConfig:
    changes = {
        "samples": None,
        "stages": [dataclass_from(StageConfig, stage) for stage in stages],
        "data": DataConfig(train=[shards], workers=0, shard_streams=2),
        "checkpoint": CheckpointConfig(every="1", keep=0),
        "ema": 0.9,
    } | changes
    return four_step_config(shards, run, **changes)


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return dict(checkpoint.load(checkpoint_path(run, step), entries=("model",)).model)


def test_a_stage_that_does_not_start_waits_for_the_copy_of_the_one_before(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_first(config: TrainConfig, world: World, lock: Any, uploader: Any) -> Any:
        if uploader:
            raise UserError("the second stage's set is gone")
        return start_run(config, world, lock, uploader)

    def copy_slowly(*of: Any) -> None:
        time.sleep(0.5)
        copy_checkpoint(*of)

    monkeypatch.setattr("clipscale.train.start_run", start_first)
    monkeypatch.setattr("clipscale.checkpoint.upload.copy_checkpoint", copy_slowly)
    copied = CheckpointConfig(copy=str(tmp_path / "store"))
    with refused("set is gone"):
        train(staged(shards, tmp_path / "run", checkpoint=copied))
    assert [step_of(path) for path in checkpoints_of(tmp_path / "store")] == [3]


@pytest.fixture(scope="module")
def undisturbed(shards: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("staged") / "run"
    assert train(staged(shards, run))["step"] == 7
    return run


def stopped(undisturbed: Path, folder: Path, step: int) -> Path:
    """A copy of the run as it was after a step."""
    run = shutil.copytree(undisturbed, folder / "run")
    for path in checkpoints_of(run)[step:]:
        shutil.rmtree(path)
    return run


def same(one: Path, other: Path, step: int) -> bool:
    """Whether two runs have the same losses and weights."""
    ours = weights(one, step)
    reference = weights(other, step)
    return curve(one) == curve(other) and all(torch.equal(ours[name], reference[name]) for name in reference)


def test_the_data_is_read_in_streams_that_fit_the_batches_of_all_stages(
    shards: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Batches of 12 and 6 are read in 2 streams. Batches of 12 alone would be read in 8, which a batch does not fill
    evenly.

    The run says after its last stage alone that it is done.
    """
    data = DataConfig(train=[shards], workers=0, shuffle=8)
    stages = [{"samples": 24, "batch": 12}, {"samples": 12, "batch": 6}]
    assert train(staged(shards, tmp_path / "run", stages, data=data))["step"] == 4
    assert capsys.readouterr().out.count("done: ") == 1
    for path in checkpoints_of(tmp_path / "run"):
        position = checkpoint.read_description(path).position
        assert position and len(position.by_stream) == 2


@pytest.mark.slow  # below, stages are one curve
def test_one_stage_is_the_plain_run_bit_for_bit(shards: str, tmp_path: Path) -> None:
    train(staged(shards, tmp_path / "plain", [], samples=24))
    train(staged(shards, tmp_path / "stage", [{"samples": 24, "batch": 12, "lr": 1e-3}]))
    assert same(tmp_path / "stage", tmp_path / "plain", 2)


def test_stages_are_one_curve_and_one_order_of_samples(shards: str, undisturbed: Path, tmp_path: Path) -> None:
    steps = records(undisturbed)
    assert [(r["step"], r["batch"], r["samples"]) for r in steps] == [
        (1, 12, 12), (2, 12, 24), (3, 12, 36), (4, 6, 42), (5, 6, 48), (6, 6, 54), (7, 6, 60)
    ]  # fmt: skip
    rates = [1e-3, 2e-3, 2e-3, 5e-5, 1e-4, 1e-4, 5e-5]  # each stage has its warm-up and its cosine
    assert [r["lr"] for r in steps] == pytest.approx(rates)
    train(staged(shards, tmp_path / "plain", [], samples=60, checkpoint=CheckpointConfig(every="0")))
    ends = (checkpoint_path(undisturbed, 7), checkpoint_path(tmp_path / "plain", 5))
    ours, reference = (checkpoint.read_description(end).position for end in ends)
    assert ours == reference, "60 samples of the same order"


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(5, marks=pytest.mark.slow)])
def test_a_run_goes_on_inside_and_between_stages_bit_for_bit(
    shards: str, undisturbed: Path, tmp_path: Path, step: int
) -> None:
    run = stopped(undisturbed, tmp_path, step)
    assert train(staged(shards, run))["step"] == 7
    assert same(run, undisturbed, 7)


def test_a_resumed_run_has_the_optimizers_settings_that_are_given_now(
    shards: str, undisturbed: Path, tmp_path: Path
) -> None:
    config = staged(shards, stopped(undisturbed, tmp_path, 5), optim=OptimConfig(lr=1e-3, weight_decay=0.3))
    half = TowerConfig(lr_factor=0.5)
    resumed = train_loop(replace(config, model=replace(config.model, image=half, text=half)), ONE_RANK)
    resumed.stream.close()
    resumed.records.close()
    groups = [(group["weight_decay"], group["lr_scale"]) for group in resumed.train_step.optimizer.param_groups]
    assert groups == [(0.3, 0.5), (0.3, 0.5), (0.0, 0.5), (0.0, 1.0)]


@pytest.mark.parametrize("optimizer", ["continue", "restart"])
def test_the_next_stage_begins_with_the_same_weights_and_resized_positions(
    shards: str, undisturbed: Path, tmp_path: Path, optimizer: str
) -> None:
    run = stopped(undisturbed, tmp_path, 3)
    stages = [STAGES[0], STAGES[1] | {"optimizer": optimizer}]
    resumed = train_loop(staged(shards, run, stages), ONE_RANK)
    resumed.stream.close()
    resumed.records.close()
    step = resumed.train_step
    before = weights(run, 3)
    encoders = torch.nn.Module()
    encoders.visual = step.model.image.encoder
    encoders.text = step.model.text.encoder
    image = "image.encoder.positional_embedding"
    text = "text.encoder.positional_embedding"
    expected = {"visual.positional_embedding": before[image], "text.positional_embedding": before[text]}
    resize_pos_embed(expected, encoders)
    resize_text_pos_embed(expected, encoders)
    before |= {image: expected["visual.positional_embedding"], text: expected["text.positional_embedding"]}
    assert (before[image].shape, before[text].shape) == ((10, 32), (24, 32))
    assert all(torch.equal(p.detach(), before[name]) for name, p in step.model.named_parameters())
    assert step.ema is not None and step.ema.averages[image].shape == (10, 32)
    moments = checkpoint.load(checkpoint_path(run, 3), entries=("optimizer",)).optimizer["state"]
    for name, p in step.model.named_parameters():
        if optimizer == "restart" or name in (image, text):
            assert not step.optimizer.state.get(p), name
        else:
            assert torch.equal(step.optimizer.state[p]["exp_avg_sq"], moments[name]["exp_avg_sq"]), name
    assert {group["lr"] for group in step.optimizer.param_groups} == {1e-4}


@pytest.mark.parametrize(
    ("second", "changes", "message"),
    files.read_yaml(Path(__file__).with_name("stages.yaml")),
)
def test_stages_that_cannot_be_are_refused_at_the_start(
    shards: str, tmp_path: Path, second: dict, changes: dict, message: str
) -> None:
    with refused(message):
        train(staged(shards, tmp_path / "run", [STAGES[0], {"samples": 20} | second], **changes))


def test_stages_on_the_command_line() -> None:
    stages = "stages=[{samples:2k,batch:64,lr:1e-3,warmup:10,optimizer:restart},{samples:1k,final:0.5}]"
    _, words = overrides_of("train", [stages, "data.train=x.tar", "model=tiny"])
    config = with_defaults(compose_settings("train", words))
    given = {"samples": 2048, "batch": 64, "lr": 1e-3, "warmup": "10", "optimizer": "restart"}
    assert config.stages[0] == StageConfig(**given | {"optimizer": OptimizerPolicy.TAKE_NONE})
    record = yaml.safe_load(to_yaml(config))
    assert record["stages"] == [given, {"samples": 1024, "final": 0.5}], "config.yaml has what is given alone"
    assert dataclass_from(TrainConfig, record) == config
    assert (config.samples, config.epochs) == (3072, None)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "zero3"])
def test_stages_on_two_ranks_follow_the_curve_of_one(shards: str, tmp_path: Path, parallel: str) -> None:
    plain = {"optim": OptimConfig(lr=1e-3, eps=1e-4), "cache": CacheConfig(chunk=["3"]), "ema": 0.0}
    stages = [{key: value for key, value in stage.items() if key != "patch_dropout"} for stage in STAGES]
    one, two = (
        staged(shards, tmp_path / name, stages, schedule=ScheduleConfig(warmup="0"), **plain) for name in ("one", "two")
    )
    train(one)
    run_ranks(runs.train_on_rank, 2, replace(two, launch=LaunchConfig(parallel=parallel)))
    # Adam divides by the size of small gradients: rounding grew to 0.3 % on one kind of processor.
    assert curve(tmp_path / "two") == pytest.approx(curve(tmp_path / "one"), rel=1e-2)


def test_all_stages_are_evaluated_by_the_last_ones_loss(shards: str, tmp_path: Path) -> None:
    """The losses that `checkpoint.best` compares are of one kind, and those of `clipscale eval`."""
    run = tmp_path / "run"
    pairs = pair_set(tmp_path / "pairs")
    stages: list[dict] = [{"samples": 24, "batch": 12}, {"samples": 12, "batch": 6, "loss": "softmax_image"}]
    train(staged(shards, run, stages, ema=0.0, eval=EvalConfig(sets=[str(pairs)], every=1)))
    for step in (1, 4):
        record = run / f"eval/step_{step:08d}.json"
        (trained,) = files.read_json(record)["results"].values()
        assert main(["eval", f"run={run}", f"step={step}", f"eval.sets=[{pairs}]", "device=cpu"]) == 0
        (again,) = files.read_json(record)["results"].values()
        assert trained["loss"] == pytest.approx(again["loss"], rel=1e-5)


def test_losses_of_a_run_wait_as_long_as_its_other_collectives(shards: str, tmp_path: Path) -> None:
    with mock.patch("clipscale.train.train_stages", lambda *_: current_runtime().timeout):
        config = four_step_config(shards, tmp_path / "run", launch=LaunchConfig(timeout_s=7.0))
        assert train(config) == timedelta(seconds=7)
