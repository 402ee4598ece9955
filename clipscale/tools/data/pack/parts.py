"""Packs pairs in parts, each by a process: reads a pair's picture and captions, and writes them into a shard.

A part has SHARD_SAMPLES pairs. One that is complete has a note in DIR/parts, so that a stopped command can go on.
"""

import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Literal, TypedDict

import numpy as np
from PIL import Image

from clipscale.common import files
from clipscale.common.cpu import cores
from clipscale.common.process_pool import spawned_pool
from clipscale.common.terminal import show_task, tracked
from clipscale.data.content import kind_of
from clipscale.data.hashing import hash64, utf8
from clipscale.data.picture import MAX_PIXELS, Picture
from clipscale.data.sample import MAX_TEXT_BYTES, BrokenSampleError, text_of, visible_text
from clipscale.data.shards.writer import ShardWriter, shard_writer
from clipscale.tools.data.pack.pairs import Pair
from clipscale.tools.data.pack.places import read
from clipscale.tools.data.pack.tables import CAPTION_LIST
from clipscale.tools.data.settings import PackSettings

SHARD_SAMPLES = 10_000
SHARD_BYTES = 10**9
# The content of shards -> their folder in DIR.
PARTS: dict[Literal["pairs", "held-out pairs"], str] = {"pairs": "", "held-out pairs": "holdout"}
# JPEG quality of resized pictures.
QUALITY = 95
# Suffixes of pictures that training does not read, and of pages, which a table may name as pictures.
OTHER_PICTURES = (".tif", ".tiff", ".avif", ".heic", ".heif", ".jxl", ".jp2", ".psd", ".svg")
PAGES = (".html", ".pdf")
# Most rows or columns of a JPEG that libjpeg writes.
MAX_JPEG_SIDE = 65_500
# The words of pandas, R and databases for a missing text, and Excel's errors.
MISSING_VALUE = re.compile(
    r"nan|null|none|na|n/a|<na>|undefined|#(n/a|na|nv|ref!|value!|name\?|div/0!|null!|num!|bezug!|wert!|zahl!)",
    re.I,
)
# The note of a part. `read`: the number of its pairs. `pairs`, `held-out pairs`: shard -> its samples. `left_out`:
# reason -> names of pictures.
PartNote = TypedDict(
    "PartNote",
    {"read": int, "pairs": dict[str, int], "held-out pairs": dict[str, int], "left_out": dict[str, list[str]]},
)
# Chunks of the source, for each process, that are read ahead of the oldest part that is not yet written.
CHUNKS_AHEAD = 2


def pack_parts(pairs: Iterator[Pair], settings: PackSettings, out: Path) -> list[PartNote]:
    """Pack all parts that have no note yet. Returns all notes, in order. Raises UserError."""
    futures: list[Future[None]] = []
    ahead = CHUNKS_AHEAD * cores()
    with spawned_pool(cores()) as pool:
        while chunk := list(islice(pairs, SHARD_SAMPLES)):
            number = len(futures)
            show_task(f"packing, with pair {number * SHARD_SAMPLES + len(chunk):,} read")
            futures.append(pool.submit(pack_part, number * SHARD_SAMPLES, chunk, settings, note_file(out, number)))
            if number >= ahead:
                wait([futures[number - ahead]])  # chunks that are read too early would fill the memory
        for future in tracked(futures, f"packing parts of {SHARD_SAMPLES:,} pairs", len(futures)):
            future.result()
    return [files.read_json(note_file(out, number)) for number in range(len(futures))]


def note_file(out: Path, number: int) -> Path:
    return out / "parts" / f"{number:05d}.json"


def pack_part(first: int, pairs: Sequence[Pair], settings: PackSettings, file: Path) -> None:
    """Write a part's shards, and then its note, unless it is there. `first`: the number of its first pair."""
    if file.is_file():
        return
    left_out: dict[str, list[str]] = {}
    out = file.parent.parent
    with ExitStack() as stack:
        kept = stack.enter_context(Shards(out / PARTS["pairs"], file.stem))
        held = stack.enter_context(Shards(out / PARTS["held-out pairs"], file.stem))
        for number, pair in enumerate(pairs, first):
            try:
                captions = captions_of(pair)
                data = read(pair.place)
                sample = sample_of(number, pair, captions, data, settings.resize)
            except BrokenSampleError as error:
                left_out.setdefault(error.reason, []).append(pair.name)
                continue
            shards = held if held_out(pair, data, settings.holdout.fraction) else kept
            shards.write(sample)
    note: PartNote = {"read": len(pairs), "left_out": left_out, "pairs": kept.sizes, "held-out pairs": held.sizes}
    files.write_json(file, note)


def held_out(pair: Pair, data: bytes, fraction: float) -> bool:
    """Whether a pair is held out, by a hash of its group, or else of the picture's bytes.

    So pairs with the same group or picture are on one side, and other pairs of the source do not matter.
    """
    return hash64(pair.group or data) < fraction * 2**64


def captions_of(pair: Pair) -> list[str]:
    """The captions of a pair. Raises BrokenSampleError for a pair that is unusable for another reason than its
    picture."""
    if pair.broken or not is_text(pair.name):
        raise BrokenSampleError(pair.broken or "name_not_utf8")
    texts = [text_of(read(pair.text, MAX_TEXT_BYTES))] if pair.text else pair.captions
    texts = [text.replace("\0", "") for text in texts]  # a text that begins with them is read as UTF-16
    captions = [text for text in map(visible_text, texts) if text and not MISSING_VALUE.fullmatch(text)]
    if not captions:
        raise BrokenSampleError("no_caption")
    if not all(map(is_text, captions)):
        raise BrokenSampleError("caption_not_utf8")
    return captions


def sample_of(number: int, pair: Pair, captions: list[str], data: bytes, side: int | None) -> dict[str, str | bytes]:
    """A sample as `shard_writer` takes it. Its picture has been decoded once. Raises BrokenSampleError."""
    try:
        picture = Picture.read(data, math.inf if side else MAX_PIXELS)
        pixels = picture.decode()
        if side:
            data = resized(pixels, side) if min(picture.width, picture.height) > side else data
            picture = Picture.read(data)  # a packed picture must be one that training takes
    except BrokenSampleError as error:
        raise BrokenSampleError(suffix_of(data) or error.reason, str(error)) from error
    fields = {"source": pair.name, "width": picture.width, "height": picture.height} | pair.fields
    if len(captions) > 1:
        fields[CAPTION_LIST] = captions
    text = json.dumps(fields, default=str).encode()
    return {"__key__": f"{number:09d}", picture.type: data, "txt": captions[0].encode(), "json": text}


def suffix_of(data: bytes) -> str:
    """The suffix of a page or of a picture of another kind, by its first bytes; empty for all else."""
    kind = kind_of(data)
    return kind.suffix if kind and kind.suffix in (*OTHER_PICTURES, *PAGES) else ""


def resized(pixels: np.ndarray, side: int) -> bytes:
    """A JPEG of a picture (H, W, 3) whose shorter side becomes `side`. Raises BrokenSampleError `huge_image`."""
    height, width = pixels.shape[:2]
    scale = side / min(width, height)
    size = round(width * scale), round(height * scale)
    if max(size) > MAX_JPEG_SIDE:
        raise BrokenSampleError("huge_image", f"{size[0]} x {size[1]} pixels, too long for a JPEG")
    encoded = io.BytesIO()
    Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).save(encoded, "JPEG", quality=QUALITY)
    return encoded.getvalue()


def is_text(text: str) -> bool:
    """Whether a text has neither zeros nor lone surrogates, which stand for bytes that are not UTF-8."""
    return "\0" not in text and utf8(text) == text


class Shards:
    """Shards of one folder, NAME.tar, NAME_1.tar ..., each of at most about SHARD_BYTES."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._open = ExitStack()
        # The shard that is being written, its writer, and its bytes. None before the first sample.
        self._shard = ""
        self._writer: ShardWriter | None = None
        self._bytes = 0
        # Shard -> its samples.
        self.sizes: dict[str, int] = {}

    def __enter__(self) -> "Shards":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def write(self, sample: Mapping[str, str | bytes]) -> None:
        if self._writer is None or self._bytes >= SHARD_BYTES:
            self._writer = self._begin()
        self._writer.write(sample)
        self.sizes[self._shard] += 1
        self._bytes += sum(map(len, sample.values()))

    def _begin(self) -> ShardWriter:
        """End the shard that is being written, and begin another one. Returns its writer."""
        self._open.close()
        self._shard = f"{self._name}_{len(self.sizes)}.tar" if self.sizes else f"{self._name}.tar"
        self.sizes[self._shard] = 0
        self._bytes = 0
        return self._open.enter_context(shard_writer(self._folder / self._shard))
