"""Model FLOPs utilisation: what share of the device's peak the model's own arithmetic reaches."""

import torch

from clipscale.models.towers import ModelConfig, forward_flops

PEAK_TFLOPS = {
    "A100": 312,
    "A800": 312,
    "H100": 989,
    "H200": 989,
    "H800": 989,
    "B200": 2250,
    "L40S": 362,
    "RTX 4090": 165,
    "V100": 125,
}
"""Dense bf16 (V100: fp16) tensor-core peak by the vendors' data sheets, in 1e12 operations a second, by a part of the device's name."""


class Flops:
    """FLOPs of one training sample: a forward pass, and twice that for the backward of a tower that is trained.

    The gradient cache's second forward pass is overhead, not model arithmetic, and is not counted: MFU is comparable with plain training.
    """

    def __init__(self, config: ModelConfig, device: torch.device, *, stored_images: bool = False) -> None:
        """With `stored_images` the image tower does not run: its features are read."""
        image, text = forward_flops(config)
        image = 0 if stored_images else image
        self.per_sample = image * (1 if config.freeze_image else 3) + text * (1 if config.freeze_text else 3)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self.peak = next((1e12 * peak for part, peak in PEAK_TFLOPS.items() if part in name), None)

    def utilisation(self, samples_per_s: float) -> float | None:
        """samples_per_s (per device) x per_sample / peak; None where the device's peak is not known."""
        return None if self.peak is None else samples_per_s * self.per_sample / self.peak
