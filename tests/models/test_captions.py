"""Captions are cut only for text towers whose features do not depend on padding, which a trial shows."""

from copy import deepcopy
from itertools import chain
from typing import Any

import open_clip
import pytest
import torch
from torch import Tensor, nn

from clipscale.config.sections import ModelConfig
from clipscale.models.captions import expected_to_cut, padding
from clipscale.models.towers import TextTower, build_model
from tests.models.test_towers import SMALL

CPU = torch.device("cpu")
CONTEXT = 40


def tower(lean: bool = True, **text: Any) -> TextTower:
    torch.manual_seed(0)
    described = SMALL | {"text_cfg": SMALL["text_cfg"] | {"context_length": CONTEXT} | text}
    return build_model(ModelConfig(name="small", architecture=described, lean=lean)).text


def tokenizer(texts: list[str]) -> Tensor:
    return open_clip.SimpleTokenizer(context_length=CONTEXT)(texts)


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("text", [{}, {"pool_type": "first"}, {"pool_type": "eos", "eos_id": 49407}], ids=str)
def test_causal_towers_are_cut(text: dict[str, Any], lean: bool) -> None:
    found = tower(lean, **text)
    assert padding(found, tokenizer, CPU) == 0
    assert expected_to_cut(found.encoder)
    empty = deepcopy(found).to("meta")  # as FSDP2 begins
    assert padding(empty, tokenizer, CPU, dict(chain(found.named_parameters(), found.named_buffers()))) == 0
    assert found.training, "its mode is as before"


@pytest.mark.parametrize(
    "text", [{"no_causal_mask": True}, {"no_causal_mask": True, "pool_type": "last"}, {"pool_type": "last"}], ids=str
)
def test_towers_that_see_padding_are_not(text: dict[str, Any]) -> None:
    found = tower(**text)
    assert padding(found, tokenizer, CPU) == "the text tower's features depend on padding"
    assert not expected_to_cut(found.encoder)


class Masked(nn.Module):
    """The mean over the words of a bidirectional tower, as Hugging Face's towers pool; padding is token 1."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.embedding, self.masked = nn.Embedding(50, 8), masked

    def forward(self, tokens: Tensor) -> Tensor:
        mask = (tokens != 1).float()[..., None] if self.masked else torch.ones(*tokens.shape, 1)
        return nn.functional.normalize((self.embedding(tokens) * mask).sum(1) / mask.sum(1), dim=-1)


@pytest.mark.parametrize(("masked", "found"), [(True, 1), (False, "the text tower's features depend on padding")])
def test_it_is_tried_not_known_by_name(masked: bool, found: int | str) -> None:
    def words(texts: list[str]) -> Tensor:
        counts = [min(len(text.split()), 30) for text in texts]
        return torch.tensor([[2, *range(3, 3 + count), 40, *[1] * (38 - count)] for count in counts])

    torch.manual_seed(0)
    assert padding(TextTower(Masked(masked)), words, CPU) == found


def test_batch_normalisation_and_fixed_lengths_are_not_cut() -> None:
    assert padding(nn.Sequential(nn.BatchNorm1d(4)), tokenizer, CPU) == "the text tower has batch normalisation"

    class Fixed(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return tokens.float() @ torch.ones(CONTEXT, 3)

    assert padding(Fixed(), tokenizer, CPU) == "the text tower takes only whole contexts"
