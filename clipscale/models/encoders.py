"""Builds open_clip's encoders by its description of a model, and checks the description."""

import json
import re
from copy import deepcopy
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeAlias

import open_clip
import torch
from open_clip.coca_model import CoCa
from open_clip.model import CustomTextCLIP
from timm.layers import to_2tuple
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.func import functional_call

from clipscale.common.errors import UserError, to_user_error
from clipscale.common.record import Record
from clipscale.common.text import did_you_mean
from clipscale.config.model import ModelConfig
from clipscale.data.tokenizer import context_length_of

NO_DESCRIPTION = "model.architecture does not describe an open_clip model"
# Keys of a tower of another package in open_clip's description.
FOREIGN_TOWER_KEYS = ("timm_model_name", "hf_model_name")
Encoders: TypeAlias = CustomTextCLIP | CoCa
# Side of the pictures in pixels, where open_clip's description has none.
IMAGE_SIZE = 224
# Descriptions, as JSON, that `check_encoders` has found usable. A sweep or an average has many that are alike.
USABLE_DESCRIPTIONS = set[str]()


def describe_model(config: ModelConfig) -> Record:
    """open_clip's description of the model (embed_dim, vision_cfg, text_cfg), changed by the settings of `config`.

    Raises UserError for a name that open_clip does not know.
    """
    if config.architecture:
        config.check_parts()
        description = deepcopy(config.architecture)
    else:
        description = open_clip.get_model_config(config.name.replace("/", "-"))  # a copy
        if description is None:
            raise UserError(
                f"model.name={config.name!r} is not an open_clip architecture"
                f"{did_you_mean(config.name, open_clip.list_models())}"
            )
    check_towers_of_captioner(config.name, description)
    description.pop("custom_text", None)
    if config.patch_dropout:
        description["vision_cfg"]["patch_dropout"] = config.patch_dropout
    if config.image_size:
        _check_patches(config.image_size, description["vision_cfg"])
        description["vision_cfg"]["image_size"] = config.image_size
    if config.context_length:
        for section in {"text_cfg", "multimodal_cfg"} & description.keys():
            description[section]["context_length"] = config.context_length
    for section, key in (("vision_cfg", "timm_model"), ("text_cfg", "hf_model")):
        if f"{key}_name" in description[section]:  # building a model downloads nothing: its weights are `weights` alone
            description[section][f"{key}_pretrained"] = False
    return description


def check_towers_of_captioner(name: str, description: Record) -> None:
    """Raise UserError for a captioner if its towers do not give the tokens that its decoder reads."""
    towers = [description[section] for section in ("vision_cfg", "text_cfg")]
    if "multimodal_cfg" in description and not all(tower.get("output_tokens") for tower in towers):
        raise UserError(f"model.name={name!r}: a captioner's vision_cfg and text_cfg need output_tokens: true")
    if "multimodal_cfg" in description and any(tower.get(key) for tower in towers for key in FOREIGN_TOWER_KEYS):
        raise UserError(f"model.name={name!r}: a captioner has towers of open_clip's own, as coca_ViT-B-32")


def build_encoders(description: Record, image_size: int | None = None) -> Encoders:
    """open_clip's model by its description, on torch's default device; a tower of timm for pictures of `image_size`.

    Raises UserError where it cannot be built.
    """
    needs_transformers = description["text_cfg"].get("hf_model_name") and find_spec("transformers") is None
    lacks = "; pip install 'clipscale[hf]'" if needs_transformers else ""
    with to_user_error(NO_DESCRIPTION, lacks):
        encoders = (CoCa if "multimodal_cfg" in description else CustomTextCLIP)(**description)
        encoders.context_length = _checked_context_length(description["text_cfg"], encoders.text.context_length)
        if overrides_timm_sizes(description["vision_cfg"]):
            encoders.set_submodule("visual.trunk", siglip_trunk(description["vision_cfg"]))
    trunk: Any = getattr(encoders.visual, "trunk", None)
    if image_size and hasattr(trunk, "set_input_size"):
        trunk.set_input_size(img_size=(image_size, image_size))
    return encoders


def _checked_context_length(text_cfg: Record, positions: int) -> int:
    """The context length of a description. `positions`: how many the text tower has; towers of transformers often have
    more.

    Raises ValueError if there are fewer.
    """
    length = context_length_of(text_cfg)
    if 0 < positions < length:  # 0: any number, as T5 takes
        raise ValueError(f"text_cfg.context_length is {length}, and its text tower has {positions} positions")
    return length


@torch.no_grad()
def check_encoders(encoders: Encoders, description: Record) -> None:
    """Raise UserError unless open_clip's own towers take a sample and give a row of features.

    Parts of a description are checked only at first use. The sample is on the meta device: nothing is computed. Done
    once in a process for each description.
    """
    description_json = json.dumps(description, sort_keys=True, default=str)
    if description_json in USABLE_DESCRIPTIONS:
        return
    vision_cfg = description["vision_cfg"]
    text_cfg = description["text_cfg"]
    pixels = torch.empty(1, 3, *to_2tuple(vision_cfg.get("image_size", IMAGE_SIZE)), device="meta")
    tokens = torch.empty(1, encoders.context_length, dtype=torch.long, device="meta")
    towers = []  # towers of open_clip's own classes
    if "timm_model_name" not in vision_cfg:
        towers.append(("image", encoders.visual, pixels))
    if not text_cfg.get("hf_model_name"):
        towers.append(("text", encoders.text, tokens))
    decoder_inputs: list[Tensor] = []
    for name, tower, inputs in towers:
        with to_user_error(f"{NO_DESCRIPTION}: its {name} tower cannot be used"):
            rows = run_on_meta(tower.eval(), inputs)
            if isinstance(encoders, CoCa):
                rows, tokens_NTW = rows
                decoder_inputs.append(tokens_NTW)
            if getattr(rows, "shape", None) != (1, description["embed_dim"]):
                raise ValueError("its output is not a row of features of width embed_dim")
    if isinstance(encoders, CoCa):
        with to_user_error(f"{NO_DESCRIPTION}: its decoder cannot read its towers' tokens"):
            run_on_meta(encoders.text_decoder, *decoder_inputs)
    USABLE_DESCRIPTIONS.add(description_json)


def run_on_meta(module: nn.Module, *inputs: Tensor) -> Any:
    """A module's outputs for inputs on the meta device: shapes without values."""
    state = {key: x.to("meta") for key, x in (*module.named_parameters(), *module.named_buffers())}
    return functional_call(module, state, inputs)


def overrides_timm_sizes(vision: Record) -> bool:
    """Whether a description overrides the sizes of a timm tower, by open_clip's keys (`width`, `layers`, ...)."""
    return "timm_model_name" in vision and "width" in vision


def siglip_trunk(vision: Record) -> nn.Module:
    """SigLIP's image tower by the sizes and the activation in a description: timm has names for some of them."""
    return VisionTransformer(
        img_size=vision["image_size"],
        patch_size=vision["patch_size"],
        embed_dim=vision["width"],
        depth=vision["layers"],
        num_heads=vision["width"] // vision["head_width"],
        mlp_ratio=vision["mlp_ratio"],
        act_layer="gelu_tanh" if vision.get("act_kwargs") else "gelu",
        norm_layer=partial(nn.LayerNorm, **vision["norm_kwargs"]),
        num_classes=0,
        class_token=False,
        global_pool="map",
    )


def _check_patches(image_size: int, vision: Record) -> None:
    """Raise UserError for pictures that the patches do not divide."""
    timm_patch = re.search(r"_patch(\d+)", vision.get("timm_model_name", ""))
    patch = vision.get("patch_size") or (int(timm_patch[1]) if timm_patch else 1)
    if image_size % patch:
        near = max(1, round(image_size / patch)) * patch
        raise UserError(
            f"model.image_size={image_size}: the patches are {patch} pixels wide; give a multiple, such as {near}"
        )
