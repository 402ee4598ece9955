"""Adapters: nothing at first, merged to the same features, and alone in the checkpoint."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from clipscale import checkpoint
from clipscale.common.errors import UserError
from clipscale.config.sections import CheckpointConfig, ModelConfig, TowerConfig
from clipscale.models import lora
from clipscale.models.towers import build_model, load_model
from clipscale.models.weights import without_weights
from clipscale.tools.export.settings import ExportSettings
from clipscale.tools.export.verb import main as export
from clipscale.train import train
from tests.support.checkpoints import save
from tests.support.runs import ARCHITECTURE, curve, records, small
from tests.support.towers import samples, small_model

pytest.importorskip("peft", reason="peft is not installed (clipscale[lora])")
RULE = 3


def trained(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_adapters_are_on_all_linear_layers_of_the_blocks_and_change_nothing_at_first() -> None:
    plain, model = small_model().eval(), small_model(lora=RULE).eval()
    pixels, tokens = samples(5)
    assert torch.equal(model.image(pixels), plain.image(pixels)) and torch.equal(model.text(tokens), plain.text(tokens))
    assert all("lora_" in name or name == "logit_scale" for name in trained(model))
    assert sum(".lora_A." in name for name in trained(model)) == 2 * 2 * 4, "towers, blocks, and in, out, fc, proj"
    partly = small_model(lora=RULE, image=TowerConfig(train="2"), text=TowerConfig(train="none")).image.encoder
    whole = {name for name in trained(partly) if "lora_" not in name}
    assert whole > {"proj", "ln_post.weight", "transformer.resblocks.1.mlp.c_fc.bias"}
    assert all(name.startswith("transformer.resblocks.0.") for name in trained(partly) - whole)


def test_merged_adapters_give_the_features_of_w_plus_b_a() -> None:
    model, plain = small_model(lora=RULE).eval(), small_model().eval()
    for name in trained(model) - {"logit_scale"}:
        nn.init.normal_(model.get_parameter(name), std=0.1)
    state, values = model.state_dict(), plain.state_dict()
    for name in values:
        place, _, last = name.replace(".attn.out_proj", ".attn.base_layer.out_proj").rpartition(".")
        if f"{place}.lora_A.default.weight" in state and not last.endswith("bias"):
            values[name] += state[f"{place}.lora_B.default.weight"] @ state[f"{place}.lora_A.default.weight"]
    pixels, tokens = samples(5)
    unmerged, expected = (model.image(pixels), model.text(tokens)), (plain.image(pixels), plain.text(tokens))
    lora.merge(model.image.encoder), lora.merge(model.text.encoder)
    assert model.state_dict().keys() == values.keys()
    for a, b, c in zip(unmerged, expected, (model.image(pixels), model.text(tokens))):
        assert torch.allclose(a, b, atol=1e-5) and torch.allclose(c, b, atol=1e-6)


def test_a_run_saves_its_adapters_alone_goes_on_bit_for_bit_and_is_exported(shards: str, tmp_path: Path) -> None:
    plain = ModelConfig(name="test", architecture=ARCHITECTURE)
    state = {"model": build_model(plain).state_dict(), "model_config": asdict(plain)}
    save(tmp_path / "base", 1, state, keep=1)
    model = replace(plain, weights=f"run:{tmp_path}/base", lora=2, text=TowerConfig(train="1"))
    whole = small(shards, tmp_path / "whole", model=model, ema=0.9, checkpoint=CheckpointConfig(every="2", keep=0))
    train(whole)
    train(replace(whole, run=str(tmp_path / "part"), resume=str(tmp_path / "whole/checkpoints/step_00000002")))
    assert len(set(curve(tmp_path / "whole"))) == 4
    assert [r["loss"] for r in records(tmp_path / "part")] == curve(tmp_path / "whole")[2:]
    saved, other = (checkpoint.load(checkpoint.locate(tmp_path / n, "latest")).model for n in ("whole", "part"))
    assert all(torch.equal(x, other[name]) for name, x in saved.items())
    assert all("lora_" in name or name in ("logit_scale", "text.encoder.text_projection") for name in saved)

    stages = [{"samples": 12, "image_size": 20, "context_length": 8}, {"samples": 12}]
    assert train(replace(whole, run=str(tmp_path / "staged"), samples=24, stages=stages))["step"] == 2

    merged, config, _ = load_model(tmp_path / "whole")
    folder = export(ExportSettings(run=str(tmp_path / "whole")))
    again = build_model(replace(without_weights(config), weights=str(folder)))
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in merged.state_dict().items())
    with pytest.raises(UserError, match="a checkpoint of adapters alone; give the folder of `clipscale export"):
        build_model(replace(plain, weights=f"run:{tmp_path}/whole"))
    state["model"]["image.encoder.proj"] += 1  # type: ignore[index]
    save(tmp_path / "base", 2, state, keep=1)
    with pytest.raises(UserError, match=r"model.weights=.*base: not the weights any more"):
        load_model(tmp_path / "whole")


def test_a_tower_of_timm_has_adapters_and_one_that_is_not_lean_is_refused() -> None:
    vision = {"timm_model_name": "test_vit", "timm_pool": "map", "timm_proj": "none", "image_size": 160}
    config = ModelConfig("x", ARCHITECTURE | {"embed_dim": 64, "vision_cfg": vision}, lora=RULE)
    trunk = build_model(config).image.encoder.trunk
    actual = {name.split(".lora_A")[0] for name in trained(trunk) if ".lora_A." in name}
    layers = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    assert actual == {f"blocks.{i}.{layer}" for i in range(6) for layer in layers}
    with pytest.raises(UserError, match=r"the text tower is no transformer of open_clip"):
        build_model(config, lean=False)
