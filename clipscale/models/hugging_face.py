"""Folders of transformers' CLIP and SigLIP: what they say of a model, in open_clip's words. Imports nothing heavy.

The table `hugging_face.yaml` has the rest, and serves both directions: reading here, writing in `tools/export`.
"""

import hashlib
import json
from pathlib import Path

from clipscale.common import files
from clipscale.common.record import Record

TABLES: Record = files.read_yaml(Path(__file__).with_suffix(".yaml"))
"""By `model_type`."""
PREPROCESSORS = ("preprocessor_config.json", "processor_config.json")
VOCABULARIES = ("tokenizer.json", "vocab.json", "spiece.model")
"""One of these is in a folder with a tokenizer."""
CLIPS = "51b8a58f8c87bc7af902c70cbcdd0287f5baffaa34044e30b8ff8e22c54ec1a0"
"""SHA-256 of CLIP's own vocabulary, as JSON with sorted keys: open_clip's tokenizer has it, without any file."""
SIZES = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size",
         "vocab_size", "max_position_embeddings"}  # fmt: skip
TANH = "gelu_pytorch_tanh"
INTERPOLATIONS = {2: "bilinear", 3: "bicubic"}
"""Pillow's numbers."""
TRUNK = {"timm_model_name": "vit_base_patch16_siglip_224", "timm_pool": "map", "timm_proj": "none"}
"""SigLIP's image tower; `timm_args` has its sizes."""


def description(config: Record) -> Record:
    """open_clip's description of a model by its config.json. Raises ValueError for a model that cannot be built so, and
    what a value of another type raises."""
    kind = config["model_type"]
    table = TABLES[kind]
    vision, text = (
        table[part] | (config.get(f"{part}_config") or {}) | (config.get(f"{part}_config_dict") or {})
        for part in ("vision", "text")
    )
    for name, value in (*vision.items(), *text.items()):
        if name in SIZES and not (isinstance(value, int) and value > 0):
            raise ValueError(f"{name}={value!r} is no size")
    activations = sorted({vision["hidden_act"], text["hidden_act"]})
    if activations[1:] or activations[0] not in table["activations"]:
        raise ValueError(f"its activations are {activations}; both towers can have one of {table['activations']}")
    if vision["num_channels"] != 3 or not vision.get("vision_use_head", True):
        raise ValueError("its image tower has no colours, or no head")
    text_cfg = {
        **_transformer(text),
        "heads": text["num_attention_heads"],
        "context_length": text["max_position_embeddings"],
        "vocab_size": text["vocab_size"],
    }
    if kind == "siglip":
        width = text.get("projection_size") or text["hidden_size"]
        if (vision["layer_norm_eps"], vision["hidden_size"]) != (1e-6, width):
            raise ValueError("its image tower has another layer_norm_eps than 1e-6, or another width than the texts")
        bidirectional = {"no_causal_mask": True, "proj_bias": True, "pool_type": "last"}
        return {
            "embed_dim": width,
            "init_logit_bias": -10,
            "vision_cfg": {**TRUNK, "image_size": vision["image_size"], "timm_args": _timm_args(vision)},
            "text_cfg": text_cfg | bidirectional,
        }
    if text["eos_token_id"] not in (2, text["vocab_size"] - 1):  # else it is the largest token
        text_cfg |= {"pool_type": "eos", "eos_id": text["eos_token_id"]}
    vision_cfg = {
        **_transformer(vision),
        "head_width": vision["hidden_size"] // vision["num_attention_heads"],
        "image_size": vision["image_size"],
        "patch_size": vision["patch_size"],
    }
    towers = {"vision_cfg": vision_cfg, "text_cfg": text_cfg}
    return {"embed_dim": config.get("projection_dim", 512), "quick_gelu": activations == ["quick_gelu"]} | towers


def _transformer(part: Record) -> Record:
    """The words that open_clip's two transformers have in common."""
    words = {"width": part["hidden_size"], "layers": part["num_hidden_layers"], "mlp_ratio": _ratio(part)}
    if part["layer_norm_eps"] != 1e-5:
        words["norm_kwargs"] = {"eps": part["layer_norm_eps"]}
    if part["hidden_act"] == TANH:
        words["act_kwargs"] = {"approximate": "tanh"}
    return words


def _timm_args(vision: Record) -> Record:
    """Arguments of timm's vision transformer."""
    return {
        "patch_size": vision["patch_size"],
        "embed_dim": vision["hidden_size"],
        "depth": vision["num_hidden_layers"],
        "num_heads": vision["num_attention_heads"],
        "mlp_ratio": _ratio(vision),
        "act_layer": "gelu_tanh" if vision["hidden_act"] == TANH else "gelu",
    }


def _ratio(part: Record) -> float:
    """The width of the MLP over that of the tower, of which open_clip and timm take the whole part of the product."""
    width, inner = part["hidden_size"], part["intermediate_size"]
    return inner / width if int(width * (inner / width)) == inner else (inner + 0.5) / width


def pixels(folder: Path, kind: str) -> Record:
    """Of `model.preprocess`, what the folder says of how its pictures were prepared."""
    known = dict(TABLES[kind]["pixels"])
    file = next((folder / name for name in PREPROCESSORS if (folder / name).is_file()), None)
    if file is None:
        return known
    values = files.read_json(file)
    values = values.get("image_processor") or values
    known |= {name: values[f"image_{name}"] for name in ("mean", "std") if values.get(f"image_{name}")}
    if values.get("resample") in INTERPOLATIONS:
        known["interpolation"] = INTERPOLATIONS[values["resample"]]
    size = values.get("size")
    if size:
        central = values.get("do_center_crop", kind == "clip")
        known["resize_mode"] = "shortest" if central or "height" not in size else "squash"
    return known


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in VOCABULARIES)


def has_clips_tokenizer(folder: Path, words: int) -> bool:
    """Whether a folder's vocabulary is CLIP's own; of one without a vocabulary, by its number of `words`."""
    if not has_tokenizer(folder):
        return words == TABLES["clip"]["text"]["vocab_size"]
    if (folder / "vocab.json").is_file():
        vocabulary = files.read_json(folder / "vocab.json")
    elif (folder / "tokenizer.json").is_file():
        vocabulary = files.read_json(folder / "tokenizer.json")["model"]["vocab"]
    else:
        return False
    return hashlib.sha256(json.dumps(vocabulary, sort_keys=True).encode()).hexdigest() == CLIPS
