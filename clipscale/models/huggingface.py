"""Hugging Face's CLIP and SigLIP models as open_clip's: names of weights both ways, and their configurations.

SigLIP 2 of fixed resolution has SigLIP's architecture.
"""

import re
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor

KINDS = ("clip", "siglip")

_OPEN_CLIP_BLOCK = {
    "ln_1.": "layer_norm1.",
    "ln_2.": "layer_norm2.",
    "mlp.c_fc.": "mlp.fc1.",
    "mlp.c_proj.": "mlp.fc2.",
    "attn.out_proj.": "self_attn.out_proj.",
    "attn.in_proj_": "self_attn.{}_proj.",
}
_TIMM_BLOCK = {
    "norm1.": "layer_norm1.",
    "norm2.": "layer_norm2.",
    "mlp.": "mlp.",
    "attn.proj.": "self_attn.out_proj.",
    "attn.qkv.": "self_attn.{}_proj.",
}


def _blocks(tower: str, ours: str, parts: dict[str, str]) -> dict[str, str]:
    return {f"{ours}.#.{name}": f"{tower}_model.encoder.layers.#.{theirs}" for name, theirs in parts.items()}


_TEXT = _blocks("text", "text.transformer.resblocks", _OPEN_CLIP_BLOCK) | {
    "text.token_embedding.": "text_model.embeddings.token_embedding.",
    "text.positional_embedding": "text_model.embeddings.position_embedding.weight",
    "text.ln_final.": "text_model.final_layer_norm.",
    "logit_scale": "logit_scale",
    "logit_bias": "logit_bias",
}
_CLIP = _blocks("vision", "visual.transformer.resblocks", _OPEN_CLIP_BLOCK) | {
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.": "vision_model.embeddings.patch_embedding.",
    "visual.ln_pre.": "vision_model.pre_layrnorm.",
    "visual.ln_post.": "vision_model.post_layernorm.",
    "visual.proj": "visual_projection.weight",
    "text.text_projection": "text_projection.weight",
}
_SIGLIP = _blocks("vision", "visual.trunk.blocks", _TIMM_BLOCK) | {
    "visual.trunk.patch_embed.proj.": "vision_model.embeddings.patch_embedding.",
    "visual.trunk.pos_embed": "vision_model.embeddings.position_embedding.weight",
    "visual.trunk.norm.": "vision_model.post_layernorm.",
    "visual.trunk.attn_pool.latent": "vision_model.head.probe",
    "visual.trunk.attn_pool.proj.": "vision_model.head.attention.out_proj.",
    "visual.trunk.attn_pool.norm.": "vision_model.head.layernorm.",
    "visual.trunk.attn_pool.mlp.": "vision_model.head.mlp.",
    "text.text_projection.": "text_model.head.",
}
_NAMES = {"clip": _TEXT | _CLIP, "siglip": _TEXT | _SIGLIP}
"""By kind: open_clip's name or prefix -> Hugging Face's. # is the number of a block, {} is q, k and v."""
_TRANSPOSED = ("visual.proj", "text.text_projection")
"""Matrices that open_clip multiplies from the right, and torch's linear layers from the left."""
_POOL = "visual.trunk.attn_pool."
_POOL_INPUT = "vision_model.head.attention.in_proj_"


def from_open_clip(state: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """open_clip's weights under Hugging Face's names. Raises KeyError for a weight that such a model does not have."""
    names, theirs = _NAMES[kind], dict[str, Tensor]()
    for name, value in state.items():
        if name.startswith((f"{_POOL}q.", f"{_POOL}kv.")):
            continue
        new = _renamed(name, names)
        if new is None:
            raise KeyError(name)
        if "{}" in new:
            theirs |= {new.format(part): rows for part, rows in zip("qkv", value.chunk(3))}
        else:
            value = value.T if name in _TRANSPOSED else value
            theirs[new] = value[0] if name.endswith("trunk.pos_embed") else value
    if kind == "siglip":
        for part in ("weight", "bias"):
            theirs[_POOL_INPUT + part] = torch.cat([state[f"{_POOL}q.{part}"], state[f"{_POOL}kv.{part}"]])
        for name in ("logit_scale", "logit_bias"):
            theirs[name] = theirs[name].reshape(1)
    return {name: value.contiguous() for name, value in theirs.items()}


def to_open_clip(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face's weights of a CLIP or SigLIP model, or of one of its towers, under open_clip's names.

    Weights whose names are not known keep them, so that a comparison of names lists them.
    """
    kind = "siglip" if any("vision_model.head." in n or "text_model.head." in n for n in state) else "clip"
    names = {theirs: ours for ours, theirs in _NAMES[kind].items()}
    ours: dict[str, Tensor] = {}
    fused: dict[str, dict[str, Tensor]] = {}
    for name, value in state.items():
        if name.endswith("position_ids"):
            continue
        projection = re.search(r"self_attn\.([qkv])_proj", name)
        new = _renamed(name.replace(projection[0], "self_attn.{}_proj") if projection else name, names) or name
        if name.startswith(_POOL_INPUT):
            part, third = name.removeprefix(_POOL_INPUT), len(value) // 3
            ours[f"{_POOL}q.{part}"], ours[f"{_POOL}kv.{part}"] = value.split([third, 2 * third])
        elif projection and new != name:
            fused.setdefault(new, {})[projection[1]] = value
        else:
            value = value.T if new in _TRANSPOSED and value.dim() == 2 else value
            ours[new] = value[None] if new.endswith("trunk.pos_embed") else value
    return ours | {name: torch.cat([parts[p] for p in "qkv"]) for name, parts in fused.items() if len(parts) == 3}


def _renamed(name: str, names: dict[str, str]) -> str | None:
    number = re.search(r"\.\d+\.", name)
    plain = name.replace(number[0], ".#.", 1) if number else name
    for old, new in names.items():
        if plain == old or (old.endswith((".", "_")) and plain.startswith(old)):
            return (new + plain.removeprefix(old)).replace(".#.", number[0] if number else ".#.", 1)
    return None


# -- configurations ----------------------------------------------------------------------------------------------------

_TOWER = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
_CLIP_TEXT = {"hidden_size": 512, "num_attention_heads": 8, "max_position_embeddings": 77, "vocab_size": 49408}
_DEFAULTS = {
    "clip": (_TOWER | {"image_size": 224, "patch_size": 32}, _TOWER | _CLIP_TEXT),
    "siglip": (
        _TOWER | {"image_size": 224, "patch_size": 16},
        _TOWER | {"max_position_embeddings": 64, "vocab_size": 32000},
    ),
}
"""Of the vision and the text tower, where config.json leaves them out."""
_VISION_SIZES = {
    "image_size": "image_size", "patch_size": "patch_size", "width": "hidden_size", "layers": "num_hidden_layers"
}  # fmt: skip
_TEXT_SIZES = {
    "width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
    "context_length": "max_position_embeddings", "vocab_size": "vocab_size",
}  # fmt: skip
"""open_clip's name of a number -> Hugging Face's."""
_SIGLIP_TEXT = {"no_causal_mask": True, "proj_bias": True, "pool_type": "last"}
_GELU = {"gelu_pytorch_tanh": "tanh", "gelu": "none"}
"""Hugging Face's name of an activation -> torch's."""
_ACTS = {ours: theirs for theirs, ours in _GELU.items()}
_TIMM_SIGLIP = {(768, 12): "base", (1024, 24): "large", (1152, 27): "so400m", (1536, 40): "giantopt"}


def description(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """open_clip's description of a model from its config.json. Raises ValueError for a model of another kind."""
    kind = config.get("model_type")
    if kind not in KINDS:
        raise ValueError(f"its model_type is {kind!r}; {' and '.join(KINDS)} can be read")
    vision, text = (
        defaults | (config.get(f"{part}_config") or {}) for part, defaults in zip(("vision", "text"), _DEFAULTS[kind])
    )
    mlp_ratios = [t.get("intermediate_size", 4 * t["hidden_size"]) / t["hidden_size"] for t in (vision, text)]
    text_cfg: dict[str, Any] = {ours: text[theirs] for ours, theirs in _TEXT_SIZES.items()}
    text_cfg["mlp_ratio"] = mlp_ratios[1]
    if kind == "siglip":
        act_kwargs = []
        for tower in (vision, text):
            act = tower.get("hidden_act", "gelu_pytorch_tanh")
            if act not in _GELU:
                raise ValueError(f"its activation is {act}; {' or '.join(_GELU)} can be read")
            act_kwargs.append({"approximate": _GELU[act]})
        text_cfg |= _SIGLIP_TEXT | {"act_kwargs": act_kwargs[1], "norm_kwargs": {"eps": 1e-6}}
        text_cfg |= {"hf_tokenizer_name": folder, "tokenizer_kwargs": {"clean": "canonicalize"}}
        vision_cfg = {"image_size": vision["image_size"], "act_kwargs": act_kwargs[0]}
        vision_cfg |= {"timm_model_name": _timm_siglip(vision), "timm_pool": "map", "timm_proj": "none"}
        towers = {"vision_cfg": vision_cfg, "text_cfg": text_cfg}
        return {"embed_dim": vision["hidden_size"], "init_logit_bias": -10} | towers
    vision_cfg = {ours: vision[theirs] for ours, theirs in _VISION_SIZES.items()}
    vision_cfg["head_width"] = vision["hidden_size"] // vision["num_attention_heads"]
    vision_cfg["mlp_ratio"] = mlp_ratios[0]
    if text["vocab_size"] != 49408:  # CLIP's own vocabulary needs no files
        text_cfg["hf_tokenizer_name"] = folder
    acts = {tower.get("hidden_act", "quick_gelu") for tower in (vision, text)}
    if acts not in ({"quick_gelu"}, {"gelu"}):
        raise ValueError(f"its activations are {sorted(acts)}; quick_gelu or gelu in both towers can be read")
    quick = {"quick_gelu": True} if acts == {"quick_gelu"} else {}
    return {"embed_dim": config.get("projection_dim", 512), "vision_cfg": vision_cfg, "text_cfg": text_cfg} | quick


def _timm_siglip(vision: dict[str, Any]) -> str:
    """timm's name of a SigLIP tower, else of another resolution. Raises ValueError if it has none."""
    size = _TIMM_SIGLIP.get((vision["hidden_size"], vision["num_hidden_layers"]))
    if size is None:
        raise ValueError(f"timm has no SigLIP tower of width {vision['hidden_size']}")
    prefix = f"vit_{size}_patch{vision['patch_size']}_siglip_"
    name = f"{prefix}{vision['image_size']}"
    return name if timm.is_model(name) else next(iter(timm.list_models(f"{prefix}[0-9]*")), name)


def gelu_of(trunk: Any) -> str:
    """How a tower of timm computes GELU, as torch names it."""
    return str(getattr(trunk.blocks[0].mlp.act, "approximate", "tanh"))


def with_own_tokenizer(description: dict[str, Any], folder: Path) -> dict[str, Any]:
    """open_clip's description; its tokenizer is the folder that it came with, if the files are there, as in open_clip.

    A description with a tower of transformers stays.
    """
    text = description["text_cfg"]
    if "hf_tokenizer_name" in text and not text.get("hf_model_name") and (folder / "tokenizer_config.json").is_file():
        return description | {"text_cfg": text | {"hf_tokenizer_name": str(folder.resolve())}}
    return description


def resolution(description: dict[str, Any]) -> dict[str, int]:
    """`image_size` as a setting of the model, where timm has the tower of a description for other sizes only."""
    vision = description["vision_cfg"]
    other = not str(vision.get("timm_model_name", vision["image_size"])).endswith(str(vision["image_size"]))
    return {"image_size": vision["image_size"]} if other else {}


_VISION_KEYS = {*_VISION_SIZES, "head_width", "mlp_ratio", "patch_dropout"}
_TEXT_KEYS = {*_TEXT_SIZES, "mlp_ratio", "hf_tokenizer_name", "tokenizer_kwargs"}


def configuration(description: dict[str, Any], visual: Any, *, logit_bias: bool) -> dict[str, Any]:
    """A model's config.json by open_clip's description and its image encoder. Raises ValueError where there is none."""
    vision, text = description["vision_cfg"], description["text_cfg"]
    trunk = getattr(visual, "trunk", None)
    if text.get("hf_model_name"):
        raise ValueError(f"its text tower is {text['hf_model_name']}")
    text_config = {theirs: text[ours] for ours, theirs in _TEXT_SIZES.items()}
    text_config["intermediate_size"] = int(text["width"] * text.get("mlp_ratio", 4.0))
    if trunk is not None:
        siglip = {key: text.get(key) for key in _SIGLIP_TEXT} == _SIGLIP_TEXT and vision.get("timm_proj") == "none"
        left = set(text) - _TEXT_KEYS - set(_SIGLIP_TEXT) - {"norm_kwargs", "act_kwargs"}
        if not (siglip and logit_bias and hasattr(getattr(trunk, "attn_pool", None), "latent")) or left:
            raise ValueError("only timm's SigLIP towers with SigLIP's text tower and a logit bias")
        vision_config = {
            "hidden_size": trunk.embed_dim,
            "intermediate_size": trunk.blocks[0].mlp.fc1.out_features,
            "num_hidden_layers": len(trunk.blocks),
            "num_attention_heads": trunk.blocks[0].attn.num_heads,
            "image_size": trunk.patch_embed.img_size[0],
            "patch_size": trunk.patch_embed.patch_size[0],
            "hidden_act": _ACTS[gelu_of(trunk)],
        }
        text_config["hidden_act"] = _ACTS[(text.get("act_kwargs") or {}).get("approximate", "none")]
        text_config["projection_size"] = description["embed_dim"]
        return {"model_type": "siglip", "vision_config": vision_config, "text_config": text_config}
    left = (set(vision) - _VISION_KEYS) | (set(text) - _TEXT_KEYS)
    if left or logit_bias or isinstance(vision["layers"], list | tuple):
        what = ", ".join(sorted(left)) or ("a logit bias" if logit_bias else "a residual network")
        raise ValueError(f"{what} is not part of CLIP's own architecture")
    act = {"hidden_act": "quick_gelu" if description.get("quick_gelu") else "gelu"}
    vision_config = {theirs: vision[ours] for ours, theirs in _VISION_SIZES.items()} | {
        "intermediate_size": int(vision["width"] * vision.get("mlp_ratio", 4.0)),
        "num_attention_heads": vision["width"] // vision.get("head_width", 64),
        "projection_dim": description["embed_dim"],
    }
    text_config |= {"projection_dim": description["embed_dim"], "bos_token_id": 49406, "eos_token_id": 49407}
    towers = {"vision_config": vision_config | act, "text_config": text_config | act | {"pad_token_id": 49407}}
    return {"model_type": "clip", "projection_dim": description["embed_dim"]} | towers
