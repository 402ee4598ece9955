"""Prints what was read, packed and left out, and for each reason what helps."""

import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePath

from clipscale.common import files
from clipscale.common.cpu import cores
from clipscale.common.errors import UserError
from clipscale.common.terminal import print_line
from clipscale.common.text import counted
from clipscale.common.units import format_bytes
from clipscale.data.shards import index
from clipscale.tools.data.pack.pairs import SPLIT, TEXTS
from clipscale.tools.data.pack.parts import OTHER_PICTURES, PARTS, PartNote
from clipscale.tools.data.pack.places import ADDRESS
from clipscale.tools.data.pack.tables import TABLES, conversion_command

# How the names of published caption files begin: COCO's, and Karpathy's.
PUBLISHED = ("captions_", "dataset_")
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
