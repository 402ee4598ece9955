"""Reads pairs of pictures and captions as people have them: tables, folders of pictures, caption files."""

import os
import shlex
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.data.sample import IMAGE_TYPES
from clipscale.tools.data.pack.objects import json_object
from clipscale.tools.data.pack.places import Cell, Place
from clipscale.tools.data.pack.separated import Row
from clipscale.tools.data.pack.tables import TABLES, PairTable, conversion_command, open_table

# Hugging Face's imagefolder.
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
# Suffixes of a picture's text. If there are several texts, the first suffix is taken.
TEXTS = (".txt", ".caption")
# Beginning of the reason why an image of another split is left out.
SPLIT = "split_"


class Pair(NamedTuple):
    """A picture that is not read yet, and its captions."""

    # The picture's name in the source.
    name: str
    place: Place | Cell
    captions: list[str]
    # The other columns: texts, numbers and lists, such as hard negatives.
    fields: Row
    # The file of its caption.
    text: Place | None = None
    # Why the pair cannot be used; empty if nothing is known against it.
    broken: str = ""
    # Pairs of one group are held out together. Empty: pairs with the same picture are.
    group: str = ""


def tables_of(path: Path, columns: list[str] | None, by: str | None = None) -> list[PairTable]:
    """The tables of a source: the file itself, or those in a folder. COCO's captions and a folder of texts have none.

    `columns`: the picture's, then the captions'; None: the usual names. `by`: the column that `holdout.by` names.
    Raises UserError, OSError, ValueError.
    """
    if path.is_dir():
        listed = visible_files(path)
        # one of each folder, which may have the same pairs in several forms
        tables = [*{file.parent: file for file in listed if file.name in METADATA}.values()]
        tables = tables or [file for file in listed if file.suffix == ".parquet"]
    elif path.suffix.lower() in TABLES:
        tables = [] if path.suffix == ".json" and is_coco(path) else [path]
    else:
        shard = "; shards are trained on as they are, data.train=FOLDER" if ".tar" in path.name else ""
        help = shard or f"; {conversion_command(path.suffix.lower(), path)}".rstrip("; ")
        raise UserError(f"{path}: give a folder, a table ({', '.join(TABLES)}) or COCO's captions (.json){help}")
    if by and not tables:
        raise UserError(
            f"holdout.by={by}: {path} has no columns; leave it out, and pictures of the same bytes stay together"
        )
    return [open_table(file, columns, by) for file in tables]


def is_coco(file: Path) -> bool:
    """Whether the file is one object in JSON with COCO's keys or Karpathy's."""
    document = json_object(file)
    return document is not None and "images" in document and not {"annotations", "dataset"}.isdisjoint(document)


def pairs_of(path: Path, tables: Sequence[PairTable], root: str, splits: Sequence[str] = ("train",)) -> Iterator[Pair]:
    """The pairs of a source with these tables.

    `root`: links and tables may name files below it; empty: below their own folder. `splits`: which of Karpathy's
    splits are packed. Raises UserError for a file that cannot be read to its end.
    """
    if tables:
        return (pair for table in tables for pair in pairs_of_table(table, root))
    return pairs_of_folder(path, root) if path.is_dir() else pairs_of_coco(path, root, splits)


def pairs_of_folder(folder: Path, root: str) -> Iterator[Pair]:
    """Yield the pictures in and below a folder, with their texts. Then the other files: their suffix is the reason why
    they are left out."""
    listed = visible_files(folder)
    pictures = [path for path in listed if path.suffix[1:].lower() in IMAGE_TYPES]
    texts = [path for path in listed if path.suffix.lower() in TEXTS]
    beside = {path.with_suffix(""): path for path in sorted(texts, key=lambda path: -TEXTS.index(path.suffix.lower()))}
    base = Place("", "", root or str(folder.resolve()))
    used: set[Path] = set()
    for path in pictures:
        text = beside.get(path.with_suffix("")) or beside.get(path)  # NAME.txt, NAME.jpg.txt
        caption = base._replace(name=str(text)) if text else None
        used.update([text] if text else [])
        yield Pair(str(path.relative_to(folder)), base._replace(name=str(path)), [], {}, caption)
    others = set(listed).difference(pictures, used)
    names = {name for path in others.difference(texts) for name in (path, path.with_suffix(""))}
    for path in sorted(others):
        reason = "linked_folder" if path.is_dir() else path.suffix.lower() or "no_suffix"
        if reason not in TEXTS or path.with_suffix("") not in names:
            yield Pair(str(path.relative_to(folder)), base, [], {}, broken=reason)


def pairs_of_coco(file: Path, root: str, splits: Sequence[str]) -> Iterator[Pair]:
    """Yield COCO's caption annotations, or these of Karpathy's splits, with the pictures in a folder beside the file.

    Then what is left out: images of Karpathy's other splits, by the split, and those that only annotations name.
    """
    from clipscale.eval.sets import caption_files  # here: it loads torch

    try:
        entries = caption_files.entries(file)
        chosen: dict[str, list[str]] = {}
        for entry in entries:
            if entry.split in ("", *splits) and not entry.defect:
                chosen.setdefault(entry.name, []).extend(entry.captions)
        if not chosen:
            there = ",".join(dict.fromkeys(entry.split for entry in entries))
            raise UserError(f"{file} has no image of the splits {', '.join(splits)}; choose among 'splits=[{there}]'")
        loaded = caption_files.with_images(file, chosen, remedy=lambda folder: beside_images(file, folder))
    except UserError as error:
        raise UserError(str(error).removeprefix("eval.sets: ")) from error
    root = root or str(file.parent.parent.resolve())
    for image, texts in zip(loaded.images, loaded.answers):
        yield Pair(image.path.name, Place(str(image.path), "", root), [*texts], {})
    for entry in entries:
        if defect := entry.defect or (f"{SPLIT}{entry.split}" if entry.split not in ("", *splits) else ""):
            yield Pair(entry.name, Place("", "", root), [], {}, broken=defect)


def beside_images(file: Path, folder: Path) -> str:
    """What decides where two folders have a caption file's images: a folder with the file is taken before others."""
    copied = f"cp {shlex.quote(str(file))} {shlex.quote(str(folder))}/"
    return f"put all into one folder, or pack a copy of the file beside those you mean: {copied}"


def pairs_of_table(table: PairTable, root: str) -> Iterator[Pair]:
    """The pairs of a table's rows."""
    image, *texts = table.columns
    folder = table.file.parent
    base = Place("", str(folder), root or str(folder.resolve()))
    with files.damage_to_user_error("table", table.file, "repair it, or fetch it again"):
        for number, row in table.rows():
            values = row or {}
            cells = [values.get(key) for key in texts]
            items = chain.from_iterable(cell if isinstance(cell, list) else [cell] for cell in cells)
            captions = [item for item in items if isinstance(item, str)]
            fields = {key: value for key, value in values.items() if key not in table.columns and is_plain(value)}
            place = values.get(image)
            value = values.get(table.by)
            group = str(value) if value or value == 0 else ""
            pair = Pair(f"{table.file.name}:{number}", base, captions, fields, group=group)
            if isinstance(place, Cell):
                yield pair._replace(place=place._replace(base=base))
            elif isinstance(place, str) and place.strip():
                yield pair._replace(name=place.strip(), place=base._replace(name=place.strip()))
            else:
                bad = "bad_json" if "json" in table.file.suffix else "bad_row"
                yield pair._replace(broken=bad if row is None else "no_image")


def pictures_beside(path: Path, tables: Sequence[PairTable]) -> set[Path]:
    """The pictures of a folder that METADATA tables describe; none for other sources."""
    if not (path.is_dir() and tables and tables[0].file.name in METADATA):
        return set()
    return {file for file in visible_files(path) if file.suffix[1:].lower() in IMAGE_TYPES}


def removing_named_pictures(pairs: Iterator[Pair], pictures: set[Path]) -> Iterator[Pair]:
    """The pairs. The pictures that they name are taken out of the set; all, if pictures lie inside of a table."""
    for pair in pairs:
        if isinstance(pair.place, Cell):
            pictures.clear()
        else:
            name = pair.place.name.replace("\\", "/")
            bases = (pair.place.folder, pair.place.root)
            pictures.difference_update([Path(os.path.normpath(Path(base, name))) for base in bases])
        yield pair


def is_plain(value: object, levels: int = 3) -> bool:
    """Whether a value is a text, a number, or a list of them, of a few levels: deeper lists cannot be pickled."""
    if isinstance(value, list):
        return levels > 0 and all(is_plain(item, levels - 1) for item in value)
    return isinstance(value, str | int | float)


def visible_files(folder: Path) -> list[Path]:
    """The files in and below a folder, and the links to folders, which are not followed.

    Names that begin with a dot are left out.
    """
    paths = (path for path in folder.rglob("*") if "/." not in f"/{path.relative_to(folder)}")
    return sorted(path for path in paths if path.is_symlink() or not path.is_dir())
