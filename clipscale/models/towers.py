"""open_clip's architectures behind two towers and a scale.

N: samples, H, W: pixels, T: tokens, D: feature width.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ModelConfig:
    """Which encoders are trained, and what of them is frozen."""

    name: str = "ViT-B-32"
    """An open_clip architecture, or any name when `architecture` spells one out."""
    architecture: dict[str, Any] = field(default_factory=dict)
    """open_clip's own model description (embed_dim, vision_cfg, text_cfg); empty: the one registered under `name`."""
    pretrained: str | None = None
    """A local checkpoint of the whole model to start from."""
    pretrained_image: bool = False
    """Let timm fetch pretrained weights for a timm image tower."""
    freeze_image: bool = False
    freeze_text: bool = False
    """Frozen towers (LiT): no gradient, no second pass."""
    grad_checkpointing: bool = False
    patch_dropout: float = 0.0
    """Share of image patches dropped in training."""
    compile: bool = False
    """torch.compile the towers."""
    init_scale: float | None = None
    """Initial logit scale (the multiplier); None: the architecture's (1/0.07 for CLIP)."""
    init_bias: float | None = None
    """Initial logit bias; None: no bias (-10 for the sigmoid loss)."""
