"""Reads caption files beside their images: COCO's annotations, and Karpathy's splits of COCO and Flickr."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from clipscale.common.errors import UserError
from clipscale.eval.retrieval import RetrievalSet
from clipscale.eval.sets.item import ImageRef
from clipscale.eval.sets.prompts import stripped


def load(file: Path) -> RetrievalSet:
    """COCO's caption annotations, or Karpathy's split (images marked `test`). Raises UserError."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        captions_of = dict(_karpathy(record) if "sentences" in record["images"][0] else _coco(record))
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise UserError(f"eval.sets: {file} is neither COCO's caption JSON nor Karpathy's ({error!r})") from error
    captions_of = {name: texts for name, given in captions_of.items() if (texts := stripped(given))}
    if not captions_of:
        raise UserError(f"eval.sets: {file} holds no image with captions in its test split")
    images = _images_beside(file, list(captions_of))
    captions = [caption for texts in captions_of.values() for caption in texts]
    owner = [index for index, texts in enumerate(captions_of.values()) for _ in texts]
    return RetrievalSet(name=file.stem, path=file, images=images, captions=captions, owner=owner)


def _karpathy(record: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    for image in record["images"]:
        if image["split"] == "test":
            name = PurePosixPath(image.get("filepath", "")) / image["filename"]
            yield str(name), [sentence["raw"] for sentence in image["sentences"]]


def _coco(record: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    texts: dict[Any, list[str]] = {image["id"]: [] for image in record["images"]}
    for annotation in record["annotations"]:
        texts[annotation["image_id"]].append(annotation["caption"])
    for image in record["images"]:
        yield image["file_name"], texts[image["id"]]


def _images_beside(file: Path, names: Sequence[str]) -> list[ImageRef]:
    """The images that a caption file names: in its folder, or in one below or beside that. Raises UserError."""
    outside = [name for name in names if name.startswith("/") or ".." in PurePosixPath(name).parts]
    if outside:
        raise UserError(f"eval.sets: {file} names {outside[0]!r}, which lies outside the set; fetch it again")
    near = file.parent
    bases = [near, *_folders(near), near.parent, *_folders(near.parent)]
    last, images, missing = near, [], []
    for name in names:
        # nearly always in the folder of the image before
        places = ((base, base / path) for base in (last, *bases) for path in (name, PurePosixPath(name).name))
        base, place = next(((base, place) for base, place in places if place.is_file()), (last, None))
        if place is None:
            missing.append(name)
        else:
            last = base
            images.append(ImageRef(place))
    if missing:
        raise UserError(
            f"eval.sets: {len(missing)} of {len(names)} images of {file} are missing, such as {missing[0]}; put them "
            "into a folder beside it"
        )
    return images


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())
