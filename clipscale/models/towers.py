"""Builds open_clip's models as two towers and a logit scale.

N: samples, H, W: pixels, T: tokens, D: feature width.
"""

import hashlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from open_clip.coca_model import CoCa
from open_clip.transformer import MultimodalTransformer
from timm.layers import to_2tuple
from torch import Tensor, nn

from clipscale.common.modules import is_batch_norm, is_frozen
from clipscale.config.model import ModelConfig, TowerConfig
from clipscale.data.eval_transform import EvalTransform
from clipscale.data.tokenizer import Tokenizer, tokenizer_of
from clipscale.models import lora
from clipscale.models.captioner import init_decoder
from clipscale.models.encoders import IMAGE_SIZE, Encoders, build_encoders, check_encoders, describe_model
from clipscale.models.groups import lock, lr_factors
from clipscale.models.lean import embed_patches_by_product, lean_encoder
from clipscale.models.linear import replace_linear_layers
from clipscale.models.weights.load_weights import load_weights

TOWERS = ("image", "text")


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
        return (l2_normalize(rows), tokens) if with_tokens else l2_normalize(rows)

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
        self.memory_format = torch.channels_last if convolutions > 1 else torch.contiguous_format

    def encoder_inputs(self, inputs: Tensor) -> Tensor:
        if not inputs.is_cuda:
            return ((inputs - self.mean) / self.std).contiguous(memory_format=self.memory_format)
        is_cast = torch.is_autocast_enabled("cuda")
        return self.normalised(inputs, torch.get_autocast_dtype("cuda") if is_cast else self.mean.dtype)

    def normalised(self, pixels: Tensor, dtype: torch.dtype) -> Tensor:
        """`(pixels - mean) / std` in one kernel, in the type that the patch embedding computes in."""
        out = torch.empty_like(pixels, dtype=dtype, memory_format=self.memory_format)
        return torch.addcmul(-self.mean / self.std, pixels, 1 / self.std, out=out)


class TextTower(Tower):
    """Integer tokens (N, T) -> unit feature rows (N, D), float32 (float64 for a float64 encoder)."""

    def encoder_inputs(self, inputs: Tensor) -> Tensor:
        return inputs.long()


def l2_normalize(features: Tensor, shortest: float = 1e-6) -> Tensor:
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

    def __init__(self, encoders: Encoders, embed_dim: int, config: ModelConfig, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.embed_dim = embed_dim
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

    def lr_factors(self, config: ModelConfig) -> dict[str, float]:
        """Factors of the learning rate by parameter; 1 for those that are missing. Raises UserError."""
        factors = {}
        for name_of_tower, tower, settings in (("image", self.image, config.image), ("text", self.text, config.text)):
            for name, factor in lr_factors(tower.encoder, name_of_tower, settings).items():
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


def image_size_and_tokenizer(config: ModelConfig) -> tuple[int, Tokenizer]:
    """The side of a model's pictures in pixels, and its tokenizer, which data workers need before the model is built.

    Raises UserError as `describe_model`.
    """
    description = describe_model(config)
    size = description["vision_cfg"].get("image_size", IMAGE_SIZE)
    return to_2tuple(size)[0], tokenizer_of(config.name, description["text_cfg"])


def build_model(config: ModelConfig, *, lean: bool = True, tokenizer: Tokenizer | None = None) -> ClipModel:
    """Build the model that `config` describes: float32, on torch's default device, in training mode.

    `lean`: with the shorter forward pass of `models/lean.py` where there is one, not open_clip's own. `tokenizer`: from
    `image_size_and_tokenizer`; None: load one.

    Raises UserError for an unknown architecture or weights that do not fit it.
    """
    description = described_with_initial_values(config)
    encoders = build_encoders(description, config.image_size)
    if config.architecture:
        check_encoders(encoders, description)
    if isinstance(encoders, CoCa):
        prepare_captioner(encoders, config)
    load_weights(encoders, config)
    if config.grad_checkpointing:
        encoders.set_grad_checkpointing()
    if lean:
        make_lean(encoders)
    tokenizer = tokenizer or tokenizer_of(config.name, description["text_cfg"])
    model = ClipModel(encoders, description["embed_dim"], config, tokenizer)
    for name, tower, settings in (("image", model.image, config.image), ("text", model.text, config.text)):
        choose_what_trains(tower.encoder, name, settings, lora_rank=config.lora)
        replace_linear_layers(tower)
    return model.train()


def described_with_initial_values(config: ModelConfig) -> dict[str, Any]:
    """The model's description, with the initial logit scale and bias that the settings give. Raises UserError."""
    description = describe_model(config)
    if config.init_scale is not None:
        description["init_logit_scale"] = math.log(config.init_scale)
    if config.init_bias is not None:
        description["init_logit_bias"] = config.init_bias
    return description


def prepare_captioner(encoders: CoCa, config: ModelConfig) -> None:
    """Initialise a captioner's decoder, and choose the attention mask of its text tower's class token."""
    init_decoder(encoders.text_decoder)
    mask = config.correct_cls_mask
    encoders.text.correct_cls_mask = not config.weights if mask is None else mask


def make_lean(encoders: Encoders) -> None:
    """Replace the encoders' forward passes by shorter ones, where `models/lean.py` has one."""
    encoders.visual = lean_encoder(encoders.visual)
    embed_patches_by_product(encoders.visual)
    encoders.text = lean_encoder(encoders.text)
    if isinstance(encoders, CoCa):
        encoders.text_decoder = lean_encoder(encoders.text_decoder)


def choose_what_trains(encoder: nn.Module, tower_name: str, settings: TowerConfig, *, lora_rank: int) -> None:
    """Freeze the layers that do not train. With LoRA (`lora_rank` > 0) adapters train in the place of layers."""
    if lora_rank and settings.groups != 0:
        lora.add_adapters(encoder, tower_name, lora_rank, settings.groups or 0)
    elif settings.groups is not None:
        lock(encoder, tower_name, settings.groups)
