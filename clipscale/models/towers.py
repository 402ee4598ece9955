"""Builds open_clip's models as two towers and a logit scale.

N: samples, H, W: pixels, T: tokens, D: feature width.
"""

import hashlib
import json
import math
import re
from copy import deepcopy
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeAlias

import open_clip
import torch
import torch.nn.functional as F
from open_clip.coca_model import CoCa
from open_clip.model import CustomTextCLIP
from open_clip.transformer import MultimodalTransformer
from timm.layers import to_2tuple
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.func import functional_call

from clipscale.common.errors import UserError, to_user_error
from clipscale.common.modules import is_batch_norm, is_frozen
from clipscale.common.record import Record
from clipscale.common.text import did_you_mean
from clipscale.config.model import ModelConfig
from clipscale.data.eval_transform import EvalTransform
from clipscale.data.tokenizer import Tokenizer, context_length_of, tokenizer_of
from clipscale.models import lora
from clipscale.models.captioner import init_decoder
from clipscale.models.groups import lock, rate_factors
from clipscale.models.lean import embed_patches_by_product, lean_encoder
from clipscale.models.linear import replace_linear_layers
from clipscale.models.weights.load_weights import load_weights

TOWERS = ("image", "text")
NO_DESCRIPTION = "model.architecture does not describe an open_clip model"
# Keys of a tower of another package in open_clip's description.
FOREIGN_TOWER_KEYS = ("timm_model_name", "hf_model_name")
Encoders: TypeAlias = CustomTextCLIP | CoCa
# Side of the pictures in pixels, where open_clip's description has none.
IMAGE_SIZE = 224
# Descriptions, as JSON, that `check_encoders` has found usable. A sweep or an average has many that are alike.
USABLE_DESCRIPTIONS = set[str]()


class Tower(nn.Module):
    """An encoder of open_clip."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def encoder_inputs(self, inputs: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, inputs: Tensor, *, with_tokens: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Unit feature rows; `with_tokens`: also the tokens that a captioner's decoder reads, (N, T, W)."""
        output = self.encoder(self.encoder_inputs(inputs))
        rows, tokens = output if isinstance(output, tuple) else (output, None)
        return (unit_rows(rows), tokens) if with_tokens else unit_rows(rows)

    def digest(self) -> str:
        """A digest of the weights, names and values, on any device."""
        digest = hashlib.blake2b(digest_size=16)
        for name, value in sorted(self.state_dict().items()):
            digest.update(name.encode())
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


class ImageTower(Tower):
    """uint8 pixels (N, 3, H, W) -> unit feature rows (N, D), float32 (float64 for a float64 encoder)."""

    mean: Tensor
    std: Tensor

    def __init__(self, encoder: nn.Module, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__(encoder)
        self.register_buffer("mean", 255 * torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", 255 * torch.tensor(std).view(3, 1, 1), persistent=False)
        convolutions = sum(isinstance(module, nn.Conv2d) for module in encoder.modules())
        # Memory layout of the pixels. Convolutional networks pass it on to their layers; channels last is faster there.
        self.layout = torch.channels_last if convolutions > 1 else torch.contiguous_format

    def encoder_inputs(self, inputs: Tensor) -> Tensor:
        if not inputs.is_cuda:
            return ((inputs - self.mean) / self.std).contiguous(memory_format=self.layout)
        is_cast = torch.is_autocast_enabled("cuda")
        return self.normalised(inputs, torch.get_autocast_dtype("cuda") if is_cast else self.mean.dtype)

    def normalised(self, pixels: Tensor, dtype: torch.dtype) -> Tensor:
        """`(pixels - mean) / std` in one kernel, in the type that the patch embedding computes in."""
        out = torch.empty_like(pixels, dtype=dtype, memory_format=self.layout)
        return torch.addcmul(-self.mean / self.std, pixels, 1 / self.std, out=out)


class TextTower(Tower):
    """Integer tokens (N, T) -> unit feature rows (N, D), float32 (float64 for a float64 encoder)."""

    def encoder_inputs(self, inputs: Tensor) -> Tensor:
        return inputs.long()


def unit_rows(features: Tensor, shortest: float = 1e-6) -> Tensor:
    """Rows scaled to Euclidean length 1, in at least float32: half precision would cost two digits of every cosine.

    A row shorter than `shortest` is divided by `shortest`. Its gradient is divided by the same number, so it stays
    bounded, even for a row of zeros.
    """
    if features.dtype in (torch.bfloat16, torch.float16):
        features = features.float()
    return F.normalize(features, dim=-1, eps=shortest)


class ClipModel(nn.Module):
    """Two towers, the logarithm of the logit scale, and a logit bias for the sigmoid loss."""

    logit_bias: nn.Parameter | None

    # A captioner's decoder; None for other models.
    decoder: MultimodalTransformer | None

    def __init__(self, encoders: Encoders, width: int, config: ModelConfig, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.width = width
        self.image = ImageTower(encoders.visual, config.pixels.mean, config.pixels.std)
        self.text = TextTower(encoders.text)
        self.decoder = encoders.text_decoder if isinstance(encoders, CoCa) else None
        self.logit_scale = encoders.logit_scale
        self.logit_bias = encoders.logit_bias
        self.image_size = to_2tuple(encoders.visual.image_size)[0]
        self.pixels = config.pixels
        self.context_length = encoders.context_length
        self.tokenizer = tokenizer
        self.batch_norm_frozen = config.batch_norm == "frozen"

    @property
    def is_captioner(self) -> bool:
        """Whether the model has a decoder of captions."""
        return self.decoder is not None

    def eval_transform(self) -> EvalTransform:
        """The transform from a picture's bytes to the image tower's pixels, as in open_clip's evaluation."""
        return EvalTransform(self.image_size, mode=self.pixels.resize_mode, interpolation=self.pixels.interpolation)

    def rate_factors(self, config: ModelConfig) -> dict[str, float]:
        """Factors of the learning rate by parameter; 1 for those that are missing. Raises UserError."""
        factors = {}
        for name_of_tower, tower, settings in (("image", self.image, config.image), ("text", self.text, config.text)):
            for name, factor in rate_factors(tower.encoder, name_of_tower, settings).items():
                factors[f"{name_of_tower}.encoder.{name}"] = factor
        return factors

    def train(self, mode: bool = True) -> "ClipModel":
        """Sets the mode as torch does, but frozen towers and frozen batch normalisation stay in evaluation mode."""
        super().train(mode)
        for module in self.modules():
            if is_batch_norm(module) and (self.batch_norm_frozen or is_frozen(module)):
                module.eval()
        for tower in (self.image, self.text):
            if is_frozen(tower):
                tower.eval()
        return self


def architecture(config: ModelConfig) -> Record:
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


def encoders_of(description: Record, image_size: int | None = None) -> Encoders:
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
            rows = on_meta(tower.eval(), inputs)
            if isinstance(encoders, CoCa):
                rows, tokens_NTW = rows
                decoder_inputs.append(tokens_NTW)
            if getattr(rows, "shape", None) != (1, description["embed_dim"]):
                raise ValueError("its output is not a row of features of width embed_dim")
    if isinstance(encoders, CoCa):
        with to_user_error(f"{NO_DESCRIPTION}: its decoder cannot read its towers' tokens"):
            on_meta(encoders.text_decoder, *decoder_inputs)
    USABLE_DESCRIPTIONS.add(description_json)


def on_meta(module: nn.Module, *inputs: Tensor) -> Any:
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


def image_size_and_tokenizer(config: ModelConfig) -> tuple[int, Tokenizer]:
    """The side of a model's pictures in pixels, and its tokenizer, which data workers need before the model is built.

    Raises UserError as `architecture`.
    """
    description = architecture(config)
    size = description["vision_cfg"].get("image_size", IMAGE_SIZE)
    return to_2tuple(size)[0], tokenizer_of(config.name, description["text_cfg"])


def build_model(config: ModelConfig, *, lean: bool = True, tokenizer: Tokenizer | None = None) -> ClipModel:
    """Build the model that `config` describes: float32, on torch's default device, in training mode.

    `lean`: with the shorter forward pass of `models/lean.py` where there is one, not open_clip's own. `tokenizer`: from
    `image_size_and_tokenizer`; None: load one.

    Raises UserError for an unknown architecture or weights that do not fit it.
    """
    description = architecture(config)
    if config.init_scale is not None:
        description["init_logit_scale"] = math.log(config.init_scale)
    if config.init_bias is not None:
        description["init_logit_bias"] = config.init_bias
    encoders = encoders_of(description, config.image_size)
    if config.architecture:
        check_encoders(encoders, description)
    if isinstance(encoders, CoCa):
        init_decoder(encoders.text_decoder)
        mask = config.correct_cls_mask
        encoders.text.correct_cls_mask = not config.weights if mask is None else mask
    load_weights(encoders, config)
    if config.grad_checkpointing:
        encoders.set_grad_checkpointing()
    if lean:
        encoders.visual = lean_encoder(encoders.visual)
        embed_patches_by_product(encoders.visual)
        encoders.text = lean_encoder(encoders.text)
        if isinstance(encoders, CoCa):
            encoders.text_decoder = lean_encoder(encoders.text_decoder)
    tokenizer = tokenizer or tokenizer_of(config.name, description["text_cfg"])
    model = ClipModel(encoders, description["embed_dim"], config, tokenizer)
    for name, tower, settings in (("image", model.image, config.image), ("text", model.text, config.text)):
        if config.lora and settings.groups != 0:
            lora.add_adapters(tower.encoder, name, config.lora, settings.groups or 0)
        elif settings.groups is not None:
            lock(tower.encoder, name, settings.groups)
        replace_linear_layers(tower)
    return model.train()
