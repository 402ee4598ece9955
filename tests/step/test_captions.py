"""Captions are cut only for text towers whose features do not depend on padding, which a trial shows."""

from typing import Any

import open_clip
import pytest
import torch
from torch import Tensor, nn

from clipscale.config.sections import ModelConfig
from clipscale.models.families import family_of
from clipscale.models.towers import TextTower, build_model
from clipscale.step.captions import padding
from tests.models.test_towers import SMALL

CPU = torch.device("cpu")
CONTEXT = 40


def tower(**text: Any) -> TextTower:
    torch.manual_seed(0)
    described = SMALL | {"text_cfg": SMALL["text_cfg"] | {"context_length": CONTEXT} | text}
    return build_model(ModelConfig(name="small", architecture=described)).text


def tokenizer(texts: list[str]) -> Tensor:
    return open_clip.SimpleTokenizer(context_length=CONTEXT)(texts)


@pytest.mark.parametrize("text", [{}, {"pool_type": "first"}, {"pool_type": "eos", "eos_id": 49407}], ids=str)
def test_causal_towers_are_cut(text: dict) -> None:
    causal = tower(**text)
    assert padding(causal, tokenizer, CPU) == 0
    assert family_of(causal.encoder).cuts_captions(causal.encoder)
    assert causal.training, "its mode is as before"


@pytest.mark.parametrize(
    "text", [{"no_causal_mask": True}, {"no_causal_mask": True, "pool_type": "last"}, {"pool_type": "last"}], ids=str
)
def test_towers_that_see_padding_are_not(text: dict) -> None:
    bidirectional = tower(**text)
    assert padding(bidirectional, tokenizer, CPU) == "the text tower's features depend on padding"
    assert not family_of(bidirectional.encoder).cuts_captions(bidirectional.encoder)


def test_batch_normalisation_and_fixed_lengths_are_not_cut() -> None:
    assert padding(nn.Sequential(nn.BatchNorm1d(4)), tokenizer, CPU) == "the text tower has batch normalisation"

    class Fixed(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return tokens.float() @ torch.ones(CONTEXT, 3)

    assert padding(Fixed(), tokenizer, CPU) == "the text tower takes only whole contexts"
