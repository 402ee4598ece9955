"""A text tower that starts from BERT, as in Inf-CL's table 3: here a small one of transformers, in its folder."""

from pathlib import Path

import pytest
import torch

from clipscale.cli import compose
from clipscale.models.flops import text_flops, trained_of
from clipscale.models.towers import build_model
from tests.support.bert import save_bert

pytest.importorskip("transformers", reason="transformers is not installed (clipscale[hf])")

PRESET = ("model=lit-b16-bert", "model.architecture.vision_cfg.timm_model_name=vit_tiny_patch16_224")


def test_the_text_tower_starts_from_bert_where_its_folder_is_given(tmp_path: Path) -> None:
    """With its tokenizer: the tower's trunk gives what BERT's pooler gives, and what trains is all of it."""
    folder = tmp_path / "bert"
    theirs = save_bert(folder)
    words = [*PRESET, f"model.text.weights={folder}", "data.train=x.tar"]
    config = compose.settings("train", compose.overrides("train", words)[1]).model
    model = build_model(config).eval()
    tokens = model.tokenizer(["a red ring", "blue"])
    assert tokens[0, :5].tolist() == [2, 5, 6, 8, 3] and not tokens[1, 3:].any()
    with torch.no_grad():
        expected = theirs(tokens, attention_mask=(tokens != 0).long()).pooler_output
        ours = model.text.encoder
        rows = torch.nn.functional.normalize(ours.proj(expected), dim=-1)
        assert torch.allclose(model.text(tokens), rows, atol=1e-6)
    assert all(p.requires_grad for p in model.text.parameters())
    flops = text_flops(config, trained_of(ours), 77)
    assert 1 < flops.forward / (2 * 77 * 2 * (4 * 32 * 32 + 2 * 32 * 48)) < 1.9 and flops.backward > flops.forward


def test_without_the_folder_it_starts_from_scratch() -> None:
    config = compose.settings("train", compose.overrides("train", [*PRESET, "data.train=x.tar"])[1]).model
    with torch.device("meta"):
        encoder = build_model(config).text.encoder
    assert len(encoder.transformer.resblocks) == 12 and config.text.weights is None
