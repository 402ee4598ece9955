"""A text tower that starts from BERT, as in Inf-CL's table 3: here a small one of transformers, in its folder."""

from pathlib import Path

import pytest
import torch
from open_clip.hf_model import HFTextEncoder

from clipscale.cli.compose import compose_settings
from clipscale.cli.words import overrides_of
from clipscale.common.errors import UserError
from clipscale.config.model import ModelConfig
from clipscale.models.flops import text_flops, trained_names
from clipscale.models.towers import build_model
from clipscale.step.chunk_sizes import random_captions
from clipscale.tools.plan.planner import plan
from tests.support.bert import save_bert

pytest.importorskip("transformers", reason="transformers is not installed (clipscale[hf])")

PRESET = ("model=lit-b16-bert", "model.architecture.vision_cfg.timm_model_name=vit_tiny_patch16_224")


def bert_config(*words: str) -> ModelConfig:
    """The preset's settings, of a small image tower, and these."""
    line = [*PRESET, "data.train=x.tar", *words]
    return compose_settings("train", overrides_of("train", line)[1]).model


def test_the_text_tower_starts_from_bert_where_its_folder_is_given(tmp_path: Path) -> None:
    """The tower's trunk gives what BERT's pooler gives, its tokenizer is BERT's, and all of it trains."""
    folder = tmp_path / "bert"
    theirs = save_bert(folder)
    config = bert_config(f"model.text.weights={folder}")
    model = build_model(config).eval()
    tokens = model.tokenizer(["a red ring", "blue"])
    assert tokens[0, :5].tolist() == [2, 5, 6, 8, 3] and not tokens[1, 3:].any()
    with torch.no_grad():
        expected = theirs(tokens, attention_mask=(tokens != 0).long()).pooler_output
        ours = model.text.encoder
        rows = torch.nn.functional.normalize(ours.proj(expected), dim=-1)
        assert torch.allclose(model.text(tokens), rows, atol=1e-6)
    assert all(p.requires_grad for p in model.text.parameters())
    flops = text_flops(config, trained_names(ours))
    assert 1 < flops.forward / (2 * 77 * 2 * (4 * 32 * 32 + 2 * 32 * 48)) < 1.9 and flops.backward > flops.forward


def test_captions_have_the_tokens_of_the_context_and_not_all_of_berts_positions(tmp_path: Path) -> None:
    """BERT has 512 positions. A plan, a trial of chunk sizes, and the FLOPs count what is computed."""
    save_bert(tmp_path)
    config = bert_config(f"model.text.weights={tmp_path}")
    model = build_model(config).eval()
    shorter = bert_config(f"model.text.weights={tmp_path}", "model.context_length=16")
    other = build_model(shorter).eval()
    assert (model.context_length, other.context_length) == (77, 16)
    assert [m.tokenizer(["a red ring"]).shape[1] for m in (model, other)] == [77, 16]
    assert random_captions(other, torch.device("cpu"), 3).shape == (3, 16)
    assert text_flops(config) == text_flops(config, length=77)
    assert text_flops(shorter) == text_flops(config, length=16)
    with pytest.raises(UserError, match=r"text_cfg.context_length is 600, and its text tower has 512 positions"):
        build_model(bert_config(f"model.text.weights={tmp_path}", "model.context_length=600"))


def test_a_run_with_bert_is_planned_and_its_features_are_open_clips(tmp_path: Path) -> None:
    """open_clip's forward pass chooses tokens by a mask, which a dry run cannot follow."""
    save_bert(tmp_path)
    words = [*PRESET, "data.train=x.tar", f"model.text.weights={tmp_path}", "hardware=cpu", "batch=8", "samples=16"]
    config = compose_settings("plan", overrides_of("plan", words)[1])
    assert plan(config)["fits"]
    model = build_model(config.model).eval()
    tokens = model.tokenizer(["a red ring", "blue"])
    with torch.no_grad():
        ours, theirs = model.text.encoder(tokens), HFTextEncoder.forward(model.text.encoder, tokens)
    assert torch.equal(ours, theirs)


def test_a_tower_that_open_clip_does_not_build_is_refused_in_one_line(tmp_path: Path) -> None:
    from transformers import ModernBertConfig, ModernBertModel

    save_bert(tmp_path)  # its tokenizer
    ends = {"pad_token_id": 0, "bos_token_id": 2, "cls_token_id": 2, "eos_token_id": 3, "sep_token_id": 3}
    sizes = {"vocab_size": 9, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ModernBertModel(ModernBertConfig(**sizes, intermediate_size=48, **ends)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"^model\.architecture does not describe .*add_pooling_layer'\)$"):
        build_model(bert_config(f"model.text.weights={tmp_path}"))


def test_without_the_folder_it_starts_from_scratch() -> None:
    config = bert_config()
    with torch.device("meta"):
        encoder = build_model(config).text.encoder
    assert len(encoder.transformer.resblocks) == 12 and config.text.weights is None
