"""Small towers of open_clip's, with the same weights everywhere, and samples for them."""

from typing import Any

import torch
from torch import Tensor, nn

from clipscale.config.model import ModelConfig
from clipscale.models.towers import ClipModel, build_model

PIXELS = 12
TOKENS = 20
RESNET = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "head_width": 16}


def architecture(
    side: int = 12, patch: int = 6, tokens: int = 8, words: int = 49408, layers: int = 2
) -> dict[str, Any]:
    """open_clip's description of two small transformers, with features of width 16."""
    return {
        "embed_dim": 16,
        "vision_cfg": {"image_size": side, "patch_size": patch, "layers": layers, "width": 32, "head_width": 16},
        "text_cfg": {"context_length": tokens, "vocab_size": words, "layers": layers, "width": 32, "heads": 2},
    }


def captioner_architecture(side: int = 12, patch: int = 3, tokens: int = 8, words: int = 50) -> dict[str, Any]:
    """The same for a captioner. An image has 5 tokens after the first one, and the decoder has 2 layers."""
    small = architecture(side, patch, tokens, words) | {"embed_dim": 32}
    pooled = {"attentional_pool": True, "attn_pooler_heads": 2, "attn_pooler_queries": 6, "output_tokens": True}
    small["vision_cfg"] |= pooled
    small["text_cfg"] |= {"embed_cls": True, "output_tokens": True}
    small["multimodal_cfg"] = {"context_length": tokens, "vocab_size": words, "width": 32, "heads": 2, "layers": 2}
    return small


def small_captioner(lean: bool = True, **given: Any) -> ClipModel:
    torch.manual_seed(0)
    description = captioner_architecture(PIXELS, 3, TOKENS)
    return build_model(ModelConfig(name="small", architecture=description, init_scale=5.0, **given), lean=lean)


def small_model(layers: int = 2, dropout: float = 0.0, lean: bool = True, **given: Any) -> ClipModel:
    """Builds towers of `layers` blocks, with `dropout` after each branch, where open_clip may have a scale."""
    torch.manual_seed(0)
    description = architecture(PIXELS, 3, TOKENS, 50, layers)
    model = build_model(ModelConfig(name="small", architecture=description, init_scale=5.0, **given), lean=lean)
    for block in blocks_of(model) if dropout else []:
        block.ls_1, block.ls_2 = nn.Dropout(dropout), nn.Dropout(dropout)
    return model


def blocks_of(model: ClipModel) -> list[nn.Module]:
    """The blocks of both transformers, the image tower's first."""
    transformers = [tower.get_submodule("encoder.transformer.resblocks") for tower in (model.image, model.text)]
    return [block for blocks in transformers for block in blocks.children()]


def samples(n: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Pixels and tokens of n pairs."""
    g = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (n, 3, PIXELS, PIXELS), dtype=torch.uint8, generator=g)
    return pixels, torch.randint(1, 50, (n, TOKENS), generator=g)


def captioned(n: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Pixels and captions of n pairs: from 3 tokens to the whole context, then padding."""
    g = torch.Generator().manual_seed(seed)
    pixels, tokens = samples(n, seed)
    lengths = torch.randint(3, TOKENS + 1, (n, 1), generator=g)
    lengths[0] = TOKENS
    return pixels, tokens.masked_fill(torch.arange(TOKENS) >= lengths, 0)
