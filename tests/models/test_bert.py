"""A text tower that starts from BERT, as in Inf-CL's table 3: here a small one of transformers, in its folder."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from clipscale.cli import compose
from clipscale.models.towers import build_model

transformers = pytest.importorskip("transformers", reason="transformers is not installed (clipscale[hf])")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "blue", "ring"]
PRESET = ("model=lit-b16-bert", "model.architecture.vision_cfg.timm_model_name=vit_tiny_patch16_224")


@pytest.fixture
def bert(tmp_path: Path) -> tuple[Path, Any]:
    """A folder as Hugging Face has it: with a language model's head, and the names of BERT's first release."""
    torch.manual_seed(0)
    about = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48
    )
    model = transformers.BertForPreTraining(about).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    folder = tmp_path / "bert"
    model.save_pretrained(folder)
    older = {".weight": ".gamma", ".bias": ".beta"}
    state = load_file(folder / "model.safetensors")
    for name in [name for name in state if "LayerNorm" in name]:
        stem, dot, kind = name.rpartition(".")
        state[stem + older[dot + kind]] = state.pop(name)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "pad_token": "[PAD]"}')
    return folder, model.bert


def test_the_text_tower_starts_from_bert_where_its_folder_is_given(bert: tuple[Path, Any]) -> None:
    """With its tokenizer: the tower's trunk gives what BERT's pooler gives, and what trains is all of it."""
    folder, theirs = bert
    words = [*PRESET, f"model.text.weights={folder}", "data.train=x.tar"]
    model = build_model(compose.settings("train", compose.overrides("train", words)[1]).model).eval()
    tokens = model.tokenizer(["a red ring", "blue"])
    assert tokens[0, :5].tolist() == [2, 5, 6, 8, 3] and not tokens[1, 3:].any()
    with torch.no_grad():
        expected = theirs(tokens, attention_mask=(tokens != 0).long()).pooler_output
        ours = model.text.encoder
        rows = torch.nn.functional.normalize(ours.proj(expected), dim=-1)
        assert torch.allclose(model.text(tokens), rows, atol=1e-6)
    assert all(p.requires_grad for p in model.text.parameters())


def test_without_the_folder_it_starts_from_scratch() -> None:
    config = compose.settings("train", compose.overrides("train", [*PRESET, "data.train=x.tar"])[1]).model
    with torch.device("meta"):
        encoder = build_model(config).text.encoder
    assert len(encoder.transformer.resblocks) == 12 and config.text.weights is None
