"""Writes a folder that transformers loads as CLIP or SigLIP: weights under its names, configurations, a tokenizer."""

from pathlib import Path
from typing import Any

import open_clip
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from clipscale.common import files
from clipscale.common.errors import UserError, one_line
from clipscale.common.record import Record
from clipscale.common.terminal import print_line
from clipscale.config.model import ModelConfig
from clipscale.models.encoders import build_encoders
from clipscale.models.towers import ClipModel, l2_normalize
from clipscale.models.weights import hugging_face
from clipscale.models.weights.renaming import Weights, from_transformers, to_transformers
from clipscale.tools.export.open_clip import weights

WEIGHTS_FILE = "model.safetensors"
START = "<|startoftext|>"
END = "<|endoftext|>"
# Model type -> the beginning of the names of transformers' classes.
CLASSES = {"clip": "CLIP", "siglip": "Siglip"}


def write(model: ClipModel, config: ModelConfig, out: Path, note: dict[str, str]) -> str:
    """Write the folder; returns the call that loads it, with {} for the folder.

    Raises OSError, and UserError for a model that transformers does not have: then nothing is written.
    """
    try:
        description = configuration(model)
        model_type = description["model_type"]
        state = to_transformers(weights(model), model_type)
        pixels = preprocessing(model, model_type)
        check_same_features(model, description, state)
    except (ValueError, AttributeError, LookupError, RuntimeError) as error:  # transformers' towers lack a part
        raise UserError(
            f"format=hf: transformers has no such model ({one_line(error)}); take format=open_clip"
        ) from error
    if model_type == "siglip":
        for name in ("logit_scale", "logit_bias"):
            state[name] = state.get(name, torch.zeros(1)).reshape(1)
    out.mkdir(parents=True, exist_ok=True)
    with files.replacing(out / WEIGHTS_FILE) as file:
        save_file(
            {name: value.contiguous() for name, value in state.items()}, file.name, metadata={"format": "pt"} | note
        )
    files.write_json(out / "config.json", description)
    files.write_json(out / "preprocessor_config.json", pixels)
    if isinstance(model.tokenizer.inner, open_clip.SimpleTokenizer):
        if model_type == "clip":
            write_tokenizer(out, model.context_length)
        else:  # SigLIP's tower reads the padding, so its token matters
            print_line(f"{out}: without a tokenizer: transformers' CLIPTokenizer pads captions with another token")
    return "transformers.AutoModel.from_pretrained('{}')"


def configuration(model: ClipModel) -> Record:
    """config.json. Raises ValueError, LookupError and AttributeError for parts that CLIP and SigLIP do not have."""
    visual: Any = model.image.encoder
    text: Any = model.text.encoder
    words = transformer_config(text.transformer.resblocks, text.ln_final)
    words |= {"max_position_embeddings": text.context_length, "vocab_size": text.vocab_size}
    if hasattr(visual, "trunk"):
        model_type = "siglip"
        vision = transformer_config(visual.trunk.blocks, visual.trunk.norm)
        patch = visual.trunk.patch_embed.patch_size
        words["projection_size"] = model.embed_dim
    else:
        model_type = "clip"
        vision = transformer_config(visual.transformer.resblocks, visual.ln_post)
        patch = visual.patch_size
        words["eos_token_id"] = {"argmax": 2, "eos": text.eos_id}[text.pool_type]  # 2: the largest token
        if model.logit_bias is not None:
            raise ValueError("CLIP has no logit bias")
    # CLIP's classes of one tower read only their own part, and assume a width of 512 if it gives none.
    projection = {"projection_dim": model.embed_dim} if model_type == "clip" else {}
    return {
        "architectures": [f"{CLASSES[model_type]}Model"],
        "model_type": model_type,
        "projection_dim": model.embed_dim,
        "vision_config": vision | projection | {"image_size": model.image_size, "patch_size": patch[0]},
        "text_config": words | projection,
    }


def transformer_config(blocks: Any, norm: nn.LayerNorm) -> dict[str, object]:
    """A transformer in the words of transformers' configurations."""
    block = blocks[0]
    first, activation, *_ = block.mlp.children()
    x = torch.linspace(-3, 3, 9)
    activations = {
        "gelu": F.gelu(x),
        hugging_face.TANH: F.gelu(x, approximate="tanh"),
        "quick_gelu": x * (1.702 * x).sigmoid(),
    }
    return {
        "hidden_size": first.in_features,
        "intermediate_size": first.out_features,
        "num_hidden_layers": len(blocks),
        "num_attention_heads": block.attn.num_heads,
        "hidden_act": min(activations, key=lambda name: (activation(x) - activations[name]).abs().max()),
        "layer_norm_eps": norm.eps,
    }


@torch.no_grad()
def check_same_features(model: ClipModel, config: Record, state: Weights) -> None:
    """Raise ValueError unless a model that is read from this folder has the same features."""
    text: Any = model.text.encoder
    again = build_encoders(hugging_face.description_of(config)).eval()
    again.load_state_dict(from_transformers(state), strict=False)
    side = model.image_size
    pixels = torch.arange(3 * side**2).view(1, 3, side, side).sin()
    tokens = torch.arange(1, model.context_length + 1).repeat(2, 1)
    tokens[1, model.context_length // 2 :] = text.pad_id  # a caption whose end is not its last token
    for name, ours, theirs, inputs in (
        ("image", model.image.encoder, again.visual, pixels),
        ("text", text, again.text, tokens),
    ):
        if not torch.allclose(l2_normalize(ours(inputs)), l2_normalize(theirs(inputs)), atol=1e-3):
            raise ValueError(f"its {name} tower would have other features")


def preprocessing(model: ClipModel, model_type: str) -> dict[str, object]:
    """preprocessor_config.json, without the defaults. Raises ValueError for pictures that it cannot describe."""
    pixels = model.pixels
    side = {"height": model.image_size, "width": model.image_size}
    sizes = {"shortest": {"shortest_edge": model.image_size}, "squash": side}
    if pixels.resize_mode not in sizes:
        raise ValueError(f"model.preprocess.resize_mode={pixels.resize_mode}")
    numbers = {name: number for number, name in hugging_face.INTERPOLATIONS.items()}
    return {
        "image_processor_type": f"{CLASSES[model_type]}ImageProcessor",
        "do_convert_rgb": True,
        "size": sizes[pixels.resize_mode],
        "crop_size": side,
        "resample": numbers[pixels.interpolation],
        "image_mean": pixels.mean,
        "image_std": pixels.std,
    }


def write_tokenizer(out: Path, length: int) -> None:
    """CLIP's own vocabulary in the files of transformers' CLIPTokenizer. `length`: tokens of a caption."""
    clip = open_clip.SimpleTokenizer()
    names = {"<start_of_text>": START, "<end_of_text>": END}
    files.write_json(out / "vocab.json", {names.get(text, text): number for text, number in clip.encoder.items()})
    pairs = "".join(f"{a} {b}\n" for a, b in clip.bpe_ranks)  # in the order of the merges
    files.write_text(out / "merges.txt", f"#version: 0.2\n{pairs}")
    special = {"bos_token": START, "eos_token": END, "unk_token": END, "pad_token": END}
    record = {"tokenizer_class": "CLIPTokenizer", "model_max_length": length, "do_lower_case": True, **special}
    files.write_json(out / "tokenizer_config.json", record)
