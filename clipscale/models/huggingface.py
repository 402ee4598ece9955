"""Hugging Face's CLIP models as open_clip's: names of weights both ways, and their configurations."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

KIND = "clip"
"""The `model_type` of their configurations."""

_BLOCK = {
    "ln_1.": "layer_norm1.",
    "ln_2.": "layer_norm2.",
    "mlp.c_fc.": "mlp.fc1.",
    "mlp.c_proj.": "mlp.fc2.",
    "attn.out_proj.": "self_attn.out_proj.",
    "attn.in_proj_": "self_attn.{}_proj.",
}


def _blocks(tower: str, hf_tower: str) -> dict[str, str]:
    return {f"{tower}.resblocks.#.{name}": f"{hf_tower}.encoder.layers.#.{hf_name}" for name, hf_name in _BLOCK.items()}


_NAMES = {
    **_blocks("visual.transformer", "vision_model"),
    **_blocks("text.transformer", "text_model"),
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.": "vision_model.embeddings.patch_embedding.",
    "visual.ln_pre.": "vision_model.pre_layrnorm.",
    "visual.ln_post.": "vision_model.post_layernorm.",
    "visual.proj": "visual_projection.weight",
    "text.token_embedding.": "text_model.embeddings.token_embedding.",
    "text.positional_embedding": "text_model.embeddings.position_embedding.weight",
    "text.ln_final.": "text_model.final_layer_norm.",
    "text.text_projection": "text_projection.weight",
    "logit_scale": "logit_scale",
}
"""open_clip's name or prefix -> Hugging Face's. # is the number of a block, {} is q, k and v."""
_TRANSPOSED = ("visual.proj", "text.text_projection")
"""Matrices that open_clip multiplies from the right, and torch's linear layers from the left."""


def from_open_clip(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """open_clip's weights under Hugging Face's names. Raises KeyError for a weight that such a model does not have."""
    renamed: dict[str, Tensor] = {}
    for name, value in state.items():
        new = _renamed(name, _NAMES)
        if new is None:
            raise KeyError(name)
        if "{}" in new:
            renamed |= {new.format(part): rows.contiguous() for part, rows in zip("qkv", value.chunk(3))}
        else:
            renamed[new] = (value.T if name in _TRANSPOSED else value).contiguous()
    return renamed


def to_open_clip(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face's weights of a CLIP model, or of one of its towers, under open_clip's names.

    Weights whose names are not known keep them, so that a comparison of names lists them.
    """
    names = {hf_name: name for name, hf_name in _NAMES.items()}
    renamed: dict[str, Tensor] = {}
    projections: dict[str, dict[str, Tensor]] = {}
    for name, value in state.items():
        projection = re.search(r"(?<=self_attn\.)[qkv](?=_proj)", name)
        plain = re.sub(r"(?<=self_attn\.)[qkv](?=_proj)", "{}", name)
        new = _renamed(plain, names) or name
        if projection and new != name:
            projections.setdefault(new, {})[projection[0]] = value
        elif not name.endswith("position_ids"):
            renamed[new] = value.T if new in _TRANSPOSED else value
    for new, parts in projections.items():
        if len(parts) == 3:
            renamed[new] = torch.cat([parts[part] for part in "qkv"])
    return renamed


def _renamed(name: str, names: dict[str, str]) -> str | None:
    number = re.search(r"\.\d+\.", name)
    block = number[0] if number else ".#."
    plain = name.replace(block, ".#.", 1)
    for old, new in names.items():
        if plain == old or (old.endswith((".", "_")) and plain.startswith(old)):
            return (new + plain.removeprefix(old)).replace(".#.", block, 1)
    return None


# -- configurations ----------------------------------------------------------------------------------------------------

_COMMON: dict[str, Any] = {"num_hidden_layers": 12, "hidden_act": "quick_gelu"}
_VISION_DEFAULTS = _COMMON | {
    "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "image_size": 224, "patch_size": 32
}  # fmt: skip
_TEXT_DEFAULTS = _COMMON | {
    "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "max_position_embeddings": 77,
    "vocab_size": 49408,
}  # fmt: skip
"""transformers', where config.json leaves values out."""
_VISION_SIZES = {
    "image_size": "image_size", "patch_size": "patch_size", "width": "hidden_size", "layers": "num_hidden_layers"
}  # fmt: skip
_TEXT_SIZES = {
    "width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
    "context_length": "max_position_embeddings", "vocab_size": "vocab_size",
}  # fmt: skip
"""open_clip's name of a number -> Hugging Face's."""
_OTHER_KEYS = {"head_width", "mlp_ratio", "patch_dropout", "hf_tokenizer_name", "tokenizer_kwargs"}
_KEYS = {*_VISION_SIZES, *_TEXT_SIZES, *_OTHER_KEYS}
"""What open_clip's description of such a model may say of its towers."""


def description(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """open_clip's description of a model from its config.json. Raises ValueError for what open_clip cannot build."""
    vision = _VISION_DEFAULTS | (config.get("vision_config") or {})
    text = _TEXT_DEFAULTS | (config.get("text_config") or {})
    vision_cfg = {size: vision[hf_size] for size, hf_size in _VISION_SIZES.items()}
    vision_cfg["head_width"] = vision["hidden_size"] // vision["num_attention_heads"]
    vision_cfg["mlp_ratio"] = vision["intermediate_size"] / vision["hidden_size"]
    text_cfg = {size: text[hf_size] for size, hf_size in _TEXT_SIZES.items()}
    text_cfg["mlp_ratio"] = text["intermediate_size"] / text["hidden_size"]
    if text["vocab_size"] != _TEXT_DEFAULTS["vocab_size"]:  # CLIP's own vocabulary needs no files
        text_cfg["hf_tokenizer_name"] = folder
    activations = {vision["hidden_act"], text["hidden_act"]}
    if activations not in ({"quick_gelu"}, {"gelu"}):
        raise ValueError(f"its activations are {sorted(activations)}; quick_gelu or gelu in both towers can be read")
    towers = {"vision_cfg": vision_cfg, "text_cfg": text_cfg}
    return {"embed_dim": config.get("projection_dim", 512), "quick_gelu": "quick_gelu" in activations} | towers


def with_own_tokenizer(description: dict[str, Any], folder: Path) -> dict[str, Any]:
    """open_clip's description; its tokenizer is the folder that it came with, if the files are there, as in open_clip.

    A description with a tower of transformers stays.
    """
    text = description["text_cfg"]
    if "hf_tokenizer_name" in text and not text.get("hf_model_name") and (folder / "tokenizer_config.json").is_file():
        return description | {"text_cfg": text | {"hf_tokenizer_name": str(folder.resolve())}}
    return description


def configuration(description: dict[str, Any], *, logit_bias: bool) -> dict[str, Any]:
    """A model's config.json by open_clip's description. Raises ValueError for what is not part of CLIP."""
    vision = description["vision_cfg"]
    text = description["text_cfg"]
    foreign = {*vision, *text} - _KEYS
    if logit_bias:
        foreign.add("a logit bias")
    if not isinstance(vision.get("layers"), int):
        foreign.add("a residual network")
    if foreign:
        raise ValueError(f"{', '.join(sorted(foreign))} is not part of CLIP's own architecture")
    common = {
        "projection_dim": description["embed_dim"],
        "hidden_act": "quick_gelu" if description.get("quick_gelu") else "gelu",
    }
    vision_config = common | {hf_size: vision[size] for size, hf_size in _VISION_SIZES.items()}
    vision_config["intermediate_size"] = int(vision["width"] * vision.get("mlp_ratio", 4.0))
    vision_config["num_attention_heads"] = vision["width"] // vision.get("head_width", 64)
    text_config = common | {hf_size: text[size] for size, hf_size in _TEXT_SIZES.items()}
    text_config["intermediate_size"] = int(text["width"] * text.get("mlp_ratio", 4.0))
    text_config |= {"bos_token_id": 49406, "eos_token_id": 49407, "pad_token_id": 49407}
    towers = {"vision_config": vision_config, "text_config": text_config}
    return {"model_type": KIND, "projection_dim": description["embed_dim"]} | towers
