"""A folder that transformers loads as CLIP or SigLIP: weights under its names, its configurations, and a tokenizer."""

from pathlib import Path
from typing import Any

import open_clip
import torch
import torch.nn.functional as F
from open_clip.timm_model import TimmModel
from open_clip.tokenizer import HFTokenizer
from open_clip.transformer import VisionTransformer
from safetensors.torch import save_file
from torch import Tensor, nn

from clipscale.common import files
from clipscale.common.errors import UserError, one_line
from clipscale.common.record import Record
from clipscale.config.sections import ModelConfig
from clipscale.models import hugging_face
from clipscale.models.renamed import Weights, of_transformers, to_transformers
from clipscale.models.towers import ClipModel, encoders_of
from clipscale.tools.export.open_clip import in_dtype, weights

START, END = "<|startoftext|>", "<|endoftext|>"
WORDS = 49408
"""Of CLIP's vocabulary."""
MODELS = {"clip": "CLIPModel", "siglip": "SiglipModel"}
PROCESSORS = {"clip": "CLIPImageProcessor", "siglip": "SiglipImageProcessor"}


def write(model: ClipModel, config: ModelConfig, out: Path, dtype: torch.dtype, note: dict[str, str]) -> str:
    """Write the folder; returns the call that loads it, with {} for the folder.

    Raises OSError, and UserError for a model that transformers does not have.
    """
    try:
        description = configuration(model)
        state = to_transformers(weights(model, torch.float32), description["model_type"])
        pixels = preprocessing(model, description["model_type"])
        check_same(model, description, state)
    except (ValueError, AttributeError, RuntimeError) as error:  # what its towers lack
        raise UserError(
            f"format=hf: transformers has no such model ({one_line(error)}); take format=open_clip"
        ) from error
    if model.logit_bias is not None or description["model_type"] == "siglip":
        state["logit_scale"] = model.logit_scale.detach().reshape(1)
        state["logit_bias"] = torch.zeros(1) if model.logit_bias is None else model.logit_bias.detach().reshape(1)
    name = str(dtype).removeprefix("torch.")
    with files.replacing(out / "model.safetensors") as file:
        save_file(in_dtype(state, dtype), file.name, metadata={"format": "pt"} | note)
    files.write_json(out / "config.json", description | {"dtype": name})
    files.write_json(out / "preprocessor_config.json", pixels)
    tokenizer = getattr(model.tokenizer, "inner", model.tokenizer)
    if isinstance(tokenizer, HFTokenizer):
        tokenizer.save_pretrained(str(out))
    else:
        write_tokenizer(out, model.context_length)
    return "transformers.AutoModel.from_pretrained('{}')"


def configuration(model: ClipModel) -> Record:
    """config.json. Raises ValueError and AttributeError for what is not part of CLIP or SigLIP."""
    visual: Any = model.image.encoder
    text: Any = model.text.encoder
    text_config = {
        **part(text.transformer.resblocks, text.ln_final),
        "max_position_embeddings": text.context_length,
        "vocab_size": text.vocab_size,
    }
    if isinstance(visual, TimmModel):
        trunk: Any = visual.trunk
        vision = part(trunk.blocks, trunk.norm) | {"patch_size": trunk.patch_embed.patch_size[0]}
        text_config["projection_size"] = model.width
        kind = "siglip"
    elif isinstance(visual, VisionTransformer):
        vision = part(visual.transformer.resblocks, visual.ln_post) | {"patch_size": visual.patch_size[0]}
        kind = "clip"
        if model.logit_bias is not None:
            raise ValueError("CLIP has no logit bias")
        if text.pool_type not in ("argmax", "eos"):
            raise ValueError(f"its text tower pools by {text.pool_type}")
        end = {"argmax": WORDS - 1 if text.vocab_size == WORDS else 2, "eos": text.eos_id}[text.pool_type]
        text_config |= {"bos_token_id": WORDS - 2, "eos_token_id": end, "pad_token_id": 0}
    else:
        raise ValueError(f"its image tower is a {type(visual).__name__}")
    return {
        "architectures": [MODELS[kind]],
        "model_type": kind,
        "projection_dim": model.width,
        "vision_config": vision | {"image_size": model.image_size},
        "text_config": text_config,
    }


def part(blocks: Any, norm: Any) -> Record:
    """A transformer in the words of transformers."""
    block = blocks[0]
    first, activation, *_ = block.mlp.children()
    x = torch.linspace(-3, 3, 9)
    known = {
        "gelu": F.gelu(x),
        hugging_face.TANH: F.gelu(x, approximate="tanh"),
        "quick_gelu": x * (1.702 * x).sigmoid(),
    }
    return {
        "hidden_size": first.in_features,
        "intermediate_size": first.out_features,
        "num_hidden_layers": len(blocks),
        "num_attention_heads": block.attn.num_heads,
        "hidden_act": min(known, key=lambda name: (activation(x) - known[name]).abs().max()),
        "layer_norm_eps": norm.eps,
    }


@torch.no_grad()
def check_same(model: ClipModel, config: Record, state: Weights) -> None:
    """Raise ValueError unless the model that a reader of this folder builds has the same features."""
    again = encoders_of(hugging_face.description(config)).eval()
    again.load_state_dict(of_transformers(state), strict=False)
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(1, 3, model.image_size, model.image_size, generator=generator)
    words: Any = model.text.encoder
    tokens = torch.randint(1, words.vocab_size - 1, (1, model.context_length), generator=generator)
    tokens[:, -1] = words.vocab_size - 1 if words.pool_type == "argmax" else words.eos_id
    pairs: list[tuple[str, nn.Module, nn.Module, Tensor]] = [
        ("image", model.image.encoder, again.visual, pixels),
        ("text", model.text.encoder, again.text, tokens),
    ]
    for name, ours, theirs, inputs in pairs:
        if not torch.allclose(F.normalize(ours(inputs), dim=-1), F.normalize(theirs(inputs), dim=-1), atol=1e-3):
            raise ValueError(f"its {name} tower would have other features")


def preprocessing(model: ClipModel, kind: str) -> Record:
    """preprocessor_config.json. Raises ValueError for pictures that it cannot describe."""
    pixels = model.pixels
    if pixels.resize_mode == "longest":
        raise ValueError("model.preprocess.resize_mode=longest")
    central = pixels.resize_mode == "shortest"
    side = {"height": model.image_size, "width": model.image_size}
    numbers = {name: number for number, name in hugging_face.INTERPOLATIONS.items()}
    return {
        "image_processor_type": PROCESSORS[kind],
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": model.image_size} if central else side,
        "resample": numbers[pixels.interpolation],
        "do_center_crop": central,
        "crop_size": side,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [*pixels.mean],
        "image_std": [*pixels.std],
    }


def write_tokenizer(out: Path, length: int) -> None:
    """CLIP's own vocabulary in the files of transformers' CLIPTokenizer. `length`: tokens of a caption."""
    clip = open_clip.SimpleTokenizer(context_length=length)
    names = {"<start_of_text>": START, "<end_of_text>": END}
    files.write_json(out / "vocab.json", {names.get(text, text): number for text, number in clip.encoder.items()})
    pairs = sorted(clip.bpe_ranks, key=lambda pair: int(clip.bpe_ranks[pair]))
    files.write_text(out / "merges.txt", "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in pairs))
    special = {"bos_token": START, "eos_token": END, "unk_token": END, "pad_token": END}
    record = {"tokenizer_class": "CLIPTokenizer", "model_max_length": length, "do_lower_case": True, **special}
    files.write_json(out / "tokenizer_config.json", record)
