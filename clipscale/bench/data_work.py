"""What the data benchmark measures in a fresh process: decoding on one core, and shards to batches."""

import io
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image
from webdataset import TarWriter

from clipscale.bench.worker import Worker, alternating, spread
from clipscale.config.data import DECODE, DataConfig
from clipscale.config.tools import DataBenchSettings
from clipscale.data.decode import TrainTransform
from clipscale.data.loader.stream import PIECE, BatchShare, open_stream
from clipscale.data.order import AUGMENT, CounterRNG
from clipscale.models.tokenizer import Tokenizer

Row = dict[str, Any]

PEER = "open_clip"
ON_CPU = DECODE
WORDS = 12
"""Words of a caption whose tokenising is measured; LAION's have 10 or so."""
CAPTIONS = 40
"""For each of `pictures`."""
OWN_TOKENS = "clipscale"
BATCHES = 3
"""Batches of a stream that are measured, after the first."""


class DataWorker(Worker):
    """Measures kind by kind."""

    def probe(self, name: str, size: int) -> None:
        settings = DataBenchSettings(**self.job.about["settings"])
        files = [photograph(size, seed) for seed in range(settings.pictures)] if not name.startswith("tokens") else []

        measure: dict[str, Callable[[], list[Row]]] = {
            "decode": lambda: decode_rows(files, settings),
            "tokens": lambda: token_rows(size, settings),
            "stream": lambda: stream_rows(files, settings),
        }
        self.record(name)["rows"] = measure[name.split()[0]]()


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


# ---- one core ----


def training_transform(side: int, decode: str = "exact") -> TrainTransform:
    """open_clip's training crop, which is ours by default."""
    return TrainTransform(side, (0.9, 1.0), (3 / 4, 4 / 3), 0.0, 2**30, decode == "fast")


def core_rates(methods: Mapping[str, Callable[[int], object]], count: int, repeats: int) -> dict[str, list[float]]:
    """What each method does a second of one core, if it does `count` in each round; it is given the round. The first one warms up."""
    rates: dict[str, list[float]] = {name: [] for name in methods}
    for number, name in alternating(list(methods), repeats + 1):
        begun = time.process_time()
        methods[name](number)
        rates[name].append(count / (time.process_time() - begun))
    return {name: found[1:] for name, found in rates.items()}


def decode_rows(pictures: list[bytes], settings: DataBenchSettings) -> list[Row]:
    """Pictures a second and core of every transform on sources of one size."""
    from open_clip.transform import image_transform

    side, out = settings.image_size, np.empty((3, settings.image_size, settings.image_size), np.uint8)
    peer = image_transform(side, is_train=True)

    def own(transform: TrainTransform, number: int) -> None:
        for place, data in enumerate(pictures):
            transform(data, CounterRNG(0, AUGMENT, number * len(pictures) + place), out)

    methods: dict[str, Callable[[int], object]] = {
        f"decode={name}": partial(own, training_transform(side, name)) for name in ON_CPU
    }
    methods[PEER] = lambda _: [peer(Image.open(io.BytesIO(data)).convert("RGB")) for data in pictures]
    rows = with_ratios(core_rates(methods, len(pictures), settings.repeats))
    rows[ON_CPU.index("fast")]["difference"] = difference(side, pictures)
    return rows


def token_rows(words: int, settings: DataBenchSettings) -> list[Row]:
    """Captions a second and core, from words of ImageNet's class names."""
    import open_clip

    vocabulary = " ".join(open_clip.IMAGENET_CLASSNAMES).split()
    draws = np.random.default_rng(0).integers(0, len(vocabulary), (CAPTIONS * settings.pictures, words))
    captions = [" ".join(vocabulary[place] for place in row) for row in draws]
    pieces = [captions[start : start + PIECE] for start in range(0, len(captions), PIECE)]
    peer = open_clip.get_tokenizer("ViT-B-32")
    own = Tokenizer(peer, peer.context_length)
    methods = {
        OWN_TOKENS: lambda _: [own(piece) for piece in pieces],
        PEER: lambda _: [peer(piece) for piece in pieces],
    }
    return with_ratios(core_rates(methods, len(captions), settings.repeats))


def difference(side: int, pictures: list[bytes]) -> float:
    """Of `fast` pixels from `exact` ones of the same crops, mean of the absolute values, in parts of 255."""
    means = []
    for number, data in enumerate(pictures):
        found = np.zeros((2, 3, side, side), np.uint8)
        for name, pixels in zip(("exact", "fast"), found):
            training_transform(side, name)(data, CounterRNG(0, AUGMENT, number), pixels)
        means.append(np.abs(found[0].astype(np.int16) - found[1]).mean())
    return float(np.mean(means))


# ---- shards to batches ----


def stream_rows(files: list[bytes], settings: DataBenchSettings) -> list[Row]:
    """Samples a second of the whole path from shards to batches, and bytes a sample that pass between processes."""
    import open_clip

    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    rates: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="clipscale-bench-") as name:
        pattern = write_shards(Path(name), files, settings, shards=2 * settings.workers, batches=2 + BATCHES)
        loaders: dict[str, Callable[[], Iterator[int]]] = {
            f"decode={decode}": partial(own_batches, pattern, decode, tokenizer, settings) for decode in DECODE
        }
        loaders[PEER] = partial(peer_batches, pattern, tokenizer, settings)
        for _, method in alternating(list(loaders), settings.repeats):
            batches = loaders[method]()
            sizes[method] = next(batches)
            begun = time.perf_counter()
            for _ in range(BATCHES):
                next(batches)
            rates.setdefault(method, []).append(BATCHES * settings.batch / (time.perf_counter() - begun))
            batches.close()  # type: ignore[attr-defined]
    return [row | {"bytes": sizes[row["method"]]} for row in with_ratios({name: rates[name] for name in loaders})]


def write_shards(folder: Path, pictures: list[bytes], settings: DataBenchSettings, shards: int, batches: int) -> str:
    """Shards of so many batches together, with captions and img2dataset-like json members; returns their brace list."""
    for shard in range(shards):
        with TarWriter(str(folder / f"{shard:05d}.tar")) as archive:
            for i in range(-(-batches * settings.batch // shards)):
                caption = f"a photograph of thing {i} on a table, number {shard}"
                members = {"jpg": pictures[i % len(pictures)], "txt": caption, "json": {"a": "x" * 500}}
                archive.write({"__key__": f"{shard:05d}{i:04d}"} | members)
    return f"{folder}/{{00000..{shards - 1:05d}}}.tar"


def own_batches(pattern: str, decode: str, tokenizer: Any, settings: DataBenchSettings) -> Iterator[int]:
    """Whole batches of the training stream in host memory; yields the bytes of a sample."""
    config = DataConfig(train=[pattern], workers=settings.workers, decode=decode, order="epochs")
    size, side = settings.batch, settings.image_size
    with open_stream(config, BatchShare(size), image_size=side, tokenizer=tokenizer, seed=0) as stream:
        while True:
            batch = stream.next_batch()
            yield (batch.pixels(0, size).nbytes + batch.tokens(0, size).nbytes) // size


def peer_batches(pattern: str, tokenizer: Any, settings: DataBenchSettings) -> Iterator[int]:
    """Whole batches through webdataset's stages in the order and at the buffer sizes of open_clip's trainer, with its transform."""
    import webdataset as wds
    from open_clip.transform import image_transform

    transform = image_transform(settings.image_size, is_train=True)
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
    loader = wds.WebLoader(wds.DataPipeline(*stages), batch_size=None, shuffle=False, num_workers=settings.workers)
    for pixels, tokens in loader:
        yield (pixels.nbytes + tokens.nbytes) // len(pixels)


def with_ratios(rates: Mapping[str, list[float]]) -> list[Row]:
    """A row for each method, with its rate over the peer's: the median over rounds of the quotient within the round."""
    return [
        {"method": name, "per_s": spread(own), "ratio": median(a / b for a, b in zip(own, rates[PEER]))}
        for name, own in rates.items()
    ]
