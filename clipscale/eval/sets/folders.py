"""Reads class folders. Their names are class names only where they have words; codes need a file of names."""

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from open_clip import IMAGENET_CLASSNAMES
from timm.data import ImageNetInfo

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.text import counted
from clipscale.data.sample import IMAGE_TYPES
from clipscale.eval.classification import ClassificationSet
from clipscale.eval.sets import prompts
from clipscale.eval.sets.item import ImageRef, by_reason, warn_once
from clipscale.eval.sets.prompts import CLASSNAMES

_WNID = re.compile(r"n\d{8}")
# A number or WordNet id before a name, as in `001.Black_footed_Albatross`, `0_cat` and `n02085620-Chihuahua`.
_NUMBER = re.compile(r"(\d+|n\d{8})\s*[._-]+\s*(?=\D)")
# A name that is never a class name: a number, a WordNet id, a hash.
_CODE = re.compile(r"\d+|n\d{8}|(?=\D*\d)[\da-f-]{16,}")
# What makes a name readable: two letters in a row, or no digit at all.
_WORD = re.compile(r"[^\W\d_]{2}|^\D*[^\W\d_]\D*$")


def has_class_folders(root: Path) -> bool:
    return any(is_image(file) for folder in files.folders(root) for file in files.visible_entries(folder))


def is_image(file: Path) -> bool:
    """Whether a file has the suffix of a picture."""
    return file.suffix.lower().removeprefix(".") in IMAGE_TYPES


def load(root: Path) -> ClassificationSet:
    """Load a set of class folders. Labels follow the alphabetical order; if every name is a number, it is the label.

    Class names come from the first of these: classnames.txt, WordNet ids as in ImageNet, the numbers of ImageNet-v2,
    the folders' own names. Raises UserError for folders with codes as names.
    """
    folders = [folder.name for folder in files.folders(root)]
    numbers = all(folder.isdecimal() for folder in folders)
    label_of = {folder: int(folder) if numbers else number for number, folder in enumerate(folders)}
    names = _classnames(root, folders, numbers=numbers)
    if max(label_of.values()) >= len(names) or (not numbers and len(names) != len(folders)):
        raise UserError(
            f"eval.sets: {root} has {len(folders)} class folders, labels up to {max(label_of.values())}, but "
            f"{len(names)} lines in {CLASSNAMES}"
        )
    folders.sort(key=label_of.__getitem__)
    inside = [file for folder in folders for file in files.visible_entries(root / folder)]
    images = [file for file in inside if is_image(file)]
    if others := Counter(file.suffix or "without a suffix" for file in inside if not is_image(file)):
        warn_once(f"eval.sets: {root}: not read in the class folders: {by_reason(others)}")
    with_images = {file.parent.name for file in images}
    empty = [folder for folder in folders if folder not in with_images]
    if empty:
        warn_once(f"eval.sets: {root}: {counted(len(empty), 'class')} without a picture, such as {empty[0]!r}")
    return ClassificationSet(
        name=root.name,
        path=root,
        images=[ImageRef(file) for file in images],
        answers=[label_of[file.parent.name] for file in images],
        classnames=names,
        templates=prompts.templates(root, imagenet=all(map(_WNID.fullmatch, folders))),
    )


def _classnames(root: Path, folders: Sequence[str], *, numbers: bool) -> list[str]:
    """The class names of a set of folders, by label. Raises UserError where nothing says what the folders mean."""
    if not (root / CLASSNAMES).is_file() and all(map(_WNID.fullmatch, folders)):
        return _names_of_wnids(root, folders)
    names = prompts.classnames(root, numbers=numbers)
    if names:
        return names
    if len(folders) < 2:
        raise UserError(
            f"eval.sets: {root} has one folder of pictures, {', '.join(folders)}, which is not a set of classes; give "
            "the folder with the classes, or make shards of pictures with texts: clipscale data pack "
            f"{shlex.quote(str(root))} out=DIR"
        )
    names = _without_numbers(root, folders)
    if reason := _no_names(names):
        order = "line N + 1 names folder N" if numbers else "in the alphabetical order of the folders"
        raise UserError(
            f"eval.sets: {root} has class folders such as {reason}; write one class name a line into "
            f"{root / CLASSNAMES} ({order}), or name ImageNet-v2's folder imagenetv2"
        )
    return [name.replace("_", " ") for name in names]


def _without_numbers(root: Path, folders: Sequence[str]) -> list[str]:
    """The names without the numbers before them, if each folder has its own number. A line tells the user."""
    numbers = [match[0] for match in map(_NUMBER.match, folders) if match]
    names = [_NUMBER.sub("", folder, count=1) for folder in folders]
    if not len(set(numbers)) == len(set(names)) == len(folders):
        return list(folders)
    warn_once(f"eval.sets: {root}: class names without the numbers before them, as {names[0]!r} of {folders[0]!r}")
    return names


def _no_names(names: Sequence[str]) -> str:
    """For names that are codes: an example, and why. Empty for class names.

    Some class names may have no word, such as `A320` beside `Cessna 172`. Names that differ only in their numbers, such
    as `class_01`, are codes.
    """
    codes = [name for name in names if _CODE.fullmatch(name)]
    wordless = [name for name in names if not _WORD.search(name)]
    if codes or len(wordless) == len(names):
        return f"{(codes or wordless)[0]!r}, which say no class"
    if len({re.sub(r"\d+", "", name) for name in names}) == 1:
        return f"{names[0]!r}, which differ in their numbers alone and say no class"
    return ""


def _names_of_wnids(root: Path, wnids: Sequence[str]) -> list[str]:
    """ImageNet's class names of WordNet ids. Raises UserError for others than its own."""
    order = {wnid: index for index, wnid in enumerate(ImageNetInfo().label_names())}
    unknown = [wnid for wnid in wnids if wnid not in order]
    if unknown:
        raise UserError(
            f"eval.sets: {root / unknown[0]} is not a class of ImageNet-1k; write the names into {CLASSNAMES}"
        )
    return [IMAGENET_CLASSNAMES[order[wnid]] for wnid in wnids]
