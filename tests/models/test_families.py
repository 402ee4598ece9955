"""Captions are cut for text towers whose features do not depend on padding, and for no others."""

from typing import Any

import open_clip
import pytest
import torch

from clipscale.config.sections import ModelConfig
from clipscale.models.families import family_of
from clipscale.models.towers import build_model
from tests.models.test_towers import SMALL

CONTEXT, WORDS = 40, (0, 1, 4, 12, 30)


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ({}, True),
        ({"pool_type": "first"}, True),
        ({"pool_type": "eos", "eos_id": 49407}, True),
        ({"no_causal_mask": True}, False),
        ({"no_causal_mask": True, "pool_type": "last"}, False),
        ({"pool_type": "last"}, False),
    ],
    ids=str,
)
def test_captions_are_cut_where_features_do_not_depend_on_padding(text: dict[str, Any], cut: bool) -> None:
    torch.manual_seed(0)
    described = SMALL | {"text_cfg": SMALL["text_cfg"] | {"context_length": CONTEXT} | text}
    tower = build_model(ModelConfig(name="small", architecture=described)).text.eval()
    tokens = open_clip.SimpleTokenizer(context_length=CONTEXT)([" ".join(["cat"] * count) for count in WORDS])
    with torch.no_grad():
        whole = tower(tokens)
        parts = torch.cat([tower(caption[None, : count + 2]) for caption, count in zip(tokens, WORDS)])
    assert torch.allclose(parts, whole, atol=1e-4) == cut
    assert family_of(tower.encoder).cuts_captions(tower.encoder) == cut
