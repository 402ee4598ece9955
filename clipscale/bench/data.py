"""`clipscale bench data`: pictures to pixels per core, and shards to batches through workers, beside open_clip's transform and loader.

On a GPU it also measures the decoder there and what a model takes, to show whether the data path feeds it.
"""

import io
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console

from clipscale.bench.present import Bars, Benchmark, Column, Curves, extent, finish
from clipscale.bench.record import begin, counts, device_of, processor, write
from clipscale.bench.worker import Meter, alternating, spread
from clipscale.config.data import DECODE, DataConfig
from clipscale.config.tools import DataBenchSettings
from clipscale.data.decode import TrainTransform
from clipscale.data.loader import gpu_decode
from clipscale.data.loader.gpu_decode import DecodePrefetcher, DeviceDecoder, jpeg_decoder
from clipscale.data.loader.host_batch import Arena, Layout, Stopwatch
from clipscale.data.loader.offload import open_backend
from clipscale.data.loader.stream import BatchShare, open_stream
from clipscale.data.order import AUGMENT, CounterRNG
from clipscale.errors import UserError
from clipscale.report.table import plain_console

Row = dict[str, Any]
Rates = Mapping[str, Callable[[], list[float]]]

PEER, GPU = "open_clip", "decode=gpu"
ON_CPU = tuple(name for name in DECODE if name != "gpu")
TITLES = {"decode": "pictures to pixels, one core", "stream": "shards to batches"}
KINDS = ("decode", "loader", "device", "step", "stream")
"""What is measured, in the order of the record."""
CHUNK = 1024
"""Most samples of a chunk of the model's step."""
FED = 4
"""How often the GPU is given `gpu_decode.AHEAD` pictures in one measurement."""
BATCHES = 3
"""Batches of a stream that are measured, after the first."""
HOW = {
    "decode": "pictures a second of one core: JPEG bytes in memory to the pixels of a training sample (random resized crop, bicubic); CPU "
    "time of one thread, methods interleaved, every second round backwards, after a round that is not counted",
    "stream": "samples a second from shards on disk through worker processes into whole batches, tokens included: wall clock from the end "
    "of the first batch on; methods interleaved, each with workers of its own",
    "loader": "pictures a second of one core that a loader prepares for data.decode=gpu: header read, crop drawn, bytes put into the batch",
    "device": f"pictures a second of the GPU with data.decode=gpu: bytes in host memory to pixels there, {gpu_decode.AHEAD} at once",
    "step": f"samples a second that the gradient cache takes on the GPU in bf16, pixels at hand, chunks of {CHUNK} at most",
    "difference": "mean difference of decode=fast from decode=exact on the same crops, in parts of 255",
    "bytes": "what one sample takes of the memory through which workers hand it over, pixels and tokens",
    "pictures": "random, amplitude 1/frequency in every colour, JPEG quality 90",
}


def main(settings: DataBenchSettings, console: Console | None = None) -> list[Row]:
    """Measure, print and save. Raises UserError for settings that cannot be."""
    console = console or plain_console()
    counts("sizes", settings.sizes), counts("stream", settings.stream)
    device, why = usable(settings.device)
    record, path = begin(settings.out, "data", "data", settings, how=HOW, skipped={GPU: why} if why else {})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with console.status("data") as status:
            for kind, side, measure in parts(settings, device, record["skipped"]):
                if any((row["kind"], row["side"]) == (kind, side) for row in record["rows"]):
                    continue
                status.update(f"{kind}, {side} pixels")
                rows = [{"kind": kind, "side": side} | row for row in measure()]
                record["rows"] = sorted([*record["rows"], *rows], key=lambda r: (KINDS.index(r["kind"]), r["side"]))
                write(path, record)  # an interruption leaves what came before
    finally:
        torch.set_num_threads(threads)
    return finish(record, path, console)


def usable(setting: str) -> tuple[torch.device | None, str]:
    """The device that decodes, by `auto`, `cuda` or `cpu`; or None, and why there is none. Raises UserError for `cuda` without one."""
    if device_of(setting) == "cpu":
        return None, "asked for with device=cpu" if setting == "cpu" else "torch finds no CUDA device"
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        jpeg_decoder(device)
    except UserError as error:
        return None, str(error)
    return device, ""


def parts(
    settings: DataBenchSettings, device: torch.device | None, skipped: dict[str, str]
) -> Iterator[tuple[str, int, Callable[[], list[Row]]]]:
    """What is measured: kind and side of each part, and what measures it. Where the GPU fails, `skipped` gets the reason."""

    def on_gpu(kind: str, side: int, method: str, rates: Callable[[], list[float]]) -> list[Row]:
        try:
            return [{"method": method, "per_s": spread(rates())}]
        except RuntimeError as error:
            skipped[f"{method}, {kind} {side}"] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            return []

    repeats = settings.repeats
    for side in counts("sizes", settings.sizes):
        files = photographs(side, settings)
        yield "decode", side, partial(decode_rows, files, settings)
        fed = partial(loader_rates, files, settings)
        yield "loader", side, lambda fed=fed: [{"method": GPU, "per_s": spread(fed())}]  # type: ignore[misc]
        if device:
            yield "device", side, partial(on_gpu, "device", side, GPU, partial(device_rates, files, settings, device))
    if device and settings.model:
        rates = partial(step_rates, settings.model, settings.batch, repeats, device)
        yield "step", settings.image_size, partial(on_gpu, "step", settings.image_size, settings.model, rates)
    for side in counts("stream", settings.stream):
        decoding = device if not any(name.startswith(GPU) for name in skipped) else None
        yield "stream", side, partial(stream_rows, side, settings, decoding)


def photographs(side: int, settings: DataBenchSettings) -> list[bytes]:
    """The pictures of one size."""
    return [photograph(side, seed) for seed in range(settings.pictures)]


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


def transforms(side: int) -> dict[str, Callable[[bytes, int], Any]]:
    """Method -> what turns picture bytes, with a number for the random crop, into training pixels."""
    from open_clip.transform import image_transform

    out = np.empty((3, side, side), np.uint8)
    peer = image_transform(side, is_train=True)

    def own(transform: TrainTransform) -> Callable[[bytes, int], Any]:
        return lambda data, number: transform(data, CounterRNG(0, AUGMENT, number), out)

    found = {f"decode={name}": own(training_transform(side, name)) for name in ON_CPU}
    return found | {PEER: lambda data, _: peer(Image.open(io.BytesIO(data)).convert("RGB"))}


def decode_rows(pictures: list[bytes], settings: DataBenchSettings) -> list[Row]:
    """Pictures a second and core of every transform on sources of one size."""
    methods = transforms(settings.image_size)
    rates: dict[str, list[float]] = {name: [] for name in methods}
    for number, name in alternating(list(methods), settings.repeats + 1):
        begun = time.process_time()
        for place, data in enumerate(pictures):
            methods[name](data, number * len(pictures) + place)
        rates[name].append(len(pictures) / (time.process_time() - begun))
    rows = with_ratios({name: found[1:] for name, found in rates.items()})
    rows[ON_CPU.index("fast")]["difference"] = difference(settings.image_size, pictures)
    return rows


def difference(side: int, pictures: list[bytes]) -> float:
    """Of `fast` pixels from `exact` ones of the same crops, mean of the absolute values, in parts of 255."""
    means = []
    for number, data in enumerate(pictures):
        found = np.zeros((2, 3, side, side), np.uint8)
        for name, pixels in zip(("exact", "fast"), found):
            training_transform(side, name)(data, CounterRNG(0, AUGMENT, number), pixels)
        means.append(np.abs(found[0].astype(np.int16) - found[1]).mean())
    return float(np.mean(means))


# ---- the GPU ----


class EncodedBatch:
    """`gpu_decode.AHEAD` pictures as the loaders leave them for the device."""

    def __init__(self, files: list[bytes], side: int) -> None:
        count = gpu_decode.AHEAD
        self.files, self.transform = list(islice(cycle(files), count)), training_transform(side)
        pool = sum(map(len, self.files)) + count * 3 * side**2
        self.arena = Arena(Layout(1, count, (3, side, side), 1, backend="device", decoded=True, pool=pool))
        self.slot = self.arena.slots[0]
        self._backend = open_backend(self.arena, self.transform, (0, count))
        self.fill(0)

    def fill(self, number: int) -> None:
        """Put every picture into its place, as a loader does, with crops by `number`."""
        self._backend.begin(self.slot)
        for place, data in enumerate(self.files):
            self._backend.put(self.slot, place, data, CounterRNG(0, AUGMENT, number + place))


def loader_rates(files: list[bytes], settings: DataBenchSettings) -> list[float]:
    """Pictures a second of one core: bytes in memory to bytes in the batch, with the header read and the crop drawn. CPU time."""
    batch, rates = EncodedBatch(files, settings.image_size), []
    for number in range(settings.repeats + 1):
        begun = time.process_time()
        batch.fill(number * len(batch.files))
        rates.append(len(batch.files) / (time.process_time() - begun))
    batch.arena.close()
    return rates[1:]


def device_rates(files: list[bytes], settings: DataBenchSettings, device: torch.device) -> list[float]:
    """Pictures a second of the device: bytes in host memory to pixels in host memory, wall clock."""
    batch, refused, rates = EncodedBatch(files, settings.image_size), Counter[str](), []
    if device.type == "cuda":
        batch.arena.pin()
    count, decoder = len(batch.files), DeviceDecoder(batch.transform, jpeg_decoder(device), refused, refused)
    ahead = DecodePrefetcher(decoder, batch.arena.buffers, Stopwatch())
    try:
        for _ in range(settings.repeats + 1):
            begun = time.perf_counter()
            for step in range(FED):
                ahead.arrived(step, batch.slot, count, count)
            for step in range(FED):
                ahead.open(step, batch.slot)
                ahead.rows(0, count)
                ahead.release(step)
            rates.append(FED * count / (time.perf_counter() - begun))
    finally:
        ahead.close()
        batch.arena.close()
    if refused:
        raise RuntimeError(f"the device refused pictures of the benchmark: {dict(refused)}")
    return rates[1:]


def step_rates(model: str, batch: int, repeats: int, device: torch.device) -> list[float]:
    """Samples a second that the gradient cache takes with that preset in bf16, pixels and tokens on the device; no update of weights."""
    from clipscale.bench.step_variants import StepVariants

    variants = StepVariants(model, min(CHUNK, batch), "bf16", str(device))
    inputs, cached, rates = variants.on_device(batch), variants.variant("cache"), []
    for _ in range(repeats + 1):
        meter = Meter(device)
        cached.step(inputs, meter)
        rates.append(batch / sum(meter.seconds.values()))
    return rates[1:]


# ---- shards to batches ----


def stream_rows(side: int, settings: DataBenchSettings, device: torch.device | None) -> list[Row]:
    """Samples a second of the whole path from shards to batches, and bytes a sample that pass between processes."""
    import open_clip

    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    rates: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="clipscale-bench-") as name:
        pattern = write_shards(Path(name), side, settings, shards=2 * settings.workers, batches=2 + BATCHES)
        loaders: dict[str, Callable[[], Iterator[int]]] = {
            f"decode={decode}": partial(own_batches, pattern, decode, tokenizer, settings, device)
            for decode in (DECODE if device else ON_CPU)
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


def write_shards(folder: Path, side: int, settings: DataBenchSettings, shards: int, batches: int) -> str:
    """Shards of so many batches together, with captions and img2dataset-like json members; returns their brace list."""
    pictures = photographs(side, settings)
    for shard in range(shards):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as archive:
            for i in range(-(-batches * settings.batch // shards)):
                caption = f"a photograph of thing {i} on a table, number {shard}"
                members = {"jpg": pictures[i % len(pictures)], "txt": caption.encode()}
                members["json"] = b'{"a": "%s"}' % (b"x" * 500)
                for extension, data in members.items():
                    header = tarfile.TarInfo(f"{shard:05d}{i:04d}.{extension}")
                    header.size = len(data)
                    archive.addfile(header, io.BytesIO(data))
    return f"{folder}/{{00000..{shards - 1:05d}}}.tar"


def own_batches(
    pattern: str, decode: str, tokenizer: Any, settings: DataBenchSettings, device: torch.device | None = None
) -> Iterator[int]:
    """Whole batches of the training stream in host memory; yields the bytes of a sample."""
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


def with_ratios(rates: Mapping[str, list[float]]) -> list[Row]:
    """A row for each method, with its rate over the peer's: the median over rounds of the quotient within the round."""
    return [
        {"method": name, "per_s": spread(own), "ratio": median(a / b for a, b in zip(own, rates[PEER]))}
        for name, own in rates.items()
    ]


# ---- how the record is shown ----


def _rate(value: float) -> str:
    return f"{value:,.0f}"


COLUMNS = (
    Column("what", "kind", words=True),
    Column("source", "side"),
    Column("method", "method", words=True),
    Column("samples/s", "per_s.median", _rate),
    Column("min-max", "per_s", extent(_rate)),
    Column(f"to {PEER}", "ratio", "{:.2f}".format),
    Column("bytes a sample", "bytes", "{:,}".format),
    Column("off exact, /255", "difference", "{:.1f}".format),
)


def title(record: Row) -> str:
    return f"data path on {processor(record)}: samples a second (decode: of one core)"


def targets(record: Row) -> list[str]:
    """Does the data path give as many samples as the model takes; and what was left out."""
    lines = [f"{name} was not measured: {why}" for name, why in record["skipped"].items()]
    streams = [row for row in record["rows"] if row["kind"] == "stream" and row["method"] != PEER]
    for step in (row for row in record["rows"] if row["kind"] == "step"):
        need = step["per_s"]["median"]
        for row in streams:
            gives = row["per_s"]["median"]
            share = f"{gives:,.0f} samples/s, {gives / need:.2f} of the {need:,.0f} that {step['method']} takes"
            where = f"{row['side']}-pixel sources, {row['method']}, {record['settings']['workers']} workers"
            lines.append(f"{where}: {share}")
    return lines


def panels(record: Row) -> list[Curves | Bars]:
    """Rates of one core and of the whole path, by source size."""
    found: list[Curves | Bars] = []
    for kind, heading in TITLES.items():
        rates = {
            (row["side"], row["method"]): tuple(row["per_s"][part] for part in ("median", "min", "max"))
            for row in record["rows"]
            if row["kind"] == kind
        }
        sides, methods = dict.fromkeys(side for side, _ in rates), dict.fromkeys(method for _, method in rates)
        workers = f", {record['settings']['workers']} workers" if kind == "stream" else ""
        series = {method: [rates.get((side, method)) for side in sides] for method in methods}
        if series:
            found.append(Bars(f"{heading}{workers}: samples/s by pixels a side", [str(side) for side in sides], series))
    return found


BENCHMARKS = {"data": Benchmark(title, lambda _: COLUMNS, lambda _: [], targets, panels, groups=("kind", "side"))}
