"""Reads caption files beside their images: COCO's annotations, and Karpathy's splits of COCO and Flickr."""

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.record import Record
from clipscale.eval.retrieval import RetrievalSet
from clipscale.eval.sets.item import ImageRef
from clipscale.eval.sets.prompts import stripped


def load(file: Path) -> RetrievalSet:
    """COCO's caption annotations, or Karpathy's split (images marked `test`). Raises UserError."""
    try:
        record = files.read_json(file)
        pairs = _karpathy(record) if "sentences" in record["images"][0] else _coco(record)
        captions_of = {name: stripped(texts) for name, texts in pairs}
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise UserError(f"eval.sets: {file} is neither COCO's caption JSON nor Karpathy's ({error!r})") from error
    answers = {name: texts for name, texts in captions_of.items() if texts}
    if not answers:
        raise UserError(f"eval.sets: {file} holds no image with captions in its test split")
    return RetrievalSet(
        name=file.stem, path=file, images=_images_beside(file, list(answers)), answers=list(answers.values())
    )


def _karpathy(record: Record) -> Iterator[tuple[str, list[str]]]:
    for image in record["images"]:
        if image["split"] == "test":
            name = PurePosixPath(image.get("filepath", "")) / image["filename"]
            yield str(name), [sentence["raw"] for sentence in image["sentences"]]


def _coco(record: Record) -> Iterator[tuple[str, list[str]]]:
    texts: dict[Any, list[str]] = {image["id"]: [] for image in record["images"]}
    for annotation in record["annotations"]:
        texts[annotation["image_id"]].append(annotation["caption"])
    for image in record["images"]:
        yield image["file_name"], texts[image["id"]]


def _images_beside(file: Path, names: Sequence[str]) -> list[ImageRef]:
    """The images that a caption file names: all in its folder, or in one below or beside that. Raises UserError."""
    for name in names:
        if name.startswith("/") or ".." in PurePosixPath(name).parts:
            raise UserError(f"eval.sets: {file} names {name!r}, which lies outside the set; fetch it again")
    leaves = [PurePosixPath(name).name for name in names]
    near = file.parent
    missing = names
    for folder in (near, *_folders(near), near.parent, *_folders(near.parent)):
        for paths in (names, leaves):
            absent = [path for path in paths if not (folder / path).is_file()]
            if not absent:
                return [ImageRef(folder / path) for path in paths]
            missing = min(missing, absent, key=len)
    raise UserError(
        f"eval.sets: {len(missing)} of {len(names)} images of {file} are missing, such as {missing[0]}; put them into "
        "one folder beside it"
    )


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())
