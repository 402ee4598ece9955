"""A small BERT in a folder of transformers' layout, as Hugging Face stores the large one."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "blue", "ring"]


def save_bert(folder: Path) -> Any:
    """Write a BERT with a language model's head and the names of BERT's first release. Returns it without the head."""
    import transformers

    torch.manual_seed(0)
    about = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48
    )
    model = transformers.BertForPreTraining(about).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    older = {".weight": ".gamma", ".bias": ".beta"}
    state = load_file(folder / "model.safetensors")
    for name in [name for name in state if "LayerNorm" in name]:
        stem, dot, kind = name.rpartition(".")
        state[stem + older[dot + kind]] = state.pop(name)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "pad_token": "[PAD]"}')
    return model.bert
