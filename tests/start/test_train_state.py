"""The trainer's state comes back from a checkpoint bit for bit, sharded or whole, and captions are sorted without a
trace.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch.nn.parallel import DistributedDataParallel

from clipscale import checkpoint
from clipscale.config.model import ModelConfig, TowerConfig
from clipscale.config.sections import CheckpointConfig, LaunchConfig, OptimConfig
from clipscale.config.stages import OptimizerPolicy
from clipscale.config.train_config import TrainConfig
from clipscale.models.towers import build_model
from clipscale.run_folder.paths import checkpoint_path
from clipscale.step.checkpoint_state import load_state
from clipscale.step.compiled import innermost_blocks
from clipscale.train import train
from tests.conftest import Capture
from tests.models.weights.test_load_weights import open_clip_folder
from tests.support.cases import slow_except
from tests.support.checkpoints import ONE_RANK
from tests.support.ranks import run_ranks
from tests.support.runs import ARCHITECTURE, curve, four_step_config, records, train_loop, train_on_rank


@pytest.mark.parametrize(
    "name", ["adamw", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lamb", "adafactorbv", "muon"))]
)
def test_a_resumed_run_ends_with_the_same_weights_average_and_optimizer(shards: str, tmp_path: Path, name: str) -> None:
    settings = {"optim": OptimConfig(name=name, lr=1e-3, eps=None), "ema": 0.9}
    at_once = tmp_path / "at_once"
    resumed = tmp_path / "resumed"
    train(four_step_config(shards, at_once, checkpoint=CheckpointConfig(every="2", keep=0), **settings))
    train(four_step_config(shards, resumed, resume=str(checkpoint_path(at_once, 2)), **settings))
    assert [record["loss"] for record in records(resumed)] == [record["loss"] for record in records(at_once)][2:]
    expected = checkpoint.load(checkpoint_path(at_once, 4))
    actual = checkpoint.load(checkpoint_path(resumed, 4))
    torch.testing.assert_close(actual.model, expected.model, rtol=0, atol=0)
    torch.testing.assert_close(actual.ema, expected.ema, rtol=0, atol=0)
    torch.testing.assert_close(actual.optimizer["state"], expected.optimizer["state"], rtol=0, atol=0)
    assert actual.optimizer["param_groups"] == expected.optimizer["param_groups"]
    assert actual.ema["updates"] == 4
    assert any(not torch.equal(value, expected.model[name]) for name, value in expected.ema["weights"].items())


def test_another_factor_of_the_learning_rate_resumes_with_the_optimizers_state(shards: str, tmp_path: Path) -> None:
    """The factors split the parameters into groups, in which some optimizers count their steps."""
    slow_text = ModelConfig(name="test", architecture=ARCHITECTURE, text=TowerConfig(lr_factor=0.1))
    train(four_step_config(shards, tmp_path / "run", samples=24, model=slow_text))
    run = train_loop(four_step_config(shards, tmp_path / "run"), ONE_RANK)
    run.stream.close()
    saved = checkpoint.load(checkpoint_path(tmp_path / "run", 2))
    groups = run.train_step.optimizer.param_groups
    assert len(groups) < len(saved.optimizer["param_groups"]) and {group["lr_scale"] for group in groups} == {1.0}
    names = {parameter: name for name, parameter in run.train_step.model.named_parameters()}
    resumed = {names[parameter]: state for parameter, state in run.train_step.optimizer.state.items()}
    torch.testing.assert_close(resumed, saved.optimizer["state"], rtol=0, atol=0)
    for group in saved.optimizer["param_groups"]:
        group["step"] = 2
    load_state(run.train_step, saved, OptimizerPolicy.TAKE_ALL)
    assert [group["step"] for group in run.train_step.optimizer.param_groups] == [2] * len(groups)
    assert len(saved.optimizer["param_groups"]) > len(groups), "the loaded state stays as it was"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_an_optimizer_that_was_not_fused_goes_on_as_one_that_is(
    shards: str, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints of earlier versions have such an optimizer."""
    fused = OptimConfig(name=name, lr=1e-3, eps=None)
    with monkeypatch.context() as patched:
        patched.setattr("clipscale.step.optim.FUSED", ())
        patched.setattr("clipscale.step.optim.FastMuon", lambda muon: muon)
        config = four_step_config(
            shards, tmp_path / "whole", checkpoint=CheckpointConfig(every="2", keep=0), optim=fused
        )
        train(config)
    train(four_step_config(shards, tmp_path / "parts", optim=fused, resume=str(checkpoint_path(tmp_path / "whole", 2))))
    whole, parts = (checkpoint.load(checkpoint_path(tmp_path / run, 4)) for run in ("whole", "parts"))
    assert any(group.get("fused") for group in parts.optimizer["param_groups"])
    tolerance = 1e-3 if name == "muon" else 1e-6  # Muon's matrices were rounded to bfloat16
    torch.testing.assert_close(parts.model, whole.model, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("before", "after", "scale"),
    slow_except(
        [("fp16", "fp16", 1024.0)], [("fp32", "fp16", 512.0), ("fp16", "fp32", None), ("fp16", "fp16", 1024.0)]
    ),
)
def test_a_loss_scale_goes_on_where_there_is_one(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, scale: float | None
) -> None:
    """A run that takes up fp16 with a resume begins with a scale of its own, and one that leaves it has none."""
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", partial(scaler, init_scale=1024.0))
    train(four_step_config(shards, tmp_path / "run", precision=before))
    monkeypatch.setattr(torch.amp, "GradScaler", partial(scaler, init_scale=512.0))
    last = str(checkpoint_path(tmp_path / "run", 4))
    run = train_loop(four_step_config(shards, tmp_path / "on", precision=after, resume=last, samples=72), ONE_RANK)
    run.stream.close()
    found = run.train_step.precision.scaler
    assert (found.get_scale() if found else None) == scale


def test_a_run_normalises_as_its_weights_were_trained_and_goes_on_so(
    shards: str, tmp_path: Path, capsys: Capture
) -> None:
    """SigLIP's mean of 0.5 is in its folder's description, and not in the settings."""

    half = (0.5, 0.5, 0.5)

    def run(name: str, resume: str = "auto", **changes: Any) -> list[float]:
        every = CheckpointConfig(every="1", keep=0)
        config = four_step_config(
            shards, tmp_path / name, samples=24, precision="fp32", checkpoint=every, resume=resume
        )
        train(replace(config, model=replace(config.model, **changes)))
        return [r["loss"] for r in records(tmp_path / name)]

    model = four_step_config(shards, tmp_path).model
    folder = open_clip_folder(tmp_path / "weights", build_model(model), model.architecture)
    expected = run("named", weights=str(folder / "open_clip_model.safetensors"), preprocess={"mean": half, "std": half})
    capsys.readouterr()
    assert run("described", weights=str(folder)) == expected
    assert "mean [0.5, 0.5, 0.5], deviation [0.5, 0.5, 0.5]" in capsys.readouterr().out
    first = checkpoint_path(tmp_path / "described", 1)
    assert tuple(checkpoint.load(first).model_config["preprocess"]["mean"]) == half
    assert (tmp_path / "described/config.yaml").read_text().count("0.5") >= 6
    assert run("described", weights=str(folder)) == expected
    assert "is complete" in (out := capsys.readouterr().out) and "changed" not in out
    assert run("resumed", resume=str(first)) == expected[1:], "without the weights, as its checkpoint says"


def test_captions_are_sorted(shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = four_step_config(shards, tmp_path / "given", precision="fp32")
    context = whole.model.architecture["text_cfg"]["context_length"]
    with monkeypatch.context() as unsorted:
        unsorted.setattr("clipscale.start.build.may_cut_captions", lambda encoder, pad: False)
        train(whole)
    train(replace(whole, run=str(tmp_path / "sorted")))
    unsorted_records = records(tmp_path / "given")
    sorted_records = records(tmp_path / "sorted")
    assert {r["caption_tokens"] for r in unsorted_records} == {context}
    assert all(r["caption_tokens"] < context for r in sorted_records)
    assert [r["loss"] for r in sorted_records] == pytest.approx([r["loss"] for r in unsorted_records], rel=1e-5)


def test_a_partly_frozen_tower_is_compiled(shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step calls the blocks by what the compiler has made of them; captions that are cut have too many shapes."""
    calls = []

    def compiled(call: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def counted(*inputs: Any) -> Any:
            calls.append(call.__self__)  # type: ignore[attr-defined]
            return call(*inputs)

        return counted

    monkeypatch.setattr(torch, "compile", compiled)
    projection = TowerConfig(train="1")
    model = ModelConfig(name="test", architecture=ARCHITECTURE, compile="true", image=projection, text=TowerConfig())
    run = train_loop(four_step_config(shards, tmp_path / "run", model=model), ONE_RANK)
    calls.clear()
    run.run_step()
    run.stream.close()
    assert run.train_step.passes.sorts_captions
    encoder = run.train_step.model.image.encoder
    assert {id(module) for module in calls} == {id(part) for part in innermost_blocks(encoder) or [encoder]}


def compiled_run(rank: int, world_size: int, config: TrainConfig) -> tuple[int, int, list[float]]:
    """Graphs and graph breaks of a run, by a compiler that keeps the operations; and its curve."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._inductor.config.force_disable_caches = True
    small_buckets = partial(DistributedDataParallel, bucket_cap_mb=0.001)
    with (
        patch.object(torch, "compile", partial(torch.compile, backend="eager")),
        patch("clipscale.distributed.parallel.DistributedDataParallel", small_buckets),
    ):
        train(config)
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), curve(Path(config.run))


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["zero3", "ddp"])
def test_over_ranks_towers_compile_without_breaks(shards: str, tmp_path: Path, parallel: str) -> None:
    """Blocks share their graphs, under FSDP2 too, and no graph is cut at DDP's buckets."""
    launch = LaunchConfig(parallel=parallel)
    deep = deepcopy(ARCHITECTURE)
    deep["vision_cfg"]["layers"] = deep["text_cfg"]["layers"] = 4
    model = ModelConfig(name="test", architecture=deep)
    plain = four_step_config(shards, tmp_path / "plain", model=model, launch=launch, samples=24)
    run_ranks(train_on_rank, 2, plain)
    compiled = replace(plain, run=str(tmp_path / "compiled"), model=replace(model, compile="true"))
    (count, breaks, losses), _ = run_ranks(compiled_run, 2, compiled)
    assert breaks == 0
    # Four blocks and their last; chunks of 4 and 2; without and with gradients. Under DDP twice: of a chunk whose
    # gradients DDP sums, autograd adds them to the weights' own.
    assert count == {"zero3": 8, "ddp": 16}[parallel]
    assert losses == pytest.approx(curve(tmp_path / "plain"), rel=1e-5)
