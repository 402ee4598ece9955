"""A frozen tower's weights in half precision change nothing; batch normalisation trains in one chunk, or is frozen."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from clipscale import checkpoint
from clipscale.common.errors import UserError
from clipscale.config.model import ModelConfig, TowerConfig
from clipscale.config.sections import CacheConfig
from clipscale.config.train_config import TrainConfig
from clipscale.models.towers import build_model
from clipscale.run.stopping import SignalError
from clipscale.run_folder.paths import checkpoints_of
from clipscale.step.precision import Precision
from clipscale.train import train
from tests.conftest import Capture
from tests.support.checkpoints import ONE_RANK
from tests.support.runs import ARCHITECTURE, four_step_config, train_loop
from tests.support.towers import RESNET


@pytest.mark.parametrize("frozen", ["image", "text"])
def test_a_frozen_tower_gives_the_same_bits_from_less_memory(frozen: str) -> None:
    torch.manual_seed(0)
    config = ModelConfig(name="test", architecture=ARCHITECTURE)
    whole = build_model(replace(config, **{frozen: TowerConfig(train="none")}))
    half = copy.deepcopy(whole)
    precision = Precision.set_up("bf16", torch.device("cpu"))
    precision.cast_frozen_(half.image)
    precision.cast_frozen_(half.text)
    inputs = torch.randint(0, 256, (5, 3, 30, 30), dtype=torch.uint8), torch.randint(1, 60, (5, whole.context_length))
    with torch.no_grad(), precision.autocast():
        for name, x in zip(("image", "text"), inputs):
            assert torch.equal(getattr(half, name)(x), getattr(whole, name)(x))
    for name, tower in (("image", half.image), ("text", half.text)):
        share = sum(p.nbytes for p in tower.parameters()) / sum(4 * p.numel() for p in tower.parameters())
        assert (share < 1) == (name == frozen), "the trained tower keeps its float32 weights"


def resnet(shards: str, run: Path, batch_norm: str, chunk: int | None) -> TrainConfig:
    model = ModelConfig(name="rn", architecture=ARCHITECTURE | {"vision_cfg": RESNET}, batch_norm=batch_norm)
    cache = CacheConfig(chunk=[str(chunk), "6"]) if chunk else CacheConfig()
    return four_step_config(shards, run, model=model, cache=cache, precision="fp32", samples=24)


@pytest.mark.parametrize(("batch_norm", "chunk", "moves"), [("sync", None, True), ("frozen", 4, False)])
def test_towers_with_batch_normalisation_train(
    shards: str, tmp_path: Path, batch_norm: str, chunk: int | None, moves: bool
) -> None:
    train(resnet(shards, tmp_path / "run", batch_norm, chunk))
    state = checkpoint.load(checkpoints_of(tmp_path / "run")[-1])
    means = [value for name, value in state.model.items() if name.endswith("running_mean")]
    assert any(bool(mean.any()) for mean in means) == moves
    assert state.chunks and state.chunks.image == (chunk or 12)


def test_batch_normalisation_in_chunks_is_refused_with_the_remedy(shards: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cache\.chunk=4: the image.*model\.batch_norm=frozen, or cache\.chunk=12"):
        train(resnet(shards, tmp_path / "run", "sync", 4))


def test_a_step_that_is_left_at_a_signal_leaves_statistics_as_they_were(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train_loop(resnet(shards, tmp_path / "run", "sync", None), ONE_RANK)
    before = copy.deepcopy(run.train_step.model.state_dict())
    calls = []

    def signalled() -> None:
        calls.append(1)
        if len(calls) == 4:  # in the second pass
            raise SignalError(15)

    monkeypatch.setattr(run.signal_poller, "poll", signalled)
    with pytest.raises(SignalError):
        run.run_step()
    run.stream.close()
    for name, value in run.train_step.model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_frozen_tower_that_a_checkpoint_has_rounded_is_said(shards: str, tmp_path: Path, capsys: Capture) -> None:
    model = ModelConfig(name="test", architecture=ARCHITECTURE, image=TowerConfig(train="none"))
    config = four_step_config(shards, tmp_path / "run", model=model, samples=24)
    train(config)
    for precision, is_said in (("bf16", False), ("fp32", True)):
        train_loop(replace(config, precision=precision, samples=48), ONE_RANK).stream.close()
        assert ("frozen towers in torch.bfloat16" in capsys.readouterr().out) == is_said
