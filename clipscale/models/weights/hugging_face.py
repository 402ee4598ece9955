"""Reads a model's description from folders of transformers' CLIP and SigLIP, in open_clip's words.

The table `hugging_face.yaml` has the rest, and serves both directions: reading here, writing in `tools/export`. Imports
nothing heavy.
"""

import hashlib
import json
from pathlib import Path

from clipscale.common import files
from clipscale.common.record import Record
from clipscale.data.tokenizer_files import VOCABULARIES

# `model_type` of a transformers model -> its part of the table.
MODEL_TYPES: Record = files.read_yaml(Path(__file__).with_suffix(".yaml"))
# SHA-256 of CLIP's own vocabulary, as JSON with sorted keys. open_clip's tokenizer has this vocabulary built in.
CLIP_VOCABULARY_SHA256 = "51b8a58f8c87bc7af902c70cbcdd0287f5baffaa34044e30b8ff8e22c54ec1a0"
TANH = "gelu_pytorch_tanh"
# Pillow's numbers.
INTERPOLATIONS = {2: "bilinear", 3: "bicubic"}


def description_of(config: Record) -> Record:
    """open_clip's description of a model by its config.json. A timm tower has its sizes, too (`encoders.siglip_trunk`).

    Raises ValueError for a model that cannot be built so, and what a value of another type raises.
    """
    table = MODEL_TYPES[config["model_type"]]
    vision = table["vision"] | (config.get("vision_config") or {})
    text = table["text"] | (config.get("text_config") or {})
    activation = text["hidden_act"]
    if vision["hidden_act"] != activation or activation not in table["activations"]:
        raise ValueError(
            f"its activations are {vision['hidden_act']}, {activation}; both can be one of {table['activations']}"
        )
    width = config.get("projection_dim") or text["projection_size"] or text["hidden_size"]
    if "timm_proj" in table["open_clip"]["vision_cfg"] and width != vision["hidden_size"]:
        raise ValueError("its image tower has another width than its texts")
    vision_cfg = {
        **_transformer_words(vision),
        "head_width": vision["hidden_size"] // vision["num_attention_heads"],
        "image_size": vision["image_size"],
        "patch_size": vision["patch_size"],
    }
    text_cfg = {
        **_transformer_words(text),
        "heads": text["num_attention_heads"],
        "context_length": text["max_position_embeddings"],
        "vocab_size": text["vocab_size"],
    }
    # With 2, which stands for the largest token, or with the last id, open_clip's default pooling finds the end token.
    if text["eos_token_id"] not in (2, text["vocab_size"] - 1):
        text_cfg |= {"pool_type": "eos", "eos_id": text["eos_token_id"]}
    return {
        **table["open_clip"],
        "embed_dim": width,
        "quick_gelu": activation == "quick_gelu",
        "vision_cfg": vision_cfg | table["open_clip"]["vision_cfg"],
        "text_cfg": text_cfg | table["open_clip"]["text_cfg"],
    }


def _transformer_words(tower: Record) -> dict[str, object]:
    """The words that both towers have in common."""
    width = tower["hidden_size"]
    inner = tower["intermediate_size"]
    # open_clip and timm take the whole part of the product.
    ratio = inner / width if int(width * (inner / width)) == inner else (inner + 0.5) / width
    words = {
        "width": width,
        "layers": tower["num_hidden_layers"],
        "mlp_ratio": ratio,
        "norm_kwargs": {"eps": tower["layer_norm_eps"]},
    }
    return words | ({"act_kwargs": {"approximate": "tanh"}} if tower["hidden_act"] == TANH else {})


def pixels(folder: Path, model_type: str) -> dict[str, object]:
    """The values of `model.preprocess` that a folder's files give."""
    values: Record = {}
    for name in ("processor_config.json", "preprocessor_config.json"):
        if (folder / name).is_file():
            values |= files.read_json(folder / name)
    values = values.get("image_processor") or values
    preprocess = MODEL_TYPES[model_type]["pixels"] | {
        key: values[f"image_{key}"] for key in ("mean", "std") if f"image_{key}" in values
    }
    if values.get("resample") in INTERPOLATIONS:
        preprocess["interpolation"] = INTERPOLATIONS[values["resample"]]
    if "size" in values:
        preprocess["resize_mode"] = "squash" if "height" in str(values["size"]) else "shortest"
    return preprocess


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in VOCABULARIES)


def has_clips_tokenizer(folder: Path, vocab_size: int) -> bool:
    """Whether a folder's vocabulary is CLIP's own. Without a tokenizer `vocab_size` decides."""
    file = folder / "vocab.json"
    if not file.is_file():
        return vocab_size == MODEL_TYPES["clip"]["text"]["vocab_size"] and not has_tokenizer(folder)
    vocabulary = json.dumps(files.read_json(file), sort_keys=True)
    return hashlib.sha256(vocabulary.encode()).hexdigest() == CLIP_VOCABULARY_SHA256
