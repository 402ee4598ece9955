"""`clipscale bench data`: pictures to pixels per core, and shards to batches through workers, beside open_clip's transform and loader.

Where there is a GPU: what its decoder gives, and what a model takes, so that it shows whether the data path feeds it. The pictures are made
up, with the spectrum of photographs (amplitude falling as 1/frequency), since the time of a JPEG follows its content.
"""

import io
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console

from clipscale.bench import data_device
from clipscale.bench.data_draw import draw
from clipscale.bench.figures import counts, processor, spread
from clipscale.bench.machine import asked, machine
from clipscale.bench.records import earlier, write
from clipscale.bench.sheet import Sheet, grouped, publish
from clipscale.config.data import DECODE, DataConfig
from clipscale.config.tools import DataBenchSettings
from clipscale.data.decode import TrainTransform
from clipscale.data.loader.stream import BatchShare, open_stream
from clipscale.data.order import AUGMENT, CounterRNG
from clipscale.errors import UserError
from clipscale.report.table import plain_console

Row = dict[str, Any]

SCALE, RATIO = (0.9, 1.0), (3 / 4, 4 / 3)
"""open_clip's training crop, and ours by default."""
PEER, GPU = "open_clip", "decode=gpu"
ON_CPU = tuple(name for name in DECODE if name != "gpu")
KINDS = ("decode", "loader", "device", "step", "stream")
"""What is measured, in the order of the record."""
HOW = {
    "decode": "pictures a second of one core: JPEG bytes in memory to the pixels of a training sample (random resized crop, bicubic); CPU "
    "time of one thread, methods in turns, every second round backwards, after a round that is not counted",
    "stream": "samples a second from shards on disk through worker processes into whole batches, tokens included: wall clock from the end "
    "of the first batch on; methods in turns, each with workers of its own",
    "loader": "pictures a second of one core that a loader prepares for data.decode=gpu: header read, crop drawn, bytes put into the batch",
    "device": f"pictures a second of the GPU with data.decode=gpu: bytes in host memory to pixels there, {data_device.AHEAD} at once",
    "step": f"samples a second that the gradient cache takes on the GPU in bf16, pixels at hand, chunks of {data_device.CHUNK} at most",
    "difference": "mean difference of decode=fast from decode=exact on the same crops, in parts of 255",
    "bytes": "what one sample takes of the memory through which workers hand it over, pixels and tokens",
    "pictures": "random, amplitude 1/frequency in every colour, JPEG quality 90",
}


def main(settings: DataBenchSettings, console: Console | None = None) -> list[Row]:
    """Measure, print and save. Raises UserError for settings that cannot be."""
    console = console or plain_console()
    sizes, streamed = (counts(name, getattr(settings, name)) for name in ("sizes", "stream"))
    for name in ("image_size", "pictures", "repeats", "workers", "batch"):
        if getattr(settings, name) < 1:
            raise UserError(f"{name}={getattr(settings, name)}: must be at least 1")
    device, why = data_device.usable(settings.device)
    out = Path(settings.out).expanduser()
    out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "benchmark": "data",
        "settings": asked(settings),
        "machine": machine("bench data", settings),
        "how": HOW,
        "rows": [],
        "skipped": {"decode=gpu": why} if why else {},
    }
    path = out / "data.json"
    before = earlier(path, record) if settings.resume else {}
    record["rows"] = before.get("rows", [])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with console.status("data") as status:
            for kind, side, rows in parts(sizes, streamed, settings, device, record["skipped"]):
                if any((row["kind"], row["side"]) == (kind, side) for row in record["rows"]):
                    continue
                status.update(f"{kind}, {side} pixels")
                record["rows"] = sorted(
                    [*record["rows"], *rows()], key=lambda row: (KINDS.index(row["kind"]), row["side"])
                )
                write(path, record)  # what is there, should the rest be cut off
    finally:
        torch.set_num_threads(threads)
    record["verdicts"] = verdicts(record)
    write(path, record)
    present(record, path, console)
    return list(record["rows"])


def present(record: Row, path: Path, console: Console) -> None:
    """Table and picture of the record at `path`, printed and beside it."""
    publish(table(record), record["verdicts"], path, partial(draw, record), console)


def parts(
    sizes: list[int],
    streamed: list[int],
    settings: DataBenchSettings,
    device: torch.device | None,
    skipped: dict[str, str],
) -> Iterator[tuple[str, int, Callable[[], list[Row]]]]:
    """What is measured: kind and side of each part, and what does it. Where the GPU fails, `skipped` says why, and the rest goes on."""

    def on_gpu(kind: str, side: int, method: str, rates: Callable[[], list[float]]) -> list[Row]:
        try:
            return [_row(kind, side, method, rates())]
        except RuntimeError as error:
            skipped[f"{method}, {kind} {side}"] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            return []

    transform, repeats = TrainTransform(settings.image_size, SCALE, RATIO, 0.0, 2**30), settings.repeats
    for side in sizes:
        files = photographs(side, settings)
        yield "decode", side, partial(decode_rows, side, files, settings)
        rates = partial(data_device.loader_rates, files, transform, repeats)
        yield "loader", side, lambda side=side, rates=rates: [_row("loader", side, GPU, rates())]  # type: ignore[misc]
        if device:
            rates = partial(data_device.device_rates, files, transform, repeats, device)
            yield "device", side, partial(on_gpu, "device", side, GPU, rates)
    if device and settings.model:
        rates = partial(data_device.step_rates, settings.model, settings.batch, repeats, device)
        yield "step", settings.image_size, partial(on_gpu, "step", settings.image_size, settings.model, rates)
    for side in streamed:
        decoding = device if not any(name.startswith(GPU) for name in skipped) else None
        yield "stream", side, partial(stream_rows, side, settings, decoding)


def photographs(side: int, settings: DataBenchSettings) -> list[bytes]:
    """The pictures of one size."""
    return [photograph(side, seed) for seed in range(settings.pictures)]


def photograph(side: int, seed: int) -> bytes:
    """A JPEG of side x side pixels with the amplitude spectrum of natural scenes, 1/f (Field 1987), quality 90."""
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


# -- one core ----------------------------------------------------------------------------------------------------------


def transforms(side: int) -> dict[str, Callable[[bytes, int], Any]]:
    """Method -> what turns picture bytes, with a number for the random crop, into training pixels."""
    from open_clip.transform import image_transform

    out = np.empty((3, side, side), np.uint8)
    peer = image_transform(side, is_train=True)

    def own(transform: TrainTransform) -> Callable[[bytes, int], Any]:
        return lambda data, number: transform(data, CounterRNG(0, AUGMENT, number), out)

    found = {f"decode={name}": own(TrainTransform(side, SCALE, RATIO, 0.0, 2**30, name == "fast")) for name in ON_CPU}
    return found | {PEER: lambda data, _: peer(Image.open(io.BytesIO(data)).convert("RGB"))}


def decode_rows(side: int, pictures: list[bytes], settings: DataBenchSettings) -> list[Row]:
    """Pictures a second and core of every transform on sources of one size."""
    methods = transforms(settings.image_size)
    times: dict[str, list[float]] = {name: [] for name in methods}
    for round_ in range(settings.repeats + 1):
        for name in list(methods) if round_ % 2 else reversed(list(methods)):
            begun = time.process_time()
            for number, data in enumerate(pictures):
                methods[name](data, round_ * len(pictures) + number)
            if round_:
                times[name].append(time.process_time() - begun)
    rows = [_row("decode", side, name, [len(pictures) / t for t in times[name]]) for name in methods]
    rows[ON_CPU.index("fast")]["difference"] = difference(settings.image_size, pictures)
    return with_ratios(rows)


def difference(side: int, pictures: list[bytes]) -> float:
    """Of `fast` pixels from `exact` ones of the same crops, mean of the absolute values, in parts of 255."""
    exact, fast = (TrainTransform(side, SCALE, RATIO, 0.0, 2**30, name == "fast") for name in ("exact", "fast"))
    means = []
    for number, data in enumerate(pictures):
        found = np.zeros((2, 3, side, side), np.uint8)
        exact(data, CounterRNG(0, AUGMENT, number), found[0])
        fast(data, CounterRNG(0, AUGMENT, number), found[1])
        means.append(np.abs(found[0].astype(np.int16) - found[1]).mean())
    return float(np.mean(means))


# -- end to end --------------------------------------------------------------------------------------------------------


def stream_rows(side: int, settings: DataBenchSettings, device: torch.device | None) -> list[Row]:
    """Samples a second of the whole path from shards to batches, and bytes a sample that pass between processes."""
    import open_clip

    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    rates: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}
    measured = 3  # batches, after the first
    with tempfile.TemporaryDirectory(prefix="clipscale-bench-") as name:
        pattern = write_shards(Path(name), side, settings, shards=2 * settings.workers, batches=2 + measured)
        loaders: dict[str, Callable[[], Iterator[int]]] = {
            f"decode={decode}": lambda decode=decode: own_batches(pattern, decode, tokenizer, settings, device)  # type: ignore[misc]
            for decode in (DECODE if device else ON_CPU)
        }
        loaders[PEER] = lambda: peer_batches(pattern, tokenizer, settings)
        for round_ in range(settings.repeats):
            for method in list(loaders) if round_ % 2 else reversed(list(loaders)):
                batches = loaders[method]()
                sizes[method] = next(batches)
                begun = time.perf_counter()
                for _ in range(measured):
                    next(batches)
                rates.setdefault(method, []).append(measured * settings.batch / (time.perf_counter() - begun))
                batches.close()  # type: ignore[attr-defined]
    rows = [_row("stream", side, method, rates[method]) | {"bytes": sizes[method]} for method in loaders]
    return with_ratios(rows)


def write_shards(folder: Path, side: int, settings: DataBenchSettings, shards: int, batches: int) -> str:
    """Shards of so many batches together, with captions and img2dataset-like json members; returns their brace list."""
    pictures = photographs(side, settings)
    for shard in range(shards):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as archive:
            for i in range(-(-batches * settings.batch // shards)):
                key = f"{shard:05d}{i:04d}"
                caption = f"a photograph of thing {i} on a table, number {shard}"
                members = {
                    "jpg": pictures[i % len(pictures)],
                    "txt": caption.encode(),
                    "json": b'{"a": "%s"}' % (b"x" * 500),
                }
                for extension, data in members.items():
                    header = tarfile.TarInfo(f"{key}.{extension}")
                    header.size = len(data)
                    archive.addfile(header, io.BytesIO(data))
    return f"{folder}/{{00000..{shards - 1:05d}}}.tar"


def own_batches(
    pattern: str, decode: str, tokenizer: Any, settings: DataBenchSettings, device: torch.device | None = None
) -> Iterator[int]:
    """Whole batches of TrainStream in host memory; yields the bytes of a sample."""
    config = DataConfig(train=[pattern], workers=settings.workers, decode=decode, order="epochs")
    size, side = settings.batch, settings.image_size
    with open_stream(config, BatchShare(size), image_size=side, tokenizer=tokenizer, seed=0, device=device) as stream:
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


# -- the record --------------------------------------------------------------------------------------------------------


def _row(kind: str, side: int, method: str, rates: list[float]) -> Row:
    return {"kind": kind, "side": side, "method": method, "per_s": spread(rates)}


def with_ratios(rows: list[Row]) -> list[Row]:
    """Each row with its rate over the peer's: the median over rounds of the quotient within the round."""
    peer = next(row for row in rows if row["method"] == PEER)["per_s"]["all"]
    return [row | {"ratio": median(a / b for a, b in zip(row["per_s"]["all"], peer))} for row in rows]


def table(record: dict[str, Any]) -> Sheet:
    """One line for each rate."""
    title = f"data path on {processor(record['machine'])}: samples a second (decode: of one core)"
    heads = ("what", "source", "method", "samples/s", "min-max", f"to {PEER}", "bytes a sample", "off exact, /255")
    groups = [[cells(row) for row in group] for group in grouped(record["rows"], "kind", "side")]
    return Sheet(title, heads, ("what", "method"), groups)


def cells(row: Row) -> list[str]:
    rate = row["per_s"]
    between = f"{rate['min']:,.0f}-{rate['max']:,.0f}"
    size = f"{row['bytes']:,}" if "bytes" in row else "-"
    ratio = f"{row['ratio']:.2f}" if "ratio" in row else "-"
    off = f"{row['difference']:.1f}" if "difference" in row else "-"
    return [row["kind"], str(row["side"]), row["method"], f"{rate['median']:,.0f}", between, ratio, size, off]


def verdicts(record: dict[str, Any]) -> list[str]:
    """What the table means: whether the data path gives as many samples as the model takes, and what was left out."""
    lines = [f"{name} was not measured: {why}" for name, why in record["skipped"].items()]
    taken = [row for row in record["rows"] if row["kind"] == "step"]
    streams = [row for row in record["rows"] if row["kind"] == "stream" and row["method"] != PEER]
    for step in taken:
        need = step["per_s"]["median"]
        for row in streams:
            gives = row["per_s"]["median"]
            share = f"{gives:,.0f} samples/s, {gives / need:.2f} of the {need:,.0f} that {step['method']} takes"
            lines.append(
                f"{row['side']}-pixel sources, {row['method']}, {record['settings']['workers']} workers: {share}"
            )
    return lines
