"""The pixels of training: a random crop of a picture, resized and perhaps flipped.

C = 3: channels, S: side of the model's input in pixels.
"""

import math
from dataclasses import dataclass

import numpy as np

from clipscale.config.data import AugmentConfig
from clipscale.data.order import CounterRNG
from clipscale.data.picture import Picture


def random_box(
    width: int, height: int, scale: tuple[float, float], ratio: tuple[float, float], rng: CounterRNG
) -> tuple[int, int, int, int]:
    """A random crop like torchvision's RandomResizedCrop: area uniform in `scale`, aspect log-uniform in `ratio`.

    Returns left, top, right, bottom, in source pixels. After ten failed attempts this is the largest central crop with
    an aspect in `ratio`.
    """
    low = math.log(ratio[0])
    high = math.log(ratio[1])
    for _ in range(10):
        target = width * height * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(low, high))
        w = round(math.sqrt(target * aspect))
        h = round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            left = rng.integer(width - w + 1)
            top = rng.integer(height - h + 1)
            break
    else:
        w = min(width, round(height * ratio[1]))
        h = min(height, round(width / ratio[0]))
        left = (width - w) // 2
        top = (height - h) // 2
    return left, top, left + w, top + h


@dataclass(frozen=True)
class TrainTransform:
    """Turns a picture's bytes into training pixels: random resized crop and flip, with the caller's random numbers."""

    image_size: int
    augment: AugmentConfig

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, S, S): shape of the pixels."""
        return 3, self.image_size, self.image_size

    def __call__(self, data: bytes, rng: CounterRNG, out: np.ndarray) -> None:
        """Write the pixels to `out`, (C, S, S) uint8. Raises BrokenSampleError before anything is written.

        torch's vectorised uint8 kernel takes at most a quarter of the time of Pillow's resize. Some pixels differ from
        Pillow's by 1/255, a few by 2/255.
        """
        import torch  # imported here, because `data check` decodes pictures without torch

        picture = Picture.read(data)
        augment = self.augment
        left, top, right, bottom = random_box(picture.width, picture.height, augment.scale, augment.ratio, rng)
        flipped = augment.flip > 0 and rng.uniform() < augment.flip
        crop = picture.decode()[top:bottom, left:right]
        image = torch.from_numpy(crop).permute(2, 0, 1)
        size = (self.image_size, self.image_size)
        if image.shape[1:] != size:
            image = torch.nn.functional.interpolate(image[None], size=size, mode="bicubic", antialias=True)[0]
        pixels = image.numpy()
        np.copyto(out, pixels[:, :, ::-1] if flipped else pixels)
