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


class Words:
    """Tokens are the `first`, the words' first letters, and END; then `pad`. Pickles to workers."""

    START = 1
    END = 2

    def __init__(self, context: int, pad: int, first: tuple[int, ...] = (START,)) -> None:
        self.context = context
        self.pad = pad
        self.first = first

    def __call__(self, texts: list[str]) -> torch.Tensor:
        tokens = torch.full((len(texts), self.context), self.pad)
        for row, text in zip(tokens, texts):
            words = [ord(word[0]) for word in text.split()][: self.context - len(self.first) - 1]
            used = [*self.first, *words, self.END]
            row[: len(used)] = torch.tensor(used)
        return tokens


def picture(
    seed: int = 0, size: tuple[int, int] = (SIDE, SIDE), kind: str = "PNG", mode: str = "RGB", **options: object
) -> bytes:
    """An encoded picture of smooth random colours."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).convert(mode).save(out, kind, **options)
    return out.getvalue()


def _huge() -> bytes:
    out = io.BytesIO()
    Image.new("1", (9600, 9600)).save(out, "PNG")
    return out.getvalue()


# More pixels than are decoded, in 12 kilobytes.
HUGE = _huge()


def photograph(side: int, seed: int) -> bytes:
    """A JPEG of side x side pixels, quality 90, of structures of every size, which contrast with their like as in
    natural scenes (Field 1987)."""
    random = np.random.default_rng(seed)
    octaves = [random.integers(0, 256, (2**k, 2**k, 3), dtype=np.uint8) for k in range(1, side.bit_length())]
    scaled = [Image.fromarray(octave).resize((side, side), Image.Resampling.BICUBIC) for octave in octaves]
    pixels = 128 + 2 * (np.mean(scaled, axis=0) - 128)
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


Members = list[tuple[str, bytes]]


def sample(key: str, seed: int = 0) -> Members:
    """A good sample: picture, caption (its key), json."""
    return [
        (f"{key}.png", picture(seed)),
        (f"{key}.txt", f"caption {key}".encode()),
        (f"{key}.json", json.dumps({"alt": f"alt {key}"}).encode()),
    ]


def write_tar(path: Path, members: Iterable[tuple[str, bytes] | tarfile.TarInfo]) -> Path:
    """Write a tar file of these members, in this order; a header alone is a link."""
    with tarfile.open(path, "w", errors="surrogateescape") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
                continue
            info = tarfile.TarInfo(member[0])
            info.size = len(member[1])
            tar.addfile(info, io.BytesIO(member[1]))
    return path


def link(name: str, target: str, kind: bytes = tarfile.LNKTYPE) -> tarfile.TarInfo:
    """A hard link, or one of this kind, as a member of a tar."""
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = target
    return info


def write_shards(folder: Path, sizes: Iterable[int]) -> list[Path]:
    """Write shards of good samples with these sizes and unique keys."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, size in enumerate(sizes):
        path = folder / f"{number:05d}.tar"
        write_tar(path, [member for i in range(size) for member in sample(f"{number:05d}{i:04d}", seed=i % 7)])
        paths.append(path)
    return paths
