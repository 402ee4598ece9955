"""`clipscale data pack`: makes shards of pictures and captions that lie in files, tables or folders.

The source is only read. The shards are made in parts of SHARD_SAMPLES pairs, each by a process. A part that is complete
has a note in DIR/parts, so that a stopped command can go on.
"""

import io
import json
import math
import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Any

from PIL import Image

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.hardware import cores
from clipscale.common.record import Record
from clipscale.common.terminal import doing, say, tracked
from clipscale.common.units import counted, format_bytes
from clipscale.data.decode import Picture, text_of
from clipscale.data.sample import MAX_TEXT_BYTES, BrokenSampleError
from clipscale.data.shards import index
from clipscale.data.shards.addresses import digest, utf8
from clipscale.tools.data.pairs import Pair, pairs_of, tables_of
from clipscale.tools.data.places import read, resolved
from clipscale.tools.data.settings import PackSettings
from clipscale.tools.data.tables import TABLES

SHARD_SAMPLES = 10_000
SHARD_BYTES = 10**9
# The folders of the shards in DIR, by what is in them.
PARTS = {"pairs": "", "held-out pairs": "holdout"}
# Folders of sets that are kept apart.
SPLITS = {"train", "val", "valid", "validation", "test"}
# Of JPEGs that are resized.
QUALITY = 95
# What helps, by the reason.
REMEDIES = {
    "unreadable_file": "; paths are relative to the table, or else to root=DIR",
    "bad_json": "; a line is one object of JSON, {...}",
    "bad_row": "; a row has as many values as the header, and quotes around those with separators",
    "outside_root": "; root=DIR names the folder below which a table's files lie",
    "windows_path": "; write paths with / and relative to the table",
    "caption_not_utf8": "; iconv -f CP1252 -t UTF-8 converts a text",
    ".tar": "; shards are trained on as they are, data.train=FOLDER",
    **dict.fromkeys(TABLES, "; a table is a source of its own, clipscale data pack TABLE"),
}
# Of a part: for each folder its shards and their samples; `left_out`: for each reason the pictures.
Note = dict[str, Record]


def main(words: Sequence[str], settings: PackSettings) -> int:
    """Pack the source; print what was packed and what was left out. Raises UserError."""
    if len(words) != 1:
        raise UserError("give one source, as in: clipscale data pack captions.csv out=/data/mine")
    if not settings.out:
        raise UserError("out is not set; give the folder of the shards, out=DIR")
    path = Path(words[0]).expanduser().absolute()
    if not path.exists():
        raise UserError(f"{words[0]}: there is no such file or folder")
    with files.reported("table", path, "repair it, or fetch it again"):
        tables = tables_of(path, settings.columns)
    splits = [folder.name for folder in files.folders(path) if folder.name in SPLITS] if path.is_dir() else []
    if len(splits) > 1:
        say(f"{', '.join(splits)} become one set; pack each of them by itself to keep them apart")
    if tables:
        say(f"columns: {', '.join(tables[0].columns)}")
    root = resolved(settings.root) if settings.root else ""
    columns = [table.columns for table in tables]
    out = prepared(path, settings.out, asdict(settings) | {"root": root, "columns": columns})
    notes = packed(pairs_of(path, tables, root), settings, out)
    left_out: dict[str, list[str]] = {}
    for note in notes:
        for reason, names in note["left_out"].items():
            left_out.setdefault(reason, []).extend(names)
    reasons = [
        f"{len(names)} {reason} (such as {names[0][:80]}{REMEDIES.get(reason, '')})"
        for reason, names in left_out.items()
    ]
    for what, part in PARTS.items():
        sizes = {name: samples for note in notes for name, samples in note[what].items()}
        if not sizes and not part:
            raise UserError(f"{words[0]}: no pair could be packed: {'; '.join(reasons) or 'it is empty'}")
        if sizes:
            files.write_json(out / part / "sizes.json", sizes)
            shards = [str(out / part / name) for name in sizes]
            list(index.update_indexes(shards, workers=cores()))
            size = format_bytes(sum(Path(shard).stat().st_size for shard in shards))
            say(f"{sum(sizes.values()):,} {what} in {counted(len(shards), 'shard')} of {out / part}, {size}")
    if reasons:
        say(f"left out: {'; '.join(reasons)}")
    return 0


def prepared(source: Path, folder: str, settings: Record) -> Path:
    """The folder of the shards: a new one, or one that the same command began. Raises UserError."""
    out = Path(folder).expanduser()
    note = out / "pack.json"
    with files.reported("out", out, "choose another folder"):
        out.mkdir(parents=True, exist_ok=True)  # first: it may lie in the source
        begun = settings | {"out": "", "source": str(source), "changed": source.stat().st_mtime}
        if note.is_file():
            other = files.read_json(note) != begun
            if other and any(out.rglob("*.tar")):
                raise UserError(f"out={out}: was packed of another source, or with other settings; choose a new folder")
            for part in out.glob("parts/*.json") if other else ():  # of a command that could pack nothing
                part.unlink()
        elif any(out.iterdir()):
            raise UserError(f"out={out}: exists and was not written by this command; choose a new folder")
        for folder in ("parts", *PARTS.values()):
            (out / folder).mkdir(parents=True, exist_ok=True)
        for half in out.rglob(".*.tmp"):  # a killed command's
            half.unlink()
        files.write_json(note, begun)
    return out


def packed(pairs: Iterator[Pair], settings: PackSettings, out: Path) -> list[Note]:
    """Pack all parts that have no note yet. Returns all notes, in order. Raises UserError."""
    futures: dict[int, Future[None]] = {}
    # spawn: the caller may hold threads and locks
    with ProcessPoolExecutor(cores(), mp_context=multiprocessing.get_context("spawn")) as pool:
        while part := list(islice(pairs, SHARD_SAMPLES)):
            number = len(futures)
            doing(f"packing, with pair {number * SHARD_SAMPLES + len(part):,} read")
            futures[number] = pool.submit(pack_part, number * SHARD_SAMPLES, part, settings, note_file(out, number))
            if number >= 2 * cores():
                wait([futures[number - 2 * cores()]])
        for future in tracked(futures.values(), f"packing parts of {SHARD_SAMPLES:,} pairs", len(futures)):
            future.result()
    return [files.read_json(note_file(out, number)) for number in futures]


def note_file(out: Path, number: int) -> Path:
    return out / "parts" / f"{number:05d}.json"


def pack_part(first: int, pairs: Sequence[Pair], settings: PackSettings, file: Path) -> None:
    """Write a part's shards, and then its note, unless it is there. `first`: the number of its first pair."""
    if file.is_file():
        return
    note: Note = {"left_out": {}}
    for what, part in PARTS.items():
        chosen = [(n, pair) for n, pair in enumerate(pairs, first) if held_out(pair, settings.share) == bool(part)]
        folder = file.parent.parent / part
        note[what] = write_shards(folder, file.stem, usable(chosen, settings.resize, note["left_out"]))
    files.write_json(file, note)


def held_out(pair: Pair, share: float) -> bool:
    """By a hash of the picture's name: all pairs of a picture are on one side, whatever else the source holds."""
    return int(digest(pair.name), 16) < share * 2**64


def usable(pairs: Iterable[tuple[int, Pair]], side: int | None, left_out: dict[str, list[str]]) -> Iterator[Any]:
    """The samples of pairs that training can use. The names of the others go to their reason in `left_out`."""
    for number, pair in pairs:
        try:
            yield sample_of(number, pair, side)
        except BrokenSampleError as error:
            left_out.setdefault(error.reason, []).append(pair.name)


def sample_of(number: int, pair: Pair, side: int | None) -> Record:
    """A sample as webdataset's writer takes it. Its picture has been decoded once. Raises BrokenSampleError."""
    if pair.broken or not is_text(pair.name):
        raise BrokenSampleError(pair.broken or "name_not_utf8")
    texts = [text_of(read(pair.text, MAX_TEXT_BYTES))] if pair.text else pair.captions
    captions = [stripped for text in texts if (stripped := text.strip("\ufeff\x00 \t\r\n"))]
    if not captions:
        raise BrokenSampleError("no_caption")
    if not all(map(is_text, captions)):
        raise BrokenSampleError("caption_not_utf8")
    data = read(pair.place)
    picture = Picture(data, math.inf)
    pixels = picture.decode()
    kind = picture.type
    height, width = pixels.shape[:2]
    if side and min(width, height) > side:
        scale = side / min(width, height)
        width = round(width * scale)
        height = round(height * scale)
        encoded = io.BytesIO()
        Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC).save(encoded, "JPEG", quality=QUALITY)
        data = encoded.getvalue()
        kind = "jpg"
    fields: Record = pair.fields | {"source": pair.name, "width": width, "height": height}
    if len(captions) > 1:
        fields["captions"] = captions
    text = json.dumps(fields, default=str).encode()
    return {"__key__": f"{number:09d}", kind: data, "txt": captions[0].encode(), "json": text}


def is_text(text: str) -> bool:
    """False for zeros, and for lone surrogates, which stand for bytes that are not UTF-8."""
    return "\0" not in text and utf8(text) == text


def write_shards(folder: Path, name: str, samples: Iterator[Record]) -> dict[str, int]:
    """Write shards of at most about SHARD_BYTES. Returns the samples of each."""
    from clipscale.data.shards.writer import shard_writer  # here: webdataset loads torch

    sizes: dict[str, int] = {}
    while first := next(samples, None):
        shard = f"{name}_{len(sizes)}.tar" if sizes else f"{name}.tar"
        size = sizes[shard] = 0
        with shard_writer(folder / shard) as writer:
            for sample in chain([first], samples):
                writer.write(sample)
                sizes[shard] += 1
                size += sum(map(len, sample.values()))
                if size >= SHARD_BYTES:
                    break
    return sizes
