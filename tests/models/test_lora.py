"""Adapters change nothing at first, equal peft's when they are merged, and are merged wherever a run's weights are
read."""

import re
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clipscale import checkpoint
from clipscale.config.model import ModelConfig, TowerConfig
from clipscale.config.sections import CheckpointConfig
from clipscale.config.stages import StageConfig
from clipscale.config.train_config import TrainConfig
from clipscale.models import lora
from clipscale.models.towers import ClipModel, build_model
from clipscale.models.weights.adapters import merge_run_adapters
from clipscale.run_folder.chosen_checkpoint import find_checkpoint
from clipscale.tools.export.settings import ExportSettings
from clipscale.tools.export.verb import main as export
from clipscale.tools.trained_model import load_model, load_run_or_weights
from clipscale.train import train
from tests.models.test_groups import RESNET, SIGLIP, bert, config
from tests.support.checkpoints import save_model
from tests.support.killed_runs import command, whole_and_killed
from tests.support.runs import ARCHITECTURE, curve, four_step_config, records
from tests.support.towers import samples, small_model
from tests.support.user_errors import refused

# Not imported here: each of pytest's workers reads this file, and most run none of it.
pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed (clipscale[lora])")
PLAIN = ModelConfig(name="test", architecture=ARCHITECTURE)


def trained(module: nn.Module) -> set[str]:
    return {name for name, p in module.named_parameters() if p.requires_grad}


def features(model: ClipModel) -> tuple[Tensor, Tensor]:
    pixels, tokens = samples(5)
    with torch.no_grad():
        return model.image(pixels), model.text(tokens)


def test_adapters_are_on_all_linear_layers_of_frozen_blocks_and_change_nothing_at_first() -> None:
    model = small_model(lora=3).eval()
    torch.testing.assert_close(features(model), features(small_model().eval()), atol=1e-6, rtol=0)
    assert all("lora_" in name or name == "logit_scale" for name in trained(model))
    assert sum(".lora_A." in name for name in trained(model)) == 2 * 2 * 4, "towers, blocks, and in, out, fc, proj"
    partly = small_model(lora=3, image=TowerConfig(train="2"), text=TowerConfig(train="none"))
    assert not trained(partly.text)
    whole = {name for name in trained(partly.image.encoder) if "lora_" not in name}
    assert whole > {"proj", "ln_post.weight", "transformer.resblocks.1.mlp.c_fc.bias"}
    adapters = trained(partly.image.encoder) - whole
    assert len(adapters) == 2 * 4, "A and B of in, out, fc and proj"
    assert all(name.startswith("transformer.resblocks.0.") for name in adapters)


def test_merged_adapters_have_the_features_of_pefts_layers() -> None:
    model = small_model(lora=3, image=TowerConfig(train="2")).eval()
    plain = small_model().eval()
    for name in trained(model) - {"logit_scale"}:
        nn.init.normal_(model.get_parameter(name), std=0.1)
    before = features(plain)
    plain.load_state_dict(merge_run_adapters(model.state_dict()))
    torch.testing.assert_close(features(plain), features(model), atol=1e-5, rtol=0)
    assert all((a - b).abs().max() > 0.01 for a, b in zip(features(model), before)), "the adapters do something"


LAYERS = {
    "timm": [f"trunk.blocks.{i}.{x}" for i in range(6) for x in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")],
    "bert": [
        f"transformer.encoder.layer.{i}.{layer}"
        for i in range(2)
        for layer in (*(f"attention.self.{x}" for x in ("query", "key", "value")),
                      "attention.output.dense", "intermediate.dense", "output.dense")
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", LAYERS)
def test_towers_of_timm_and_of_transformers_have_adapters(kind: str) -> None:
    encoder: Any = build_model(config(SIGLIP)).image.encoder if kind == "timm" else bert()
    inputs = torch.randn(1, 3, 160, 160) if kind == "timm" else torch.randint(1, 99, (2, 6))
    lora.add_adapters(encoder, "image", 2, 0)
    assert {name.split(".lora_A")[0] for name in trained(encoder) if ".lora_A." in name} == {*LAYERS[kind]}
    encoder(inputs).sum().backward()
    assert not [name for name in trained(encoder) if encoder.get_parameter(name).grad is None], "all take part"


def test_what_cannot_be_adapted_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(
        r"model.lora=3: the image tower is not a transformer of open_clip.*model.image.train=none, or model.lora"
    ):
        small_model(lora=3, lean=False)
    with refused("model.lora=3: the image tower is not a transformer of open_clip"):
        build_model(config(RESNET, lora=3))
    locked = build_model(config(RESNET, lora=3, image=TowerConfig(train="none")))
    assert not trained(locked.image) and trained(locked.text)
    with refused("model.lora=3: with model.image.train=3 no block of the image tower is left to adapt; give fewer"):
        small_model(lora=3, image=TowerConfig(train="3"))
    monkeypatch.setitem(sys.modules, "peft", None)
    with refused(r"model.lora=3 needs peft; pip install 'clipscale\[lora\]'"):
        small_model(lora=3)


def adapting(shards: str, root: Path, **changes: Any) -> TrainConfig:
    """The settings of a run of adapters from a checkpoint of random weights, with these other settings."""
    torch.manual_seed(5)
    save_model(root / "base", build_model(PLAIN), PLAIN)
    tower = TowerConfig(layer_decay=0.5)
    model = replace(
        PLAIN,
        weights=f"run:{root}/base",
        lora=2,
        image=tower,
        text=replace(tower, train="1"),
        patch_dropout=0.3,
        grad_checkpointing=True,
    )
    every = CheckpointConfig(every="2", keep=0)
    return four_step_config(shards, root / "whole", **{"model": model, "ema": 0.9, "checkpoint": every} | changes)


def test_a_run_goes_on_bit_for_bit_where_its_start_has_changed(shards: str, tmp_path: Path) -> None:
    """The run's checkpoints hold the frozen weights, too."""
    whole = adapting(shards, tmp_path)
    train(whole)
    start = load_model(tmp_path / "base")[0].state_dict()
    save_model(tmp_path / "base", build_model(PLAIN), PLAIN, step=8)
    train(replace(whole, run=str(tmp_path / "part"), resume=str(tmp_path / "whole/checkpoints/step_00000002")))
    assert [r["loss"] for r in records(tmp_path / "part")] == curve(tmp_path / "whole")[2:]
    saved, other = (checkpoint.load(find_checkpoint(tmp_path / name, "latest")) for name in ("whole", "part"))
    assert all(torch.equal(x, other.model[name]) for name, x in saved.model.items())
    assert saved.ema is not None
    assert saved.ema["weights"].keys() == saved.optimizer["state"].keys()
    assert all("lora_" in n or n in ("logit_scale", "text.encoder.text_projection") for n in saved.ema["weights"])
    merged = load_model(tmp_path / "whole")[0].state_dict()
    products = {name for name in merged if re.search(r"\.resblocks\..*(proj|fc)[._]weight", name)}
    moved = {name for name, x in merged.items() if not torch.equal(x, start[name])}
    assert moved == products | {"logit_scale", "text.encoder.text_projection"}
    with refused(r"model.lora=3: the checkpoint was trained with 2; take it, or another run"):
        train(replace(whole, samples=96, model=replace(whole.model, lora=3)))


def test_whatever_takes_a_run_merges_its_adapters(shards: str, tmp_path: Path) -> None:
    train(adapting(shards, tmp_path))
    run = tmp_path / "whole"
    base = load_model(tmp_path / "base")[0].state_dict()
    for weights, key in (("trained", ""), ("ema", "::ema")):
        model, settings, _ = load_model(run, weights=weights)
        state = model.state_dict()
        assert settings.lora == 0
        again, _, _ = load_run_or_weights(None, "", "", ModelConfig("", weights=f"run:{run}{key}"), lambda work: work())
        folder = export(ExportSettings(run=str(run), weights=weights))
        exported = build_model(replace(PLAIN, weights=str(folder)))
        for other in (again, exported):
            assert all(torch.equal(x, other.state_dict()[name]) for name, x in state.items())
    both = ExportSettings(run=str(run), weights="ema", average=[str(run)], shares=[0.5, 0.5])
    averaged = build_model(replace(PLAIN, weights=str(export(both)))).state_dict()
    assert all(torch.equal(x, averaged[name]) for name, x in state.items())
    half = ExportSettings(run=str(run), average=[str(tmp_path / "base")], shares=[0.5, 0.5])
    averaged = build_model(replace(PLAIN, weights=str(export(half)))).state_dict()
    for name, x in load_model(run)[0].state_dict().items():
        torch.testing.assert_close(averaged[name], (x + base[name]) / 2)
    transformers = export(ExportSettings(run=str(run), format="hf"))
    read = build_model(replace(PLAIN, weights=str(transformers))).state_dict()
    torch.testing.assert_close(read, load_model(run)[0].state_dict())


@pytest.mark.slow  # several runs
def test_stages_of_another_size_go_on_with_their_adapters(shards: str, tmp_path: Path) -> None:
    stages = [StageConfig(samples=12, image_size=20, context_length=8), StageConfig(samples=12)]
    staged = adapting(shards, tmp_path, samples=24, stages=stages)
    assert train(staged)["step"] == 2
    assert load_model(tmp_path / "whole")[0].image_size == 30


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "zero3"])
def test_a_run_of_two_ranks_that_is_killed_has_the_undisturbed_curve(
    shards: str, tmp_path: Path, environment: dict, parallel: str
) -> None:
    command(tmp_path, environment, "run=start", f"data.train={shards}", "samples=32")
    words = [f"data.train={shards}", "model.weights=runs/start", "model.lora=2", "model.text.train=1", "ema=0.9",
             "optim=adamw", f"launch.parallel={parallel}"]  # fmt: skip
    whole, killed = whole_and_killed(tmp_path, environment, words)
    state = load_model(killed)[0].state_dict()
    assert all(torch.equal(x, state[name]) for name, x in load_model(whole)[0].state_dict().items())
