"""Reads ObjectNet as it is published: objectnet-1.0/images/FOLDER and objectnet-1.0/mappings (Barbu et al. 2019).

Only the 113 classes that ImageNet has too are scored, and the red border of every picture is cut off, as in CLIP's paper.
"""

from pathlib import Path

from clipscale import files
from clipscale.errors import UserError
from clipscale.eval.sets import prompts
from clipscale.eval.sets.folders import is_image
from clipscale.eval.sets.item import CLASSIFICATION, EvalSet, ImageRef

BORDER = 2
"""Pixels of the border: one is red, and JPEG-like scaling has coloured the next."""
_FOLDERS, _OVERLAP = "folder_to_objectnet_label.json", "objectnet_to_imagenet_1k.json"


def found(root: Path) -> bool:
    """Whether `root` is ObjectNet, its archive's folder, or the pictures in it. Its folder names alone tell it too."""
    return _parts(root) is not None


def load(root: Path) -> EvalSet:
    """ObjectNet's pictures of classes that are in ImageNet; a class is named by its label in lower case. Raises UserError."""
    parts = _parts(root)
    assert parts is not None
    images_folder, mappings = parts
    try:
        label_of_folder = files.read_json(mappings / _FOLDERS)
        overlap = files.read_json(mappings / _OVERLAP)
        folders = sorted(folder for folder, label in label_of_folder.items() if label in overlap and is_name(folder))
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


def is_name(folder: str) -> bool:
    """Whether it names a folder right below another."""
    return "/" not in folder and folder not in ("", ".", "..")


def _parts(root: Path) -> tuple[Path, Path] | None:
    """The folders of pictures and of mappings."""
    for base in (root, root / "objectnet-1.0", root.parent):
        if base is not root.parent or root.name == "images":
            mappings = next((m for m in (base / "mappings", base) if (m / _OVERLAP).is_file()), None)
            if mappings is not None and (base / "images").is_dir():
                return base / "images", mappings
    return None
