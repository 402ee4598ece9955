"""Counts the FLOPs of a model's forward pass, and from them model FLOPs utilisation (MFU)."""

import json
from collections.abc import Mapping
from functools import cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from clipscale.common.hardware import HARDWARE, hardware_of
from clipscale.config.sections import ModelConfig
from clipscale.models.lean import take_short_captions
from clipscale.models.towers import adapt, architecture, encoders_of


def forward_flops(config: ModelConfig, length: int | None = None) -> tuple[int, int]:
    """FLOPs of open_clip's forward pass of one image and one caption (matrix products only, 2 per multiply-add).

    `length`: the caption's tokens; None: the whole context.
    """
    return _forward_flops(json.dumps([config.name, config.architecture, config.image_size]), length)


@cache
def _forward_flops(model: str, length: int | None) -> tuple[int, int]:
    """`model`: its name, architecture and image size as JSON."""
    name, description, side = json.loads(model)
    config = ModelConfig(name=name, architecture=description, image_size=side)
    with torch.device("meta"):
        description = architecture(config)
        encoders = encoders_of(description).eval()
        adapt(encoders, config, description)
        take_short_captions(encoders.text)
        size = encoders.visual.image_size
        pixels = torch.empty(1, 3, *(size if isinstance(size, tuple) else (size, size)))
        tokens = torch.zeros(1, length or encoders.context_length, dtype=torch.long)
    counts = []
    for tower, inputs in ((encoders.visual, pixels), (encoders.text, tokens)):
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
        gpu = hardware_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self.peak = HARDWARE[gpu].peak("bf16") if gpu else None

    def of_batch(self, widths: Mapping[int, int]) -> float:
        """FLOPs a sample of a batch whose captions are computed at these widths: tokens -> captions."""
        text = sum(count * forward_flops(self.config, width)[1] for width, count in widths.items())
        return self.image + text / sum(widths.values()) * self.text_passes

    def utilisation(self, samples_per_s: float, widths: Mapping[int, int] | None = None) -> float | None:
        """MFU: samples_per_s (per device) x FLOPs per sample / peak. None where the device's peak is not known.

        `widths`: captions by the tokens at which they are computed; None: the whole context.
        """
        if self.peak is None:
            return None
        return samples_per_s * (self.of_batch(widths) if widths else self.per_sample) / self.peak
