"""Writes a folder that open_clip loads: weights under its names, and its description of model and pictures."""

from dataclasses import asdict
from pathlib import Path

import torch
from open_clip.constants import HF_CONFIG_NAME, HF_SAFE_WEIGHTS_NAME
from safetensors.torch import save_file

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.config.model import ModelConfig
from clipscale.models.encoders import build_encoders, describe_model, overrides_timm_sizes
from clipscale.models.towers import ClipModel
from clipscale.models.weights.descriptions import SAFE_TEXT
from clipscale.models.weights.load_weights import Weights

WEIGHTS_FILE = HF_SAFE_WEIGHTS_NAME
# Takes the place of a tokenizer's folder in a description. Readers of an export find the tokenizer in the export.
TOKENIZER = "tokenizer"


def write(model: ClipModel, config: ModelConfig, out: Path, note: dict[str, str]) -> str:
    """Write the folder; returns the call that loads it, with {} for the folder.

    Raises OSError, and UserError for a model that open_clip would build otherwise: then nothing is written.
    """
    check_rebuilt_by_open_clip(model, config)
    out.mkdir(parents=True, exist_ok=True)
    with files.replacing(out / WEIGHTS_FILE) as file:
        save_file(weights(model), file.name, metadata={"format": "pt"} | note)
    files.write_json(out / HF_CONFIG_NAME, open_clip_description(model, config))
    call = "open_clip.create_model_from_pretrained('local-dir:{}')"
    # open_clip's description of a model has no word for `correct_cls_mask`, so the call sets it.
    return f"model, preprocess = {call}; model.text.correct_cls_mask = True" if needs_correct_mask(model) else call


def needs_correct_mask(model: ClipModel) -> bool:
    """Whether open_clip's own class computes other text features of a captioner unless `correct_cls_mask` is set."""
    return model.is_captioner and bool(model.text.encoder.correct_cls_mask)


def weights(model: ClipModel) -> Weights:
    """The state dict of open_clip's `CustomTextCLIP`, or of its `CoCa`."""
    state = {f"visual.{name}": value for name, value in model.image.encoder.state_dict().items()}
    state |= {f"text.{name}": value for name, value in model.text.encoder.state_dict().items()}
    if model.decoder is not None:
        state |= {f"text_decoder.{name}": value for name, value in model.decoder.state_dict().items()}
    state["logit_scale"] = model.logit_scale.detach()
    if model.logit_bias is not None:
        state["logit_bias"] = model.logit_bias.detach()
    return {name: value.contiguous() for name, value in state.items()}


def open_clip_description(model: ClipModel, config: ModelConfig) -> dict[str, object]:
    """open_clip's description of the model and of its preprocessing."""
    details = describe_model(config) | {"custom_text": True}
    details["vision_cfg"].pop("patch_dropout", None)  # used in training only
    if not SAFE_TEXT.fullmatch(details["text_cfg"].get("hf_tokenizer_name") or TOKENIZER):  # a folder
        details["text_cfg"]["hf_tokenizer_name"] = TOKENIZER
    if model.logit_bias is not None:  # makes open_clip create the bias; its saved value replaces this one
        details["init_logit_bias"] = 0.0
    content = {"model_cfg": details, "preprocess_cfg": {"size": model.image_size} | asdict(config.pixels)}
    return content | ({"correct_cls_mask": True} if needs_correct_mask(model) else {})


def check_rebuilt_by_open_clip(model: ClipModel, config: ModelConfig) -> None:
    """Raise UserError unless open_clip builds this image tower by its description: it has timm's towers as they are."""
    details = describe_model(config)
    if overrides_timm_sizes(details["vision_cfg"]):
        raise UserError("format=open_clip: it has no SigLIP of these sizes, or with this activation; take format=hf")
    with torch.device("meta"):
        reference = build_encoders(details).visual
    try:
        reference.load_state_dict(model.image.encoder.state_dict(), assign=True)
    except RuntimeError as error:  # for weights of another shape
        name = details["vision_cfg"].get("timm_model_name", config.name)
        raise UserError(
            f"run: open_clip builds {name} at its own size, not at model.image_size={config.image_size}; "
            "train at the tower's own size"
        ) from error
