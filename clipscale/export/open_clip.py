"""A folder that open_clip loads: weights under its names, and its description of the model and of the pictures."""

from pathlib import Path
from typing import Any

import torch
from open_clip.constants import HF_CONFIG_NAME, HF_SAFE_WEIGHTS_NAME
from open_clip.tokenizer import HFTokenizer
from safetensors.torch import save_file
from torch import Tensor

from clipscale import files
from clipscale.config.sections import ModelConfig
from clipscale.models.towers import ClipModel, architecture


def write(model: ClipModel, config: ModelConfig, out: Path, dtype: torch.dtype, note: dict[str, str]) -> str:
    """Write the folder; returns the call that loads it. Raises OSError."""
    save_weights(weights(model, dtype), out / HF_SAFE_WEIGHTS_NAME, note)
    files.write_json(out / HF_CONFIG_NAME, description(model, config))
    if isinstance(inner := getattr(model.tokenizer, "inner", model.tokenizer), HFTokenizer):
        inner.save_pretrained(str(out))
    return f"open_clip.create_model_from_pretrained('local-dir:{out.resolve()}')"


def save_weights(state: dict[str, Tensor], path: Path, note: dict[str, str]) -> None:
    """Write a safetensors file, which gets its name when it is complete. Raises OSError."""
    with files.replacing(path) as file:
        save_file(state, file.name, metadata={"format": "pt"} | note)


def weights(model: ClipModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """The state dict of open_clip's `CustomTextCLIP`, with matrices in `dtype`."""
    state = {f"visual.{name}": value for name, value in model.image.encoder.state_dict().items()}
    state |= {f"text.{name}": value for name, value in model.text.encoder.state_dict().items()}
    state["logit_scale"] = model.logit_scale.detach()
    if model.logit_bias is not None:
        state["logit_bias"] = model.logit_bias.detach()
    matrices = {name for name, value in state.items() if value.is_floating_point() and value.dim() > 1}
    return {name: (value.to(dtype) if name in matrices else value).contiguous() for name, value in state.items()}


def description(model: ClipModel, config: ModelConfig) -> dict[str, Any]:
    """open_clip's description of the model and of its preprocessing."""
    found = architecture(config) | {"custom_text": True}
    found["vision_cfg"].pop("patch_dropout", None)  # for training only
    if model.logit_bias is not None:  # makes open_clip create the bias; its saved value replaces this one
        found["init_logit_bias"] = 0.0
    pixels = {"size": model.image_size, "mean": list(config.mean), "std": list(config.std)}
    return {
        "model_cfg": found,
        "preprocess_cfg": pixels | {"interpolation": config.interpolation, "resize_mode": config.resize},
    }
