"""A folder of a CLIP model between open_clip's format, which clipscale reads and writes, and transformers'.

    python docs/howto/hugging_face.py to-transformers FOLDER OUT
    python docs/howto/hugging_face.py to-open-clip FOLDER OUT

Weights stay the same bit for bit. CLIP's own architecture alone: a ViT and a text transformer, without a logit bias.
"""

import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
from safetensors.torch import load_file, save_file
from torch import Tensor

KIND = "clip"
"""The `model_type` of transformers' configurations."""
START, END = "<|startoftext|>", "<|endoftext|>"
OPEN_CLIP, OPEN_CLIP_WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt")

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


def to_transformers(state: dict[str, Tensor]) -> dict[str, Tensor]:
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


def description(config: dict[str, Any]) -> dict[str, Any]:
    """open_clip's description of a model from its config.json. Raises ValueError for what open_clip cannot build."""
    vision = _VISION_DEFAULTS | (config.get("vision_config") or {})
    text = _TEXT_DEFAULTS | (config.get("text_config") or {})
    vision_cfg = {size: vision[hf_size] for size, hf_size in _VISION_SIZES.items()}
    vision_cfg["head_width"] = vision["hidden_size"] // vision["num_attention_heads"]
    vision_cfg["mlp_ratio"] = vision["intermediate_size"] / vision["hidden_size"]
    text_cfg = {size: text[hf_size] for size, hf_size in _TEXT_SIZES.items()}
    text_cfg["mlp_ratio"] = text["intermediate_size"] / text["hidden_size"]
    if text["vocab_size"] != _TEXT_DEFAULTS["vocab_size"]:  # CLIP's own vocabulary needs no files
        text_cfg["hf_tokenizer_name"] = "own"
    activations = {vision["hidden_act"], text["hidden_act"]}
    if activations not in ({"quick_gelu"}, {"gelu"}):
        raise ValueError(f"its activations are {sorted(activations)}; quick_gelu or gelu in both towers can be read")
    towers = {"vision_cfg": vision_cfg, "text_cfg": text_cfg}
    return {"embed_dim": config.get("projection_dim", 512), "quick_gelu": "quick_gelu" in activations} | towers


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


def preprocessing(preprocess: dict[str, Any]) -> dict[str, Any]:
    """transformers' description of how pictures become pixels, by open_clip's `preprocess_cfg`."""
    size = preprocess["size"]
    side = {"height": size, "width": size}
    central = preprocess.get("resize_mode", "shortest") == "shortest"
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": size} if central else side,
        "resample": 2 if preprocess.get("interpolation") == "bilinear" else 3,
        "do_center_crop": central,
        "crop_size": side,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocess.get("mean", OPENAI_DATASET_MEAN)),
        "image_std": list(preprocess.get("std", OPENAI_DATASET_STD)),
    }


def write_tokenizer(out: Path, length: int) -> None:
    """CLIP's own vocabulary in the files of transformers' CLIPTokenizer."""
    clip = open_clip.SimpleTokenizer(context_length=length)
    names = {"<start_of_text>": START, "<end_of_text>": END}
    vocabulary = {names.get(text, text): number for text, number in clip.encoder.items()}
    write_json(out / "vocab.json", vocabulary)
    pairs = sorted(clip.bpe_ranks, key=lambda pair: int(clip.bpe_ranks[pair]))
    (out / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in pairs), encoding="utf-8")
    special = {"bos_token": START, "eos_token": END, "unk_token": END, "pad_token": END}
    record = {"tokenizer_class": "CLIPTokenizer", "model_max_length": length, "do_lower_case": True, **special}
    write_json(out / "tokenizer_config.json", record)


# -- folders -----------------------------------------------------------------------------------------------------------


def folder_to_transformers(folder: Path, out: Path) -> None:
    """A folder by `clipscale export`, as `transformers.CLIPModel` loads it. Raises ValueError for another model."""
    described = json.loads((folder / OPEN_CLIP).read_text(encoding="utf-8"))
    model = described["model_cfg"]
    state = load_file(folder / OPEN_CLIP_WEIGHTS)
    config = configuration(model, logit_bias="logit_bias" in state)
    renamed = to_transformers(state)
    dtype = str(renamed["visual_projection.weight"].dtype).removeprefix("torch.")
    out.mkdir(parents=True, exist_ok=True)
    save_file(renamed, out / "model.safetensors", metadata={"format": "pt"})
    write_json(out / "config.json", config | {"architectures": ["CLIPModel"], "dtype": dtype})
    write_json(out / "preprocessor_config.json", preprocessing(described["preprocess_cfg"]))
    if not copy_tokenizer(folder, out):
        write_tokenizer(out, model["text_cfg"].get("context_length", 77))


def folder_to_open_clip(folder: Path, out: Path) -> None:
    """A folder of transformers' CLIPModel, as clipscale (`model.weights=OUT`) and open_clip (`local-dir:OUT`) load it.

    Raises ValueError for an activation that open_clip does not have.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = description(config)
    out.mkdir(parents=True, exist_ok=True)
    state = to_open_clip(load_file(folder / "model.safetensors"))
    save_file({name: value.contiguous() for name, value in state.items()}, out / OPEN_CLIP_WEIGHTS, {"format": "pt"})
    preprocess = {"size": model["vision_cfg"]["image_size"]}
    file = folder / "preprocessor_config.json"
    processor = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    preprocess |= {key: processor[f"image_{key}"] for key in ("mean", "std") if f"image_{key}" in processor}
    write_json(out / OPEN_CLIP, {"model_cfg": model | {"custom_text": True}, "preprocess_cfg": preprocess})
    if "hf_tokenizer_name" in model["text_cfg"]:
        copy_tokenizer(folder, out)


def copy_tokenizer(folder: Path, out: Path) -> bool:
    """Copy the files of transformers' tokenizer, if there are some."""
    present = [folder / name for name in TOKENIZER if (folder / name).is_file()]
    for file in present:
        shutil.copy(file, out / file.name)
    return bool(present)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str]) -> None:
    convert = {"to-transformers": folder_to_transformers, "to-open-clip": folder_to_open_clip}
    if len(arguments) != 3 or arguments[0] not in convert:
        sys.exit(__doc__)
    convert[arguments[0]](Path(arguments[1]), Path(arguments[2]))


if __name__ == "__main__":
    main(sys.argv[1:])
