"""Small towers of open_clip's, with the same weights everywhere, and samples for them."""

from typing import Any

import torch
from torch import Tensor, nn

from clipscale.config.sections import ModelConfig
from clipscale.models.towers import ClipModel, build_model

PIXELS, TOKENS = 12, 20


def small_model(layers: int = 2, dropout: float = 0.0, lean: bool = True, **given: Any) -> ClipModel:
    """Of so many blocks; with `dropout` after each of their branches, where open_clip may have a scale."""
    architecture = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": PIXELS, "layers": layers, "width": 32, "head_width": 16, "patch_size": 3},
        "text_cfg": {"context_length": TOKENS, "vocab_size": 50, "width": 32, "heads": 2, "layers": layers},
    }
    torch.manual_seed(0)
    model = build_model(ModelConfig(name="small", architecture=architecture, init_scale=5.0, **given), lean=lean)
    for block in (*model.image.encoder.transformer.resblocks, *model.text.encoder.transformer.resblocks):
        if dropout:
            block.ls_1, block.ls_2 = nn.Dropout(dropout), nn.Dropout(dropout)
    return model


def samples(n: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Pixels and tokens of n pairs."""
    g = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (n, 3, PIXELS, PIXELS), dtype=torch.uint8, generator=g)
    return pixels, torch.randint(1, 50, (n, TOKENS), generator=g)
