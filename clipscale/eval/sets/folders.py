"""Reads class folders, in a folder or in an archive, and ObjectNet's (objectnet-1.0/images and mappings, Barbu et al. 2019).

A folder's name is a class name only where it reads as one; codes need a file of names.
"""

import re
from collections.abc import Sequence
from pathlib import Path, PurePath, PurePosixPath

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.eval.sets import prompts
from clipscale.eval.sets.archives import contents
from clipscale.eval.sets.item import CLASSIFICATION, IMAGE_SUFFIXES, EvalSet, ImageRef
from clipscale.eval.sets.prompts import CLASSNAMES

_WNID = re.compile(r"n\d{8}")
_SPLITS = {"train", "training", "val", "valid", "validation", "test", "images", "image", "img", "data"}
"""Names of folders that hold parts of a set, not classes."""
BORDER = 2
"""Pixels of the border: one is red, and JPEG-like scaling has coloured the next."""
_LABELS, _OVERLAP = "folder_to_objectnet_label.json", "objectnet_to_imagenet_1k.json"


def found(root: Path) -> bool:
    """Whether `root` holds folders with images."""
    return any(is_image(file) for folder in root.iterdir() if folder.is_dir() for file in folder.iterdir())


def is_image(file: PurePath) -> bool:
    return file.suffix.lower().removeprefix(".") in IMAGE_SUFFIXES


def load(root: Path, published: Sequence[str] = ()) -> EvalSet:
    """A set of class folders. Their order is alphabetical, or numeric where every name is a number: then it is the label.

    Names come from classnames.txt, else from WordNet ids as in ImageNet, else ImageNet's for the numbers of ImageNet-v2, else from the
    folders themselves. Raises UserError for folders whose names are codes. `published`: the names of the published set, for numbers.
    """
    pictures = _pictures(root)
    folders = sorted(pictures)
    numbers = all(folder.isdecimal() for folder in folders)
    label_of = {folder: int(folder) if numbers else place for place, folder in enumerate(folders)}
    names = classnames(root, folders, published if numbers else (), numbers=numbers)
    beyond = [folder for folder, label in label_of.items() if label >= len(names)]
    if beyond or (not numbers and len(names) != len(folders)):
        raise UserError(
            f"eval.sets: {root} has {len(folders)} class folders"
            + (f", of which {beyond[0]} is beyond the" if numbers else " but")
            + f" {len(names)} lines in {CLASSNAMES}"
        )
    folders.sort(key=label_of.__getitem__)
    images = [image for folder in folders for image in pictures[folder]]
    labels = [label_of[folder] for folder in folders for _ in pictures[folder]]
    wnids = all(_WNID.fullmatch(folder) for folder in folders)
    own = (root / prompts.TEMPLATES).is_file()
    texts = prompts.imagenet_templates() if wnids and not own else prompts.templates(root)
    return EvalSet(root.name, root, CLASSIFICATION, images, labels, names, texts)


def _pictures(root: Path) -> dict[str, list[ImageRef]]:
    """The images of each class folder, by name."""
    if root.is_dir():
        folders = [folder for folder in root.iterdir() if folder.is_dir()]
        return {one.name: [ImageRef(file) for file in sorted(one.iterdir()) if is_image(file)] for one in folders}
    found: dict[str, list[tuple[str, ImageRef]]] = {}
    for name, image in contents(root).items():
        path = PurePosixPath(name)
        if is_image(path):
            found.setdefault(path.parent.name, []).append((path.name, image))
    if not found:
        raise UserError(f"eval.sets: {root} holds no image ({', '.join(IMAGE_SUFFIXES)}); fetch it again")
    return {folder: [image for _, image in sorted(found[folder])] for folder in found}


def classnames(root: Path, folders: Sequence[str], published: Sequence[str], *, numbers: bool) -> list[str]:
    """The class names of a set of folders, by label. Raises UserError where nothing says what the folders mean."""
    if not (root / CLASSNAMES).is_file() and all(_WNID.fullmatch(name) for name in folders):
        return names_of_wnids(root, folders)
    if names := prompts.classnames(root, published, numbers=numbers):
        return names
    if len(folders) < 2 or _SPLITS.issuperset(name.lower() for name in folders):
        raise UserError(
            f"eval.sets: {root} has no class folders but {', '.join(folders)}; give the folder that holds one folder a class"
        )
    codes = [name for name in folders if not re.fullmatch(r"[^\W\d][^\d]+", name)]
    if codes:
        order = "line N + 1 names folder N" if numbers else "in the alphabetical order of the folders"
        raise UserError(
            f"eval.sets: {root} has class folders such as {codes[0]!r}, which say no class; write one class name a line into "
            f"{root / CLASSNAMES} ({order}), or name ImageNet-v2's folder imagenetv2"
        )
    return [name.replace("_", " ") for name in folders]


def names_of_wnids(root: Path, wnids: Sequence[str]) -> list[str]:
    """ImageNet's class names of WordNet ids. Raises UserError for others than its own."""
    from timm.data import ImageNetInfo

    order = {wnid: index for index, wnid in enumerate(ImageNetInfo().label_names())}
    unknown = [wnid for wnid in wnids if wnid not in order]
    if unknown:
        raise UserError(
            f"eval.sets: {root / unknown[0]} is no class of ImageNet-1k; write the class names into {CLASSNAMES}"
        )
    names = prompts.imagenet_classnames()
    return [names[order[wnid]] for wnid in wnids]


def is_objectnet(root: Path) -> bool:
    """Whether `root` is ObjectNet, its archive's folder, or the pictures in it. Its folder names alone tell it too."""
    return _objectnet_parts(root) is not None


def load_objectnet(root: Path) -> EvalSet:
    """The pictures of ObjectNet's classes that ImageNet has, named by their labels in lower case. Raises UserError.

    The red border of every picture is cut off, as in CLIP's paper.
    """
    parts = _objectnet_parts(root)
    assert parts is not None
    images_folder, mappings = parts
    try:
        label_of_folder = files.read_json(mappings / _LABELS)
        overlap = files.read_json(mappings / _OVERLAP)
        folders = sorted(
            folder
            for folder, label in label_of_folder.items()
            if label in overlap and folder not in ("", "..") and folder == PurePosixPath(folder).name
        )
        names = [label_of_folder[folder].lower() for folder in folders]
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UserError(
            f"eval.sets: {root} is ObjectNet, but {mappings} cannot be used ({error}); unpack objectnet-1.0.zip whole"
        ) from error
    images, labels = [], []
    for label, folder in enumerate(folders):
        place = images_folder / folder
        pictures = sorted(file for file in place.iterdir() if is_image(file)) if place.is_dir() else []
        images += [ImageRef(file) for file in pictures]
        labels += [label] * len(pictures)
    if not images:
        raise UserError(f"eval.sets: {images_folder} holds no picture of ObjectNet's classes; unpack the archive again")
    own = (root / prompts.TEMPLATES).is_file()
    texts = prompts.templates(root) if own else prompts.imagenet_templates()
    return EvalSet("objectnet", root, CLASSIFICATION, images, labels, names, texts, border=BORDER)


def _objectnet_parts(root: Path) -> tuple[Path, Path] | None:
    """The folders of pictures and of mappings."""
    for base in (root, root / "objectnet-1.0", root.parent):
        if base is not root.parent or root.name == "images":
            mappings = next((m for m in (base / "mappings", base) if (m / _OVERLAP).is_file()), None)
            if mappings is not None and (base / "images").is_dir():
                return base / "images", mappings
    return None
