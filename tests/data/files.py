"""Small shards for the tests of the data path, and a tokenizer without a vocabulary."""

import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

SIDE = 4


class Letters:
    """Tokens are the caption's first eight code points; pickles to workers."""

    def __call__(self, texts: list[str]) -> torch.Tensor:
        return torch.tensor([[ord(c) for c in text[:8].ljust(8)] for text in texts])


def picture(
    seed: int = 0, size: tuple[int, int] = (SIDE, SIDE), kind: str = "PNG", mode: str = "RGB", **options: object
) -> bytes:
    """An encoded picture of smooth random colours."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).convert(mode).save(out, kind, **options)
    return out.getvalue()


def photograph(side: int, seed: int) -> bytes:
    """A JPEG of side x side random pixels, quality 90, with the amplitude spectrum of natural scenes, 1/f (Field 1987).

    The time to decode a JPEG follows its content.
    """
    random = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None, :])
    frequency[0, 0] = np.inf
    common = random.normal(size=(side, side))
    channels = []
    for _ in range(3):  # colours of a photograph are alike
        noise = np.fft.rfft2(common + 0.5 * random.normal(size=(side, side)))
        field = np.fft.irfft2(noise / frequency, (side, side))
        channels.append(128 + 52 * field / field.std())
    pixels = np.stack(channels, 2).clip(0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


Members = list[tuple[str, bytes]]


def sample(key: str, seed: int = 0) -> Members:
    """A good sample: picture, caption (its key), json."""
    return [
        (f"{key}.png", picture(seed)),
        (f"{key}.txt", f"caption {key}".encode()),
        (f"{key}.json", json.dumps({"alt": f"alt {key}"}).encode()),
    ]


def write_tar(path: Path, members: Members) -> Path:
    """Write a tar file of these members, in this order."""
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def write_shards(folder: Path, sizes: Iterable[int]) -> list[Path]:
    """Write shards of good samples with these sizes and unique keys."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, size in enumerate(sizes):
        path = folder / f"{number:05d}.tar"
        write_tar(path, [member for i in range(size) for member in sample(f"{number:05d}{i:04d}", seed=i % 7)])
        paths.append(path)
    return paths
