"""`clipscale data pack`: makes shards of pictures and captions that lie in files, tables or folders.

The source is only read. The shards are made in parts of SHARD_SAMPLES pairs, each by a process. A part that is complete
has a note in DIR/parts, so that a stopped command can go on.
"""

import io
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path, PurePath
from types import TracebackType
from typing import Literal, TypedDict

import numpy as np
from PIL import Image

from clipscale.common import files
from clipscale.common.cpu import cores
from clipscale.common.errors import UserError
from clipscale.common.process_pool import spawned_pool
from clipscale.common.terminal import print_line, show_task, tracked
from clipscale.common.text import counted
from clipscale.common.units import format_bytes
from clipscale.config.setting import differences
from clipscale.data.hashing import hash64, utf8
from clipscale.data.picture import MAX_PIXELS, Picture
from clipscale.data.sample import MAX_TEXT_BYTES, BrokenSampleError, text_of, visible_text
from clipscale.data.shards import index
from clipscale.data.shards.writer import ShardWriter, shard_writer
from clipscale.eval.sets.known import HELD_OUT
from clipscale.tools.data.pack.kinds import OTHER_PICTURES, suffix_of
from clipscale.tools.data.pack.pairs import (
    SPLIT,
    TEXTS,
    Pair,
    pairs_of,
    pictures_beside,
    removing_named_pictures,
    tables_of,
)
from clipscale.tools.data.pack.places import ADDRESS, read, resolved_root
from clipscale.tools.data.pack.tables import CAPTION_LIST, TABLES, conversion_command
from clipscale.tools.data.settings import PackSettings

SHARD_SAMPLES = 10_000
SHARD_BYTES = 10**9
# The content of shards -> their folder in DIR.
PARTS: dict[Literal["pairs", "held-out pairs"], str] = {"pairs": "", "held-out pairs": "holdout"}
# How the names of published caption files begin: COCO's, and Karpathy's.
PUBLISHED = ("captions_", "dataset_")
# Names of folders that hold a set's splits, which are kept apart.
SPLITS = {"train", *HELD_OUT}
# JPEG quality of resized pictures.
QUALITY = 95
# Most rows or columns of a JPEG that libjpeg writes.
MAX_JPEG_SIDE = 65_500
# Reason why something is left out -> the remedy.
REMEDIES = {
    "unreadable_file": "paths are relative to the table, or else to root=DIR",
    "bad_json": "a line is one object of JSON, {...}",
    "bad_row": "a row has as many values as the header, and quotes around those with separators",
    "outside_root": "files and links may not lead out of the source's folder, but root=DIR names a larger one",
    "not_in_images": "annotations have its image_id, and `images` has no such id",
    "windows_path": "write paths with / and relative to the table",
    "caption_not_utf8": "iconv -f CP1252 -t UTF-8 converts a text",
    "huge_image": "resize=512 makes those of up to 178 million pixels smaller",
    ".tar": "shards are trained on as they are, data.train=FOLDER",
    ".html": "a page, where a picture was expected",
    **dict.fromkeys(TABLES, "a table is a source of its own, clipscale data pack TABLE"),
    **dict.fromkeys(OTHER_PICTURES, "convert them to JPEG or PNG"),
}
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


def main(words: Sequence[str], settings: PackSettings) -> int:
    """Pack the source; print what was packed and what was left out. Raises UserError."""
    if len(words) != 1:
        raise UserError("give one source, as in: clipscale data pack captions.csv out=/data/mine")
    if not settings.out:
        raise UserError("out is not set; give the folder of the shards, out=DIR")
    path = Path(words[0]).expanduser().absolute()
    if not path.exists():
        raise UserError(f"{words[0]}: there is no such file or folder")
    with files.damage_to_user_error("table", path, "repair it, or fetch it again"):
        tables = tables_of(path, settings.columns, settings.holdout.by)
    splits = [folder.name for folder in files.folders(path) if folder.name in SPLITS] if path.is_dir() else []
    if len(splits) > 1:
        print_line(f"{', '.join(splits)} become one set; pack each of them by itself to keep them apart")
    if tables:
        print_line(f"columns: {', '.join(tables[0].columns)}")
    for remark in dict.fromkeys(remark for table in tables for remark in table.remarks):
        print_line(remark)
    root = resolved_root(settings.root) if settings.root else ""
    columns = [table.columns for table in tables]
    is_new = not Path(settings.out).expanduser().exists()
    out = prepare_folder(path, settings.out, asdict(settings) | {"root": root, "columns": columns})
    try:
        without_row = pictures_beside(path, tables)
        pairs = removing_named_pictures(pairs_of(path, tables, root, settings.splits), without_row)
        notes = pack_parts(pairs, settings, out)
        pictures = "files" if path.is_dir() else "images"
        report(path, out, notes, "rows" if tables else pictures, sorted(without_row))
    except UserError:
        remove_empty(out, is_new=is_new)
        raise
    if settings.holdout.fraction and not any(note["held-out pairs"] for note in notes):
        together = f"equal {settings.holdout.by}" if settings.holdout.by else "the same picture"
        print_line(
            f"warning: holdout={settings.holdout.share}: no pair is held out; pairs with {together} stay together, "
            "and the share is met by chance: give a larger one, and a new out=",
            error=True,
        )
    return 0


def report(source: Path, out: Path, notes: Sequence[PartNote], read_units: str, without_row: Sequence[Path]) -> None:
    """Index the shards, and print what was read, packed and left out.

    `read_units`: the noun for what was read. `without_row`: pictures beside a table that it does not name.

    Raises UserError if there is no pair to train on.
    """
    left_out: dict[str, list[str]] = {}
    for note in notes:
        for reason, names in note["left_out"].items():
            left_out.setdefault(reason, []).extend(names)
    reasons = "; ".join(
        f"{len(names):,} {reason} (such as {names[0][:80]}{remedy(reason, left_out, source)})"
        for reason, names in left_out.items()
    )
    counts = [f"read {sum(note['read'] for note in notes):,} {read_units}: "]
    for side, folder in PARTS.items():
        sizes = {name: samples for note in notes for name, samples in note[side].items()}
        if not sizes and not folder:
            why = reasons or ("it has no rows" if read_units == "rows" else "it is empty")
            if not left_out.keys() & {*TEXTS}:
                why += class_folders_command(left_out.get("no_caption", []), source)
            raise UserError(f"{source}: no pair could be packed: {why}")
        if sizes:
            files.write_json(out / folder / "sizes.json", sizes)
            shards = [str(out / folder / name) for name in sizes]
            list(index.update_indexes(shards, workers=cores()))
            size = format_bytes(sum(Path(shard).stat().st_size for shard in shards))
            print_line(f"{sum(sizes.values()):,} {side} in {counted(len(shards), 'shard')} of {out / folder}, {size}")
            counts.append(f"{sum(sizes.values()):,} {'held out' if folder else 'packed'}, ")
    if reasons:
        print_line(f"left out: {reasons}; {out}/parts/*.json lists them")
    beside = ""
    if without_row:
        example = without_row[0].relative_to(source)
        beside = f"; {counted(len(without_row), 'picture')} of the folder without a row (such as {example})"
    print_line(f"{''.join(counts)}{sum(map(len, left_out.values())):,} left out{beside}")


def remedy(reason: str, left_out: dict[str, list[str]], source: Path) -> str:
    """The remedy where pairs or files were left out for this reason. `left_out`: reason -> names."""
    if reason.startswith(SPLIT):
        return f"; 'splits=[{reason.removeprefix(SPLIT)}]' packs them"
    if reason in TEXTS:
        return gathering_command(left_out[reason], left_out.get("no_caption", []), source)
    if reason == ".json" and (command := caption_file_command(left_out[reason], source)):
        return f"; its pictures are there: {command}"
    if reason == "unreadable_file" and ADDRESS.match(left_out[reason][0]):
        return "; an address that could not be fetched: check it, and the network"
    helps = REMEDIES.get(reason) or conversion_command(reason, source / left_out[reason][0])
    return f"; {helps}" if helps else ""


def caption_file_command(names: Sequence[str], folder: Path) -> str:
    """The command that packs the first of these files with COCO's or Karpathy's captions whose pictures are there.

    Empty if there is none.
    """
    for file in (folder / name for name in names if PurePath(name).name.startswith(PUBLISHED)):
        from clipscale.eval.sets import caption_files  # here: it loads torch

        with suppress(UserError):
            captions = {entry.name: entry.captions for entry in caption_files.entries(file) if not entry.defect}
            caption_files.with_images(file, captions)
            return f"clipscale data pack {shlex.quote(str(file))}"
    return ""


def class_folders_command(pictures: Sequence[str], folder: Path) -> str:
    """Advice about folders named after their classes, if these pictures without a text lie in some; else empty."""
    if not folder.is_dir() or len({PurePath(name).parent for name in pictures} - {PurePath()}) < 2:
        return ""
    return (
        f"; folders named after their classes are evaluated as they are, eval.sets={shlex.quote(str(folder))}, and are "
        "trained on with a text beside each picture (0.jpg, 0.txt)"
    )


def gathering_command(texts: Sequence[str], pictures: Sequence[str], folder: Path) -> str:
    """A command that puts texts from a folder of their own beside the pictures of their names; empty if none fits."""
    without = {PurePath(name).stem: PurePath(name).parent for name in pictures}
    for text in map(PurePath, texts):
        target = without.get(text.stem)
        if target is not None and target != text.parent:
            origin = text.parent
            while origin.name == target.name:  # its folders have the names of the pictures' folders
                origin = origin.parent
                target = target.parent
            copied = f"cp -r {shlex.quote(f'{folder / origin}/.')} {shlex.quote(str(folder / target))}"
            return f"; a text lies beside its picture: {copied}"
    return ""


def prepare_folder(source: Path, folder: str, settings: Mapping[str, object]) -> Path:
    """The folder of the shards: a new one, or one that the same command began. Raises UserError."""
    out = Path(folder).expanduser()
    note = out / "pack.json"
    with files.damage_to_user_error("out", out, "choose another folder"):
        out.mkdir(parents=True, exist_ok=True)  # before the source is listed, in which it may lie
        begun = {**settings, "out": "", "source": str(source), "changed": source.stat().st_mtime}
        if note.is_file():
            empty = not any(out.rglob("*.tar"))
            changes = differences(files.read_json(note), begun)
            if changes and not empty:
                others = ", ".join("the source's date" if name == "changed" else name for name in changes)
                raise UserError(
                    f"out={out}: was packed of another source, or with other settings ({others}); choose a new folder"
                )
            if empty:
                for note_of_part in out.glob("parts/*.json"):  # the files of the source may be others now
                    note_of_part.unlink()
        elif any(out.iterdir()):
            raise UserError(f"out={out}: exists and was not written by this command; choose a new folder")
        for name in ("parts", *PARTS.values()):
            (out / name).mkdir(parents=True, exist_ok=True)
        for unfinished in out.rglob(".*.tmp"):  # left by a killed command
            unfinished.unlink()
        files.write_json(note, begun)
    return out


def remove_empty(out: Path, *, is_new: bool) -> None:
    """Remove the empty folders of a refused command, and its note if no part has one. `is_new`: it has made `out`."""
    folders = [out / name for name in ("parts", *PARTS.values()) if name]
    for folder in folders:
        with suppress(OSError):  # the folder has other files
            folder.rmdir()
    if not any(folder.exists() for folder in folders):
        if not any(out.rglob("*.tar")):
            (out / "pack.json").unlink(missing_ok=True)
        if is_new:
            with suppress(OSError):
                out.rmdir()


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
