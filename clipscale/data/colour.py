"""Random changes of a training picture's colours: jitter and greyscale, as in SimCLR and as open_clip offers them.

C = 3: channels, S: side in pixels.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from clipscale.data.order import CounterRNG

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Colour:
    """Colour jitter with a probability, then greyscale with another (Chen et al. 2020, arXiv 2002.05709, appendix A).

    Brightness, contrast and saturation are multiplied by factors uniform in 1 +- their strength, not below 0; the hue is turned by up to
    its strength of a full turn; in that order.
    """

    strengths: tuple[float, float, float, float]
    """Of brightness, contrast, saturation and hue (at most 0.5)."""
    probability: float
    grey: float
    """Probability of a greyscale picture."""

    def __call__(self, pixels: np.ndarray, rng: CounterRNG) -> np.ndarray:
        """(C, S, S) uint8 to the same."""
        import torch

        return self.changed(torch.from_numpy(np.ascontiguousarray(pixels)), rng).numpy()

    def changed(self, image: "Tensor", rng: CounterRNG) -> "Tensor":
        """(C, S, S) uint8, on any device, to the same."""
        from torchvision.transforms.v2 import (
            functional as F,
        )  # here, since workers that change no colours need not load it

        if rng.uniform() < self.probability:
            steps = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation)
            for step, strength in zip(steps, self.strengths):
                if strength:
                    image = step(image, rng.uniform(max(0.0, 1 - strength), 1 + strength))
            if hue := self.strengths[3]:
                image = F.adjust_hue(image, rng.uniform(-hue, hue))
        if rng.uniform() < self.grey:
            image = F.rgb_to_grayscale(image, num_output_channels=3)
        return image
