"""A partly frozen tower: exact, and under a trained projection the frozen trunk runs once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clipscale.config.sections import CacheConfig, ModelConfig, TowerConfig
from clipscale.data.loader.captions import SortedCaptions
from clipscale.distributed.world import World
from clipscale.loss.api import contrastive_loss
from clipscale.loss.reference import dense_contrastive_loss
from clipscale.models.groups import lock
from clipscale.models.towers import ClipModel, Projection, build_model
from clipscale.step.grad_cache import GradCache
from clipscale.step.trunk import TrunkFeatures
from clipscale.train import train
from tests.support.ranks import run_ranks
from tests.support.runs import ARCHITECTURE, curve, small
from tests.support.towers import samples, small_model

BATCH, CPU = 10, torch.device("cpu")


def partly_frozen(groups: tuple[int, int], lean: bool) -> ClipModel:
    model = small_model(layers=3, lean=lean).double()
    for name, tower, unlocked in zip(("image", "text"), (model.image, model.text), groups):
        lock(tower.encoder, name, unlocked)
    return model.train()


def cut_up(rank: int, world: int, groups: tuple[int, int], lean: bool) -> dict[str, Tensor]:
    """The gradients by the cache, in ragged chunks, of this rank's samples. Captions are sorted."""
    model, part = partly_frozen(groups, lean), BATCH // world
    pixels, tokens = (x[rank * part : (rank + 1) * part] for x in samples(BATCH))
    here, passes = World(rank, world, CPU), list[int]()
    model.text.encoder.ln_final.register_forward_hook(lambda module, inputs, out: passes.append(len(out)))
    texts = SortedCaptions(
        lambda start, stop: tokens[start:stop], part, CPU, pad=0, resident=False, most=lambda own: here.highest(own)[0]
    )
    inputs: list[Any] = [pixels, texts]
    towers: list[torch.nn.Module] = [model.image, model.text]
    towers[1], inputs[1] = Projection(model.text), TrunkFeatures(texts, model.text.trunk, torch.no_grad)
    wrapped = [here.wrap(tower) for tower in towers]
    cache = GradCache(wrapped, lambda u, v: contrastive_loss(u, v, model.logit_scale.exp()), chunks=[3, 4])
    cache.step(*inputs)
    here.sum_gradients([model.logit_scale])
    assert sum(passes) == part, "the trunk runs once"
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("world", "groups", "lean"), [(1, (2, 1), True), (1, (3, 1), False), (2, (2, 1), True)])
def test_a_partly_frozen_tower_has_the_gradients_of_one_graph(world: int, groups: tuple[int, int], lean: bool) -> None:
    model = partly_frozen(groups, lean)
    pixels, tokens = samples(BATCH)
    features = model.image(pixels), model.text(tokens)
    dense_contrastive_loss(*features, model.logit_scale.exp()).backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert "text.encoder.text_projection" in wanted and "text.encoder.ln_final.bias" not in wanted
    answers = run_ranks(cut_up, world, groups, lean) if world > 1 else [cut_up(0, 1, groups, lean)]
    for found in answers:
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            error = ((found[name] - gradient).norm() / gradient.norm()).item()
            assert error < 1e-12, f"{name}: relative error {error:.1e}"


def test_a_run_with_frozen_trunks_has_the_curve_of_a_whole_replay(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = TowerConfig(unlocked_groups=1)
    model = ModelConfig(name="test", architecture=ARCHITECTURE, image=one, text=one)
    settings = {"model": model, "offload": "disk", "cache": CacheConfig(image_chunk=5, text_chunk=7)}
    train(small(shards, tmp_path / "once", **settings))
    monkeypatch.setattr("clipscale.models.towers.Tower.trains_only_its_projection", lambda tower: False)
    train(small(shards, tmp_path / "twice", **settings))
    assert curve(tmp_path / "once") == curve(tmp_path / "twice")
    assert len(set(curve(tmp_path / "once"))) == 4, "the projections learn"


@pytest.mark.parametrize(
    ("vision", "text"),
    [
        (
            {"timm_model_name": "resnet10t", "timm_pool": "avg", "timm_proj": "mlp", "image_size": 32},
            {"proj_bias": True},
        ),
        ({"image_size": 12, "layers": 1, "width": 32, "head_width": 16, "patch_size": 6}, {"pool_type": "last"}),
    ],
    ids=["timm", "open_clip"],
)
@pytest.mark.parametrize("lean", [True, False])
def test_a_trunk_and_its_projection_are_the_tower(vision: dict[str, Any], text: dict[str, Any], lean: bool) -> None:
    text = ARCHITECTURE["text_cfg"] | text  # type: ignore[operator]
    one = TowerConfig(unlocked_groups=1)
    about = {"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}
    model = build_model(ModelConfig(name="test", architecture=about, image=one, text=one, lean=lean))
    pixels = torch.randint(0, 256, (3, 3, vision["image_size"], vision["image_size"]), dtype=torch.uint8)
    for tower, inputs in ((model.image, pixels), (model.text, torch.randint(1, 99, (3, 24)))):
        assert tower.trains_only_its_projection() and not tower.encoder.training
        assert torch.equal(Projection(tower)(tower.trunk(inputs)), tower(inputs))
