"""Reads a model's description from the configuration beside its weights: open_clip's, transformers' or timm's.

Folders are untrusted: their files may name no path and no address, and describe no model larger than the weights.
Imports nothing heavy.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from clipscale.common import files
from clipscale.common.errors import to_user_error
from clipscale.common.record import Record
from clipscale.config.model import ModelConfig, Preprocess
from clipscale.config.parse import dataclass_from
from clipscale.config.setting import settings_of
from clipscale.models.weights import hugging_face

OPEN_CLIP_CONFIG = "open_clip_config.json"
CONFIG = "config.json"
# A model without a known architecture.
UNKNOWN_MODEL = ModelConfig("")
# Tower -> the keys of its description in which weights must agree, with open_clip's defaults.
COMPARED: Record = files.read_yaml(Path(__file__).with_name("open_clip.yaml"))
# A text in a stranger's description may be a word of open_clip's or a repository, but no path and no address.
SAFE_TEXT = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@dataclass(frozen=True)
class FolderConfig:
    """The content of a folder's configuration. A field is empty if the configuration lacks it."""

    # The architecture, as open_clip describes it.
    description: Record = field(default_factory=dict)
    # How pictures are prepared, in open_clip's words and others.
    pixels: dict[str, object] = field(default_factory=dict)
    # For a captioner, `model.correct_cls_mask`; None if the folder does not say.
    correct_cls_mask: bool | None = None


def described_model(folder: Path, name: str) -> ModelConfig:
    """Read the configuration in a folder, for a model called `name`. Without a name it gives no architecture.

    Raises UserError, and what a value of another type raises.
    """
    if (folder / OPEN_CLIP_CONFIG).is_file():
        config = _read_open_clip(folder)
    elif (folder / CONFIG).is_file():
        config = _read_transformers_or_timm(folder)
    else:
        config = FolderConfig()
    preprocess = checked_pixels(config.pixels)
    if not config.description:
        return replace(UNKNOWN_MODEL, preprocess=preprocess)
    check_words(config.description)
    _name_tokenizer(config.description["text_cfg"], folder)
    return ModelConfig(name, config.description, preprocess=preprocess, correct_cls_mask=config.correct_cls_mask)


def _read_open_clip(folder: Path) -> FolderConfig:
    content = files.read_json(folder / OPEN_CLIP_CONFIG)
    mask = content.get("correct_cls_mask")
    return FolderConfig(
        content["model_cfg"], content.get("preprocess_cfg") or {}, mask if isinstance(mask, bool) else None
    )


def _read_transformers_or_timm(folder: Path) -> FolderConfig:
    """Read transformers' config.json, or timm's, which describes no architecture."""
    content = files.read_json(folder / CONFIG)
    model_type, _, tower = str(content.get("model_type")).partition("_")
    if model_type not in hugging_face.MODEL_TYPES:  # the file may describe a tower of timm
        pictures = content.get("pretrained_cfg") or content
        pixels = {key: pictures[key] for key in ("mean", "std", "interpolation") if key in pictures}
        if pixels.get("interpolation") not in hugging_face.INTERPOLATIONS.values():  # such as `random`
            pixels.pop("interpolation", None)
        return FolderConfig(pixels=pixels)
    pixels = hugging_face.pixels(folder, model_type)
    if tower:
        return FolderConfig(pixels=pixels)
    with to_user_error(f"{folder / CONFIG} describes no model that can be built here"):  # no model= would help
        description = hugging_face.description_of(content)
    text = description["text_cfg"]
    if not hugging_face.has_clips_tokenizer(folder, text["vocab_size"]):
        text["hf_tokenizer_name"] = model_type
    return FolderConfig(description, pixels)


def _name_tokenizer(text: Record, folder: Path) -> None:
    """If the folder has a tokenizer's files, name it as the tokenizer in a description's `text_cfg`, as open_clip does.

    A folder of transformers' CLIP or SigLIP is named in any case.
    """
    name = text.get("hf_tokenizer_name")
    if not name or text.get("hf_model_name"):
        return
    if name in hugging_face.MODEL_TYPES or hugging_face.has_tokenizer(folder):
        text["hf_tokenizer_name"] = str(folder.resolve())


def described_tower(folder: Path) -> str:
    """The tower, `image` or `text`, that the configuration of transformers or timm in a folder describes alone."""
    if (folder / OPEN_CLIP_CONFIG).is_file() or not (folder / CONFIG).is_file():
        return ""
    content = files.read_json(folder / CONFIG)
    if "pretrained_cfg" in content:  # timm's
        return "image"
    return {"vision_model": "image", "text_model": "text"}.get(str(content.get("model_type")).partition("_")[2], "")


def check_words(description: Record) -> None:
    """Raise ValueError for an open_clip description with a text that could be a path or an address, or a size < 0."""
    for key, value in description.items():
        if isinstance(value, dict):
            check_words(value)
        elif isinstance(value, str) and value and not SAFE_TEXT.fullmatch(value):
            raise ValueError(f"{key}={value[:80]!r} is not a name")
        elif isinstance(value, int | float) and value < 0 and key != "init_logit_bias":
            raise ValueError(f"{key}={value} is not a size")


def difference(ours: ModelConfig, theirs: ModelConfig) -> str:
    """How two models differ, in words. Empty if only the resolution may differ, or if one model is not known."""
    descriptions = [model.description for model in (ours, theirs)]
    if not all(descriptions):
        return ""
    our_values, their_values = map(comparable, descriptions)
    different = (key for key, value in our_values.items() if value != their_values[key])
    return next((f"whose {key} is {their_values[key]}, not {our_values[key]}" for key in different), "")


def comparable(description: Record) -> dict[str, object]:
    """The values of a description in which weights must agree. A value of a wrong type raises any exception."""
    values = {"embed_dim": description["embed_dim"], "quick_gelu": description.get("quick_gelu", False)}
    for section, defaults in COMPARED.items():
        words = defaults | description[section]
        words["mlp_ratio"] = int(words["width"] * words["mlp_ratio"])
        words["timm_model_name"] = re.sub(r"_\d+$", "", words.get("timm_model_name") or "")
        values |= {f"{section}.{name}": words[name] for name in defaults}
    return values


def least_parameters(description: Record) -> float:
    """A lower bound, usually close, of the number of parameters in open_clip's own transformers."""
    count = 0.0
    for section, defaults in COMPARED.items():
        words = defaults | description[section]
        if words.get("hf_model_name") or (words.get("timm_model_name") and "width" not in description[section]):
            continue
        patches = _largest(words.get("image_size", 0)) // words.get("patch_size", 1)
        tokens = words.get("vocab_size", 0) + words.get("context_length", 0) + patches**2
        layers = _largest(words["layers"]) * (4 + 2 * words["mlp_ratio"]) * words["width"]
        count += (layers + tokens) * words["width"]
    return count


def _largest(value: int | list[int]) -> int:
    return value if isinstance(value, int) else max(value)


def checked_pixels(values: Mapping[str, object]) -> dict[str, object]:
    """Those `values` that are keys of `model.preprocess`. Raises UserError for wrong ones."""
    names = settings_of(Preprocess)
    preprocess = {key: value for key, value in values.items() if key in names}
    dataclass_from(Preprocess, preprocess)
    return preprocess
