"""`clipscale export` writes a run's weights as a folder that open_clip loads."""

from pathlib import Path
from typing import Any

import torch
from open_clip.constants import HF_CONFIG_NAME, HF_SAFE_WEIGHTS_NAME
from open_clip.tokenizer import HFTokenizer
from safetensors.torch import save_file
from torch import Tensor

from clipscale import files
from clipscale.config.checks import check_values
from clipscale.config.sections import ModelConfig
from clipscale.config.tools import ExportSettings, check_run
from clipscale.errors import UserError
from clipscale.models.towers import ClipModel, architecture, load_model
from clipscale.terminal import say


def main(settings: ExportSettings) -> Path:
    """Write the folder and return it. Raises UserError without a readable checkpoint, or if the folder cannot be written."""
    check_values(settings)
    folder = check_run(settings)
    model, config, step = load_model(folder, settings.checkpoint, settings.weights, hub=settings.hub)
    out = Path(settings.out).expanduser() if settings.out else folder / "export"
    try:
        files.inner_folder(*((out,) if settings.out else (folder, out.name)))
        note = {"format": "pt", "run": folder.name, "step": str(step)}
        with files.replacing(out / HF_SAFE_WEIGHTS_NAME) as file:
            save_file(weights(model, getattr(torch, settings.dtype)), file.name, metadata=note)
        files.write_json(out / HF_CONFIG_NAME, description(model, config))
        if isinstance(model.tokenizer, HFTokenizer):
            model.tokenizer.save_pretrained(str(out))
    except OSError as error:
        raise UserError(f"out={out}: cannot be written ({error.strerror or error}); choose another folder") from error
    say(f"{out}: step {step}; open_clip.create_model_from_pretrained('local-dir:{out.resolve()}')")
    return out


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
    return {"model_cfg": found, "preprocess_cfg": pixels | {"interpolation": "bicubic", "resize_mode": "shortest"}}
