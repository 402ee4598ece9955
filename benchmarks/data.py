"""Pictures to pixels per core, and shards to batches, beside open_clip's transform and loader.

    python benchmarks/data.py
    python benchmarks/data.py sizes=512 stream=512 workers=8 batch=1k

A process measures all methods on sources of one size, in turns. `header by Pillow` is clipscale without its own reader
of a usual JPEG's header.
"""

import io
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from math import ceil
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from measure import Row, counts, main, spread
from PIL import Image
from webdataset import TarWriter

from clipscale.config.data import AugmentConfig, DataConfig
from clipscale.data.loader.open_stream import open_stream, order_shards
from clipscale.data.order import AUGMENT, BatchShare, CounterRNG
from clipscale.data.train_transform import TrainTransform

DEFAULTS = {
    "sizes": "256,384,512,1024",  # sides of the source pictures, in pixels
    "image_size": 224,
    "pictures": 48,  # of each size
    "stream": "256,512",  # sides that are measured end to end
    "workers": 2,
    "batch": 256,
    "repeats": 5,
    "out": "runs/bench",
}
PEER = "open_clip"
# Batches of a stream that are measured, after the first.
BATCHES = 3


def plan(settings: SimpleNamespace) -> tuple[str, list[Row]]:
    options = {key: getattr(settings, key) for key in ("image_size", "pictures", "workers", "batch", "repeats")}
    cases = [("decode", side) for side in counts(settings.sizes)]
    cases += [("stream", side) for side in counts(settings.stream)]
    return "data", [{"kind": kind, "side": side, **options} for kind, side in cases]


def measure(kind: str, side: int, **settings: Any) -> list[Row]:
    """A row for each method: samples a second, and the ratio to PEER's. Methods alternate; the first round warms up."""
    torch.set_num_threads(1)
    options = SimpleNamespace(**settings)
    files = [photograph(side, seed) for seed in range(options.pictures)]
    with tempfile.TemporaryDirectory() as folder:
        methods = decoding(files, options) if kind == "decode" else streaming(Path(folder), files, options)
        rates: dict[str, list[float]] = {name: [] for name in methods}
        for number in range(options.repeats + 1):
            for name in reversed(methods) if number % 2 else methods:
                rates[name].append(methods[name]())
    rows = []
    for name, values in rates.items():
        ratio = median(a / b for a, b in zip(values[1:], rates[PEER][1:]))
        rows.append({"method": name, "per_s": spread(values[1:]), "ratio": ratio})
    return rows


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
    file = io.BytesIO()
    Image.fromarray(np.stack(channels, 2).clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def decoding(files: list[bytes], settings: SimpleNamespace) -> dict[str, Callable[[], float]]:
    """Pictures a second of a core's CPU time: JPEG bytes in memory to the pixels of a training sample."""
    from open_clip.transform import image_transform

    out = np.empty((3, settings.image_size, settings.image_size), np.uint8)
    reference = image_transform(settings.image_size, is_train=True)

    def rate(decode: Callable[[bytes, int], object]) -> float:
        begun = time.process_time()
        for number, data in enumerate(files):
            decode(data, number)
        return len(files) / (time.process_time() - begun)

    ours = TrainTransform(settings.image_size, AugmentConfig())  # open_clip's crops by default
    measured = partial(rate, lambda data, number: ours(data, CounterRNG(0, AUGMENT, number), out))

    def header_by_pillow() -> float:
        with patch("clipscale.data.picture.usual_frame", return_value=None):
            return measured()

    return {
        "clipscale": measured,
        "header by Pillow": header_by_pillow,
        PEER: partial(rate, lambda data, number: reference(Image.open(io.BytesIO(data)).convert("RGB"))),
    }


def streaming(folder: Path, files: list[bytes], settings: SimpleNamespace) -> dict[str, Callable[[], float]]:
    """Samples a second of the whole path from shards on disk to batches in host memory, by the wall clock."""
    pattern = write_shards(folder, files, 2 * settings.workers, (2 + BATCHES) * settings.batch)

    def rate(batches: Callable[[], Generator[None]]) -> float:
        with closing(batches()) as stream:
            next(stream)
            begun = time.perf_counter()
            for _ in range(BATCHES):
                next(stream)
            return BATCHES * settings.batch / (time.perf_counter() - begun)

    return {
        "clipscale": partial(rate, partial(our_batches, pattern, settings)),
        PEER: partial(rate, partial(peer_batches, pattern, settings)),
    }


def write_shards(folder: Path, files: list[bytes], shards: int, samples: int) -> str:
    """Shards with captions and img2dataset-like json members; returns their brace list."""
    for shard in range(shards):
        with TarWriter(str(folder / f"{shard:05d}.tar")) as archive:
            for i in range(ceil(samples / shards)):
                caption = f"a photograph of thing {i} on a table, number {shard}"
                members = {"jpg": files[i % len(files)], "txt": caption, "json": {"a": "x" * 500}}
                archive.write({"__key__": f"{shard:05d}{i:04d}"} | members)
    return f"{folder}/{{00000..{shards - 1:05d}}}.tar"


def our_batches(pattern: str, settings: SimpleNamespace) -> Generator[None]:
    import open_clip

    config = DataConfig(train=[pattern], workers=settings.workers, order="epochs")
    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    share = BatchShare(settings.batch, 0, 1)
    with open_stream(config, share, settings.image_size, tokenizer, order_shards(config, share, 0)) as stream:
        while True:
            batch = stream.next_batch()
            batch.pixels(0, settings.batch), batch.tokens(0, settings.batch)
            yield


def peer_batches(pattern: str, settings: SimpleNamespace) -> Generator[None]:
    """webdataset's stages in the order and at the buffer sizes of open_clip's trainer, with its transform."""
    import open_clip
    import webdataset as wds
    from open_clip.transform import image_transform

    tokenizer, transform = open_clip.get_tokenizer("ViT-B-32"), image_transform(settings.image_size, is_train=True)
    stages = [
        wds.ResampledShards(pattern),
        wds.tarfile_to_samples(),
        wds.shuffle(bufsize=5000, initial=1000),
        wds.decode("pilrgb"),
        wds.rename(image="jpg;png;jpeg;webp", text="txt"),
        wds.map_dict(image=transform, text=lambda text: tokenizer(text)[0]),
        wds.to_tuple("image", "text"),
        wds.batched(settings.batch),
    ]
    for _ in wds.WebLoader(wds.DataPipeline(*stages), batch_size=None, shuffle=False, num_workers=settings.workers):
        yield


COLUMNS = {
    "what": lambda row: row["kind"],
    "source": lambda row: str(row["side"]),
    "method": lambda row: row["method"],
    "samples/s": lambda row: f"{row['per_s']['median']:,.0f}",
    f"to {PEER}": lambda row: f"{row['ratio']:.2f}",
}

if __name__ == "__main__":
    main(DEFAULTS, plan, measure, COLUMNS)
