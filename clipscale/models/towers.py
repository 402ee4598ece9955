"""Builds open_clip's models as two towers and a logit scale, and counts their FLOPs.

N: samples, H, W: pixels, T: tokens, D: feature width.
"""

import hashlib
import importlib
import json
import math
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import open_clip
import torch
import torch.nn.functional as F
from open_clip.model import CustomTextCLIP
from timm.layers import GELUTanh
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from clipscale import checkpoint
from clipscale.common.errors import UserError, first_line
from clipscale.common.hardware import HARDWARE, hardware_of
from clipscale.common.units import nearest
from clipscale.config.parse import typed
from clipscale.config.sections import ModelConfig, TowerConfig
from clipscale.data.eval_transform import EvalTransform
from clipscale.distributed.world import World
from clipscale.models.bounded import BoundedTokenizer, clip_tokenizer
from clipscale.models.description import check, source_of
from clipscale.models.lean import make_lean, take_short_captions
from clipscale.models.weights import described
from clipscale.models.weights import load as load_weights


class ImageTower(nn.Module):
    """uint8 pixels (N, 3, H, W) -> unit feature rows (N, D), float32 (float64 for a float64 encoder)."""

    mean: Tensor
    std: Tensor

    def __init__(self, encoder: nn.Module, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.encoder = encoder
        self.register_buffer("mean", 255 * torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", 255 * torch.tensor(std).view(3, 1, 1), persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        return unit_rows(self.encoder((pixels - self.mean) / self.std))


class TextTower(nn.Module):
    """Integer tokens (N, T) -> unit feature rows (N, D), float32 (float64 for a float64 encoder)."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, tokens: Tensor) -> Tensor:
        return unit_rows(self.encoder(tokens.long()))


class StoredTower(nn.Module):
    """Takes the image tower's place where features are stored: rows (N, D) -> unit rows (N, D), float32. It has no parameters."""

    def forward(self, rows: Tensor) -> Tensor:
        return unit_rows(rows)


def unit_rows(features: Tensor) -> Tensor:
    """Rows scaled to Euclidean length 1, in at least float32: half precision would cost two digits of every cosine."""
    if features.dtype in (torch.bfloat16, torch.float16):
        features = features.float()
    return F.normalize(features, dim=-1)


class ClipModel(nn.Module):
    """Two towers, the logarithm of the logit scale, and a logit bias for the sigmoid loss."""

    logit_bias: nn.Parameter | None

    def __init__(
        self, encoders: CustomTextCLIP, width: int, config: ModelConfig, tokenizer: Callable[[list[str]], Tensor]
    ) -> None:
        super().__init__()
        self.width = width
        self.image = ImageTower(encoders.visual, config.mean, config.std)
        self.text = TextTower(encoders.text)
        self.logit_scale = encoders.logit_scale
        self.logit_bias = encoders.logit_bias
        size = encoders.visual.image_size
        self.image_size: int = size[0] if isinstance(size, tuple) else size
        names = [name for name, _ in encoders.visual.named_parameters()]
        self.any_size = not any(word in name for name in names for word in ("position", "pos_embed"))
        """Whether the image tower takes pictures of any size, having no learned positions."""
        self.resize, self.interpolation = config.resize, config.interpolation
        self.context_length: int = encoders.context_length
        self.tokenizer = tokenizer
        self.batch_norm_frozen = config.batch_norm == "frozen"

    def eval_transform(self) -> EvalTransform:
        """Turns the bytes of a picture into the pixels that the image tower takes, as in open_clip's evaluation."""
        return EvalTransform(self.image_size, mode=self.resize, interpolation=self.interpolation)

    def freeze(self, *, image: bool, text: bool) -> None:
        """Freeze towers: their parameters take no gradient, their dropout and batch norm stay in evaluation mode."""
        for tower, frozen in ((self.image, image), (self.text, text)):
            if frozen:
                tower.requires_grad_(False)
                tower.eval()

    def train(self, mode: bool = True) -> "ClipModel":
        """As in torch, but frozen towers and frozen batch normalisation stay in evaluation mode."""
        super().train(mode)
        for module in self.modules() if self.batch_norm_frozen else ():
            if isinstance(module, _BatchNorm):
                module.eval()
        for tower in (self.image, self.text):
            if not any(p.requires_grad for p in tower.parameters()):
                tower.eval()
        return self

    def image_digest(self) -> str:
        """A digest of the image tower's weights, on any device."""
        return weights_digest(self.image)

    def text_digest(self) -> str:
        """A digest of the text tower's weights, on any device."""
        return weights_digest(self.text)


def weights_digest(module: nn.Module) -> str:
    """A digest of a module's weights, on any device and under any sharding: names, and values as they are used.

    A collective for weights that FSDP2 has sharded.
    """
    found = hashlib.blake2b(digest_size=16)
    for name, value in sorted(module.state_dict().items()):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        found.update(name.encode())
        found.update(whole.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def architecture(config: ModelConfig) -> dict[str, Any]:
    """open_clip's description of the model (embed_dim, vision_cfg, text_cfg), changed by the settings of `config`.

    Raises UserError for a name that open_clip does not know.
    """
    if config.architecture:
        description = deepcopy(config.architecture)
        missing = [part for part in ("embed_dim", "vision_cfg", "text_cfg") if part not in description]
        if missing:
            raise UserError(
                f"model.architecture lacks {missing[0]}; it takes open_clip's embed_dim, vision_cfg and text_cfg"
            )
    else:
        known = open_clip.get_model_config(config.name.replace("/", "-"))
        if known is None:
            raise UserError(
                f"model.name={config.name!r} is not an open_clip architecture{nearest(config.name, open_clip.list_models())}"
            )
        description = deepcopy(known)
    if "multimodal_cfg" in description:
        raise UserError(f"model.name={config.name!r} is a captioning model; choose a two-tower architecture")
    description.pop("custom_text", None)
    check(description)
    if config.patch_dropout:
        description["vision_cfg"]["patch_dropout"] = config.patch_dropout
    if config.image_size:
        _check_patches(config.image_size, description["vision_cfg"])
        description["vision_cfg"]["image_size"] = config.image_size
    # Weights come from `weights` alone. Building a model downloads nothing else.
    if "timm_model_name" in description["vision_cfg"]:
        description["vision_cfg"]["timm_model_pretrained"] = False
    if "hf_model_name" in description["text_cfg"]:
        description["text_cfg"]["hf_model_pretrained"] = False
    return description


def encoders_of(config: ModelConfig, description: dict[str, Any]) -> CustomTextCLIP:
    """open_clip's model by a checked description, on torch's default device. Raises UserError where it describes none."""
    text = description["text_cfg"]
    try:
        if name := text.get("hf_model_name"):
            importlib.import_module("transformers")
            description = description | {"text_cfg": text | {"hf_model_name": source_of(name, config.hub)}}
        return CustomTextCLIP(**description)
    except ImportError as error:
        raise UserError(
            f"model.name={config.name!r} needs transformers ({error}); pip install 'clipscale[hf]'"
        ) from error
    except UserError:
        raise
    except Exception as error:  # open_clip and timm check little of what they are given
        raise UserError(f"model.architecture does not describe an open_clip model: {first_line(error)}") from error


def _adapt(encoders: CustomTextCLIP, config: ModelConfig, description: dict[str, Any]) -> None:
    """Give a tower of timm the `image_size` of the settings and the `act_kwargs` of its description, which open_clip does not."""
    trunk = getattr(encoders.visual, "trunk", None)
    if config.image_size and trunk is not None and hasattr(trunk, "set_input_size"):
        trunk.set_input_size(img_size=(config.image_size, config.image_size))
    if trunk is not None and (options := description["vision_cfg"].get("act_kwargs")):
        for module in trunk.modules():
            if isinstance(getattr(module, "act", None), nn.GELU | GELUTanh):
                module.act = nn.GELU(**options)


def _check_patches(side: int, vision: dict[str, Any]) -> None:
    """Raise UserError for pictures that the patches do not divide."""
    found = re.search(r"_patch(\d+)", str(vision.get("timm_model_name") or ""))
    patch = int(found[1]) if found else vision.get("patch_size")
    if patch and side % patch:
        near = max(1, round(side / patch)) * patch
        raise UserError(
            f"model.image_size={side}: the patches are {patch} pixels wide; give a multiple, such as {near}"
        )


def build_model(config: ModelConfig) -> ClipModel:
    """Build the model that `config` describes: float32, on torch's default device, in training mode.

    Raises UserError for an unknown architecture or weights that do not fit it.
    """
    description = architecture(config)
    if config.init_scale is not None:
        description["init_logit_scale"] = math.log(config.init_scale)
    if config.init_bias is not None:
        description["init_logit_bias"] = config.init_bias
    encoders = encoders_of(config, description)
    _adapt(encoders, config, description)
    load_weights(encoders, config, quick_gelu=bool(description.get("quick_gelu")))
    if config.grad_checkpointing:
        encoders.set_grad_checkpointing(True)
    for encoder in (encoders.visual, encoders.text):
        if not (config.lean and make_lean(encoder)):
            take_short_captions(encoder)
    model = ClipModel(encoders, description["embed_dim"], config, tokenizer(config, description))
    model.freeze(image=config.freeze_image, text=config.freeze_text)
    return model.train()


def load_model(
    run: Path, which: str = "latest", weights: str = "trained", *, hub: bool = False
) -> tuple[ClipModel, ModelConfig, int]:
    """The trained model of a run, in evaluation mode on the CPU, its settings, and the step of its checkpoint.

    `which` is `latest`, a step number, or a path; `weights` is `trained` or `ema`, their moving average; `hub` takes the place of the
    checkpoint's `model.hub`. Raises UserError where there is no such checkpoint or average.
    """
    path = checkpoint.locate(run, which)
    state = checkpoint.load(path, parts=("model", "ema"))
    if weights == "ema" and not state.get("ema"):
        raise UserError(f"weights=ema: {path} holds no average; take weights=trained, or train with ema=0.9999")
    saved = typed(ModelConfig, state["model_config"])
    config = replace(saved, weights=None, image=TowerConfig(), text=TowerConfig(), compile=False, hub=hub)
    model = build_model(config)
    model.load_state_dict(state["model"] | (state["ema"]["weights"] if weights == "ema" else {}))
    return model.eval(), config, int(state["step"])


def load_any(
    run: Path | None, which: str, weights: str, config: ModelConfig, world: World, *, hub: bool
) -> tuple[ClipModel, ModelConfig, int | None]:
    """The model of a run's checkpoint, as `load_model` has it, or without a run the one that `config` describes, with its weights.

    In evaluation mode on the CPU, with its settings and its step. Without a run a collective: rank 0 fetches what must be fetched.
    Raises UserError.
    """
    if run is not None:
        return load_model(run, which, weights, hub=hub)
    found = world.on_main(lambda: described(replace(config, hub=config.hub or hub)))
    return build_model(found).eval(), found, None


def tokenizer(config: ModelConfig, description: dict[str, Any]) -> Callable[[list[str]], Tensor]:
    """open_clip's tokenizer for the model: captions -> int64 tokens (N, T).

    `text_cfg.hf_tokenizer_name` names a tokenizer of transformers, or a folder with its files; `source_of` says where it may come from.
    Raises UserError.
    """
    text = description["text_cfg"]
    length = text.get("context_length", open_clip.tokenizer.DEFAULT_CONTEXT_LENGTH)
    options = dict(text.get("tokenizer_kwargs") or {})
    source = text.get("hf_tokenizer_name") or ""
    try:
        if source:
            importlib.import_module("transformers")
            options |= {"tokenizer_mode": text.get("tokenizer_mode"), "trust_remote_code": False}
            return BoundedTokenizer(
                open_clip.tokenizer.HFTokenizer(source_of(source, config.hub), length, **options), length
            )
        return BoundedTokenizer(clip_tokenizer(length, **options), length)
    except (ImportError, OSError, ValueError) as error:
        lacks = "; pip install 'clipscale[hf]'" if isinstance(error, ImportError) else ""
        raise UserError(
            f"model.name={config.name!r}: its tokenizer {source} cannot be loaded ({first_line(error)}){lacks}"
        ) from error


def forward_flops(config: ModelConfig, length: int | None = None) -> tuple[int, int]:
    """FLOPs of open_clip's forward pass of one image and one caption (matrix products only, 2 per multiply-add).

    `length`: the caption's tokens; None: the whole context.
    """
    return _forward_flops(json.dumps([config.name, config.architecture, config.image_size]), length)


@cache
def _forward_flops(model: str, length: int | None) -> tuple[int, int]:
    """`model`: its name, architecture and image size as JSON."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        name, own, side = json.loads(model)
        config = ModelConfig(name=name, architecture=own, image_size=side)
        description = architecture(config)
        plain = CustomTextCLIP(**description).eval()
        _adapt(plain, config, description)
        take_short_captions(plain.text)
        size = plain.visual.image_size
        pixels = torch.empty(1, 3, *(size if isinstance(size, tuple) else (size, size)))
        tokens = torch.zeros(1, length or plain.context_length, dtype=torch.long)
    counts = []
    for tower, inputs in ((plain.visual, pixels), (plain.text, tokens)):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            tower(inputs)
        counts.append(counter.get_total_flops())
    return counts[0], counts[1]


class Flops:
    """FLOPs of one training sample: a forward pass, and twice as much for the backward of a trained tower.

    The gradient cache's second forward pass is overhead and not counted, so MFU compares with plain training.
    """

    def __init__(self, config: ModelConfig, device: torch.device, *, stored_images: bool = False) -> None:
        """With `stored_images` the image tower does not run, because its features are read."""
        image, text = forward_flops(config)
        self.config = config
        self.image = 0 if stored_images else image * (1 if config.freeze_image else 3)
        self.text_passes = 1 if config.freeze_text else 3
        self.per_sample = self.image + text * self.text_passes
        """Of an image and a caption of the whole context."""
        self.captions = lambda length: forward_flops(config, length)[1]
        found = hardware_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self.peak = HARDWARE[found].peak("bf16") if found else None

    def of_batch(self, widths: Mapping[int, int]) -> float:
        """FLOPs a sample of a batch whose captions are computed at these widths: tokens -> captions."""
        text = sum(count * self.captions(width) for width, count in widths.items()) / sum(widths.values())
        return self.image + text * self.text_passes

    def utilisation(self, samples_per_s: float, widths: Mapping[int, int] | None = None) -> float | None:
        """MFU: samples_per_s (per device) x FLOPs per sample / peak. None where the device's peak is not known.

        `widths`: captions by the tokens at which they are computed; None: the whole context.
        """
        if self.peak is None:
            return None
        return samples_per_s * (self.of_batch(widths) if widths else self.per_sample) / self.peak
