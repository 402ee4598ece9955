"""A folder that transformers loads: CLIPModel for open_clip's own towers."""

import json
from pathlib import Path
from typing import Any

import open_clip
import torch

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.config.sections import ModelConfig
from clipscale.models.huggingface import configuration, from_open_clip
from clipscale.models.towers import ClipModel, architecture
from clipscale.tools.export.open_clip import save_tokenizer, save_weights, weights

START, END = "<|startoftext|>", "<|endoftext|>"


def write(model: ClipModel, config: ModelConfig, out: Path, dtype: torch.dtype, note: dict[str, str]) -> str:
    """Write the folder; returns the call that loads it, with {} for the folder.

    Raises OSError, and UserError for a model that transformers does not have.
    """
    state = weights(model, dtype)
    try:
        description = configuration(architecture(config), logit_bias=model.logit_bias is not None)
        renamed = from_open_clip(state)
    except (KeyError, ValueError) as error:
        raise UserError(
            f"to=hf: model.name={config.name}: transformers has no such CLIP ({error}); take to=open_clip"
        ) from error
    save_weights(renamed, out / "model.safetensors", note)
    description |= {"architectures": ["CLIPModel"], "dtype": str(dtype).removeprefix("torch.")}
    files.write_json(out / "config.json", description)
    files.write_json(out / "preprocessor_config.json", preprocessing(model, config))
    if not save_tokenizer(model, out):
        write_tokenizer(out, model.context_length)
    return "transformers.CLIPModel.from_pretrained('{}')"


def preprocessing(model: ClipModel, config: ModelConfig) -> dict[str, Any]:
    """transformers' description of how pictures become pixels."""
    side = {"height": model.image_size, "width": model.image_size}
    central = config.pixels.resize_mode == "shortest"
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": model.image_size} if central else side,
        "resample": 3 if config.pixels.interpolation == "bicubic" else 2,
        "do_center_crop": central,
        "crop_size": side,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(config.pixels.mean),
        "image_std": list(config.pixels.std),
    }


def write_tokenizer(out: Path, length: int) -> None:
    """CLIP's own vocabulary in the files of transformers' CLIPTokenizer."""
    clip = open_clip.SimpleTokenizer(context_length=length)
    names = {"<start_of_text>": START, "<end_of_text>": END}
    files.write_text(out / "vocab.json", json.dumps({names.get(text, text): n for text, n in clip.encoder.items()}))
    pairs = sorted(clip.bpe_ranks, key=lambda pair: int(clip.bpe_ranks[pair]))
    files.write_text(out / "merges.txt", "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in pairs))
    special = {"bos_token": START, "eos_token": END, "unk_token": END, "pad_token": END}
    record = {"tokenizer_class": "CLIPTokenizer", "model_max_length": length, "do_lower_case": True, **special}
    files.write_json(out / "tokenizer_config.json", record)
