"""Captions are cut for text towers whose features do not depend on padding, and for no others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from open_clip.hf_model import HFTextEncoder

from clipscale.common import files
from clipscale.config.model import ModelConfig
from clipscale.models.families import family_of, may_cut_captions
from clipscale.models.towers import build_model
from tests.models.test_towers import SMALL
from tests.support.towers import captioned, small_captioner

TABLES = files.read_yaml(Path(__file__).with_name("families.yaml"))

CONTEXT = 40


def padding(pad: int) -> Callable[[list[str]], torch.Tensor]:
    """A tokenizer of which only the padding is known."""
    return lambda texts: torch.full((len(texts), CONTEXT), pad)


WORDS = (0, 1, 4, 12, 30)


@pytest.mark.parametrize(
    ("text", "cut"),
    TABLES["cut"],
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
    assert family_of(tower.encoder).ignores_padding(tower.encoder) == cut


@pytest.mark.parametrize(
    ("kind", "pooler"),
    TABLES["poolers"],
)
def test_towers_of_transformers_do_not_see_the_padding(kind: str, pooler: str) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    t5 = {"d_model": 32, "num_layers": 2, "num_heads": 2, "d_kv": 16, "d_ff": 48}
    pad = 0 if kind == "mt5" else 1
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=99, pad_token_id=pad, **(t5 if kind == "mt5" else sizes)
    )
    torch.manual_seed(0)
    encoder = HFTextEncoder(kind, 8, config=config, pooler_type=pooler, proj_type="linear").eval()
    if kind == "mt5":  # as open_clip does with a model that it finds by its name
        encoder.transformer = encoder.transformer.encoder
    tokens = torch.full((3, 16), pad)
    for row, count in enumerate((2, 5, 9)):
        tokens[row, :count] = torch.randint(2, 99, (count,))
    with torch.no_grad():
        whole = encoder(tokens)
        parts = torch.cat([encoder(caption[None, :count]) for caption, count in zip(tokens, (2, 5, 9))])
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-5)
    assert family_of(encoder).ignores_padding(encoder)
    assert may_cut_captions(encoder, padding(pad)) and not may_cut_captions(encoder, padding(98))


def test_a_captioner_whose_tokenizer_pads_with_another_token_keeps_the_padding() -> None:
    """Its text tower masks token 0 alone."""
    tower = small_captioner().text.eval()
    tokens = captioned(3)[1][:, :12]
    tokens[:, 4:] = 0
    for pad, cut in ((0, True), (49, False)):
        padded = tokens.masked_fill(tokens == 0, pad)
        with torch.no_grad():
            assert torch.allclose(tower(padded[:, :8]), tower(padded), atol=1e-5) == cut
        assert may_cut_captions(tower.encoder, padding(pad)) == cut
