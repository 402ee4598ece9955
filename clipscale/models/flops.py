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
    model = [config.name, config.architecture, config.image_size, config.context_length]
    return _forward_flops(json.dumps(model), length)


@cache
def _forward_flops(model: str, length: int | None) -> tuple[int, int]:
    """`model`: its name, architecture, image size and context as JSON."""
    name, description, side, context = json.loads(model)
    config = ModelConfig(name=name, architecture=description, image_size=side, context_length=context)
    with torch.device("meta"):
        description = architecture(config)
        encoders = encoders_of(description).eval().requires_grad_(False)  # the counter follows no graph
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
    """FLOPs of one training sample: a forward pass, and twice as much for the backward of a trained tower,
    of which more than the projection trains.

    The gradient cache's second forward pass is overhead and not counted, so MFU compares with plain training.
    """

    def __init__(
        self, config: ModelConfig, device: torch.device, *, stored_images: bool = False, captions: int = 1
    ) -> None:
        """With `stored_images` the image tower does not run, because its features are read; `captions`: of a sample."""
        self.config, self.captions = config, captions
        once = config.freeze_image or config.image.unlocked_groups in (0, 1)
        self.image = 0 if stored_images else forward_flops(config)[0] * (1 if once else 3)
        gpu = hardware_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self.peak = HARDWARE[gpu].peak("bf16") if gpu else None

    def per_sample(self, widths: Mapping[int, int] | None = None) -> float:
        """FLOPs; `widths`: a batch's captions by the tokens at which they are computed; None: the whole context."""
        captions = list(widths.items()) if widths else [(None, 1)]
        text = sum(count * forward_flops(self.config, width)[1] for width, count in captions)
        text_each = self.captions * text / sum(count for _, count in captions)
        once = self.config.freeze_text or self.config.text.unlocked_groups in (0, 1)
        return self.image + text_each * (1 if once else 3)

    def utilisation(self, samples_per_s: float, widths: Mapping[int, int] | None = None) -> float | None:
        """MFU: samples_per_s (per device) x FLOPs per sample / peak. None where the device's peak is not known."""
        return None if self.peak is None else samples_per_s * self.per_sample(widths) / self.peak
