"""The type of weights: a frozen tower's are half precision; a trained tower's may be bf16 with float32 masters."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from clipscale import checkpoint
from clipscale.common.errors import UserError
from clipscale.config.sections import (
    CacheConfig,
    CheckpointConfig,
    LaunchConfig,
    LogConfig,
    ModelConfig,
    PrecisionConfig,
    ScheduleConfig,
)
from clipscale.config.train import TrainConfig
from clipscale.distributed.world import World
from clipscale.models.towers import build_model
from clipscale.step.precision import Precision
from clipscale.train import Run, train
from tests.support.ranks import run_ranks
from tests.support.runs import ARCHITECTURE, BF16, on_a_rank, records, small

CPU = torch.device("cpu")


def test_a_frozen_image_tower_gives_the_same_bits_from_half_the_memory() -> None:
    torch.manual_seed(0)
    whole = build_model(ModelConfig(name="test", architecture=ARCHITECTURE, freeze_image=True))
    half = copy.deepcopy(whole)
    precision = Precision(PrecisionConfig(name="bf16"), CPU)
    assert precision.hold(half.image) is None
    assert precision.hold(half.text) is None
    pixels = torch.randint(0, 256, (5, 3, 30, 30), dtype=torch.uint8)
    with torch.no_grad(), precision.autocast():
        assert torch.equal(half.image(pixels), whole.image(pixels))
    sizes = [sum(p.nbytes for p in m.image.parameters()) for m in (half, whole)]
    assert sizes[0] < 0.53 * sizes[1], f"{sizes[0]} bytes of {sizes[1]}"
    assert all(p.dtype == torch.float32 for p in half.text.parameters()), "the trained tower keeps its float32 weights"


def test_gradients_of_many_chunks_add_up_in_float32() -> None:
    """A bf16 sum loses everything below a 256th of it. The float32 copies do not."""
    weight = torch.nn.Linear(8, 8, bias=False)
    precision = Precision(BF16, CPU)
    masters = precision.hold(weight)
    assert masters is not None
    assert weight.weight.dtype == torch.bfloat16
    plain = copy.deepcopy(weight)
    truth = torch.zeros(8, 8)
    g = torch.Generator().manual_seed(1)
    for _ in range(512):
        x = (1 + torch.randn(4, 8, generator=g)).bfloat16()
        plain.zero_grad()
        for m in (plain, weight):
            m(x).sum().backward()
        assert plain.weight.grad is not None
        truth += plain.weight.grad.float()
    assert weight.weight.grad is None, "no half-precision gradient stays"
    found = masters.copies["weight"].grad
    assert found is not None and torch.equal(found, truth)
    with torch.no_grad():
        masters.copies["weight"] += 1e-4
    masters.spread()
    assert torch.equal(weight.weight, masters.copies["weight"].bfloat16())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (PrecisionConfig(name="fp32", weights="bf16"), "precision.weights=bf16 with precision.name=fp32"),
        (PrecisionConfig(name="fp16", weights="bf16"), "precision.weights=bf16 with precision.name=fp16"),
    ],
)
def test_what_does_not_go_together_is_refused(config: PrecisionConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Precision(config, CPU)


def test_a_run_with_master_weights_resumes_bit_for_bit_and_keeps_the_masters(shards: str, tmp_path: Path) -> None:
    train(small(shards, tmp_path / "whole", checkpoint=CheckpointConfig(every=2, keep=0)))
    losses = [r["loss"] for r in records(tmp_path / "whole")]
    middle = checkpoint.path_of(tmp_path / "whole", 2)
    train(small(shards, tmp_path / "parts", resume=str(middle)))
    assert [r["loss"] for r in records(tmp_path / "parts")][-2:] == losses[2:]
    states = [checkpoint.load(checkpoint.found(tmp_path / name)[-1])["model"] for name in ("whole", "parts")]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    matrix = states[0]["text.encoder.transformer.resblocks.0.mlp.c_fc.weight"]
    assert matrix.dtype == torch.float32
    assert not torch.equal(matrix, matrix.bfloat16().float()), (
        "the checkpoint holds the masters, not what they round to"
    )

    for name, precision in (("autocast", PrecisionConfig(name="bf16")), ("pure", replace(BF16, master=False))):
        train(small(shards, tmp_path / name, precision=precision, samples=24))
        assert [r["loss"] for r in records(tmp_path / name)] == pytest.approx(losses[:2], rel=0.02), name


def _run(rank: int, world: int, config: TrainConfig) -> tuple[dict[str, torch.Tensor], list[float]]:
    run = Run(config, World(rank, world, CPU))
    norms = [run.optimizer_step()["grad_norm"]]
    weights = {name: p.detach().clone() for name, p in run.state.model.named_parameters()}
    run.stream.close()
    return weights, norms


CONSTANT = ScheduleConfig(name="constant", warmup="0")


def test_several_ranks_with_master_weights_take_the_step_of_one(shards: str, tmp_path: Path) -> None:
    """Equal up to bf16 rounding, which differs between chunks. All ranks hold the same weights afterwards."""
    config = small(
        shards,
        tmp_path / "two",
        log=LogConfig(report=False, noise_scale=1),
        launch=LaunchConfig(),
    )
    answers = run_ranks(_run, 2, config)
    assert all(torch.equal(value, answers[1][0][name]) for name, value in answers[0][0].items())
    _, norms = _run(0, 1, replace(config, run=str(tmp_path / "one")))
    assert answers[0][1] == pytest.approx(norms, rel=0.02)


def test_fsdp_takes_masters_alone(shards: str, tmp_path: Path) -> None:
    launch = LaunchConfig(parallel="fsdp")
    config = small(shards, tmp_path / "run", launch=launch, precision=replace(BF16, master=False))
    with pytest.raises(UserError, match=r"precision\.master=false.*launch\.parallel=ddp"):
        train(config)


@pytest.mark.slow
def test_under_fsdp_the_float32_shards_are_the_masters(shards: str, tmp_path: Path) -> None:
    """The curve and the gradient norms of DDP with masters, and a checkpoint that either of them goes on from."""
    ddp, fsdp = (LaunchConfig(parallel=parallel) for parallel in ("ddp", "fsdp"))
    for name, launch in (("ddp", ddp), ("fsdp", fsdp)):
        config = small(shards, tmp_path / name, launch=launch, samples=24, schedule=CONSTANT)
        run_ranks(on_a_rank, 2, config)
    one, other = ([(r["loss"], r["grad_norm"]) for r in records(tmp_path / name)] for name in ("ddp", "fsdp"))
    assert np.allclose(one, other, rtol=1e-3), f"{other} instead of {one}"
    state = checkpoint.load(checkpoint.found(tmp_path / "fsdp")[-1])["model"]
    assert all(value.dtype == torch.float32 for value in state.values() if value.is_floating_point())
    train(small(shards, tmp_path / "fsdp", schedule=CONSTANT))
    train(small(shards, tmp_path / "ddp", schedule=CONSTANT))
    one, other = ([r["loss"] for r in records(tmp_path / name)] for name in ("ddp", "fsdp"))
    assert other == pytest.approx(one, rel=1e-3)


# ---- batch normalisation: synchronised or frozen ----

RESNET = ARCHITECTURE | {"vision_cfg": {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "head_width": 64}}


def resnet(shards: str, run: Path, batch_norm: str, chunk: int | None) -> TrainConfig:
    return small(
        shards,
        run,
        model=ModelConfig(name="rn", architecture=RESNET, batch_norm=batch_norm),
        cache=CacheConfig(chunk="6", image_chunk=chunk, text_chunk=6) if chunk else CacheConfig(),
        precision=PrecisionConfig(),
        samples=24,
    )


@pytest.mark.parametrize(("batch_norm", "chunk", "moves"), [("sync", None, True), ("frozen", 4, False)])
def test_towers_with_batch_normalisation_train(
    shards: str, tmp_path: Path, batch_norm: str, chunk: int | None, moves: bool
) -> None:
    train(resnet(shards, tmp_path / "run", batch_norm, chunk))
    state = checkpoint.load(checkpoint.found(tmp_path / "run")[-1])["model"]
    means = [value for name, value in state.items() if name.endswith("running_mean")]
    assert any(bool(mean.any()) for mean in means) == moves
    assert json.loads((tmp_path / "run" / "chunks.json").read_text())["image"] == (chunk or 12)


def test_batch_normalisation_in_chunks_is_refused_with_the_remedy(shards: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cache\.image_chunk=4.*model\.batch_norm=frozen, or cache\.image_chunk=12"):
        train(resnet(shards, tmp_path / "run", "sync", 4))
