"""Model FLOPs utilisation: what share of the device's peak the model's own arithmetic reaches."""

import torch

from clipscale.config.sections import ModelConfig
from clipscale.hardware import HARDWARE, hardware_of
from clipscale.models.towers import forward_flops


class Flops:
    """FLOPs of one training sample: a forward pass, and twice that for the backward of a tower that is trained.

    The gradient cache's second forward pass is overhead, not model arithmetic, and is not counted: MFU is comparable with plain training.
    """

    def __init__(self, config: ModelConfig, device: torch.device, *, stored_images: bool = False) -> None:
        """With `stored_images` the image tower does not run: its features are read."""
        image, text = forward_flops(config)
        image = 0 if stored_images else image
        self.per_sample = image * (1 if config.freeze_image else 3) + text * (1 if config.freeze_text else 3)
        found = hardware_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self.peak = HARDWARE[found].peak("bf16") if found else None

    def utilisation(self, samples_per_s: float) -> float | None:
        """samples_per_s (per device) x per_sample / peak; None where the device's peak is not known."""
        return None if self.peak is None else samples_per_s * self.per_sample / self.peak
