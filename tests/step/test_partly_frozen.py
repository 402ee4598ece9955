"""Partly frozen towers are exact."""

import pytest
import torch
from torch import Tensor

from clipscale.config.sections import TowerConfig
from clipscale.data.loader.captions import SortedCaptions
from clipscale.data.loader.shard_stream import lengths
from clipscale.distributed.world import World
from clipscale.loss.api import contrastive_loss
from clipscale.loss.reference import dense_contrastive_loss
from clipscale.models.towers import ClipModel
from clipscale.step.grad_cache import GradCache
from tests.support.gradients import assert_same, gradients
from tests.support.ranks import run_ranks
from tests.support.towers import samples, small_model

BATCH, ONE = 10, TowerConfig(train="1")


def model_of(image: int, lean: bool) -> ClipModel:
    """So many groups of the image tower train, and the text tower's projection."""
    return small_model(3, lean=lean, image=TowerConfig(train=str(image)), text=ONE).double()


def cut_up(rank: int, world: int, case: tuple[int, bool], parallel: str = "ddp") -> dict[str, Tensor]:
    """This rank's part in ragged chunks, captions sorted."""
    model, here, part = model_of(*case), World(rank, world, torch.device("cpu")), BATCH // world
    pixels, tokens = (x[rank * part : (rank + 1) * part] for x in samples(BATCH))
    texts = SortedCaptions(
        lambda a, b: tokens[a:b],
        lambda: lengths(tokens.numpy(), 0),
        part,
        here.device,
        resident=False,
    )
    texts.split(here.all_reduce_max(texts.make_chunks(4))[0])
    towers = [here.wrap(model.image, parallel), here.wrap(model.text, parallel)]
    cache = GradCache(towers, lambda u, v: contrastive_loss(u, v, model.logit_scale.exp()), chunks=[3, 4])
    cache.step(pixels, texts)
    here.sum_gradients([model.logit_scale])
    return gradients(model)


@pytest.mark.parametrize("case", [(2, True), (3, False)], ids=["lean", "plain"])
def test_a_partly_frozen_tower_has_the_gradients_of_one_graph(case: tuple[int, bool]) -> None:
    model = model_of(*case)
    pixels, tokens = samples(BATCH)
    dense_contrastive_loss(model.image(pixels), model.text(tokens), model.logit_scale.exp()).backward()
    expected = gradients(model)
    assert expected.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    for actual in (cut_up(0, 1, case), *run_ranks(cut_up, 2, case, "ddp" if case[1] else "zero3")):
        assert_same(actual, expected, 1e-12)
