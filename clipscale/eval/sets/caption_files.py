"""Reads caption files beside their images: COCO's annotations, and Karpathy's splits of COCO and Flickr."""

import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.record import Record
from clipscale.common.text import counted
from clipscale.eval.retrieval import RetrievalSet
from clipscale.eval.sets.item import ImageRef, warn_once
from clipscale.eval.sets.prompts import stripped

# Names of the published caption files: COCO's and Karpathy's. Other programs' files have names like Karpathy's.
COCOS = "captions_*.json"
PUBLISHED = (COCOS, "dataset_*.json")
# Fault of an image that has COCO's annotations but is not among its images.
NOT_LISTED = "not_in_images"
# Name of an image -> its captions.
CaptionsByImage = Mapping[str, Sequence[str]]


class CaptionedImage(NamedTuple):
    """The entry of an image in a caption file."""

    name: str
    captions: Sequence[str]
    # Karpathy's split; empty: the file has no splits.
    split: str = ""
    # Why it cannot be used: NOT_LISTED, with the image's id as the name. Empty: it can.
    defect: str = ""


def load(file: Path) -> RetrievalSet:
    """COCO's caption annotations, or Karpathy's split (images marked `test`). Raises UserError."""
    return with_images(file, read(file))


def read(file: Path) -> CaptionsByImage:
    """The captions of the images to evaluate on, from a caption file. A line counts captions without an image.

    Raises UserError for another JSON.
    """
    listed = entries(file)
    if defective := [entry for entry in listed if entry.defect]:
        count = sum(len(entry.captions) for entry in defective)
        warn_once(
            f"eval.sets: {file}: {counted(count, 'caption')} left out, whose image is not in `images` "
            f"(such as image_id {defective[0].name})"
        )
    return {entry.name: entry.captions for entry in listed if entry.split in ("", "test") and not entry.defect}


def entries(file: Path) -> list[CaptionedImage]:
    """The entries of all images in a caption file. Raises UserError for another JSON."""
    try:
        record = files.read_json(file)
        listed = _karpathy(record) if "sentences" in record["images"][0] else _coco(record)
        return [entry._replace(captions=stripped(entry.captions)) for entry in listed]
    except (AttributeError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise UserError(f"eval.sets: {file} is neither COCO's caption JSON nor Karpathy's ({error!r})") from error


def caption_files(folder: Path) -> dict[Path, CaptionsByImage]:
    """The caption files of a folder, among its JSON files. Raises UserError for a damaged one of COCO's."""
    return _caption_files(file for file in files.visible_entries(folder) if file.suffix == ".json")


def published_files_below(folder: Path) -> dict[Path, CaptionsByImage]:
    """The caption files in the folders of a folder, among those with PUBLISHED names: other JSON there may be large.

    Raises UserError for a damaged one of COCO's.
    """
    return _caption_files(sorted(file for name in PUBLISHED for file in folder.glob(f"*/{name}")))


def _caption_files(candidates: Iterable[Path]) -> dict[Path, CaptionsByImage]:
    captions = {}
    for file in candidates:
        if file.is_file():
            try:
                captions[file] = read(file)
            except UserError as error:
                if file.match(COCOS):
                    raise UserError(f"{error}; fetch it again, or remove it from there") from error
    return captions


def choose_by_setting(folder: Path) -> str:
    """How to evaluate on the images of this one of several folders."""
    return f"give one of the two, as eval.sets={shlex.quote(str(folder))}"


def with_images(
    file: Path,
    captions: CaptionsByImage,
    folder: Path | None = None,
    *,
    remedy: Callable[[Path], str] = choose_by_setting,
) -> RetrievalSet:
    """The set of a caption file, with the images of `folder`, or of the one where they are. Raises UserError.

    `remedy`: what the error advises where several folders have as many of the images, from the first of them.
    """
    if not any(captions.values()):
        raise UserError(f"eval.sets: {file} holds no image with captions in its test split")
    return RetrievalSet(
        name=file.stem,
        path=file,
        images=[
            ImageRef(path, defect="" if texts else "no_caption")
            for path, texts in zip(_images_of(file, list(captions), folder, remedy), captions.values())
        ],
        answers=list(captions.values()),
    )


def _karpathy(record: Record) -> Iterator[CaptionedImage]:
    for image in record["images"]:
        name = PurePosixPath(image.get("filepath", "")) / image["filename"]
        yield CaptionedImage(str(name), [sentence["raw"] for sentence in image["sentences"]], str(image["split"]))


def _coco(record: Record) -> Iterator[CaptionedImage]:
    texts: dict[object, list[str]] = {image["id"]: [] for image in record["images"]}
    for annotation in record["annotations"]:
        texts.setdefault(annotation["image_id"], []).append(annotation["caption"])
    for image in record["images"]:
        yield CaptionedImage(image["file_name"], texts[image["id"]])
    listed = {image["id"] for image in record["images"]}
    for number, captions in texts.items():
        if number not in listed:
            yield CaptionedImage(str(number), captions, defect=NOT_LISTED)


def _images_of(file: Path, names: Sequence[str], folder: Path | None, remedy: Callable[[Path], str]) -> list[Path]:
    """Find the images that a caption file names. Returns their paths.

    Searches `folder`, if that is given. Otherwise the first of these places that has any of the images:

    1. the file's folder,
    2. the folders in the file's folder,
    3. the folder above,
    4. the folders in the folder above.

    Of several folders it takes the one with the most images. Raises UserError if no folder has any, or if two have
    equally many.
    """
    for name in names:
        if name.startswith("/") or ".." in PurePosixPath(name).parts:
            raise UserError(f"eval.sets: {file} names {name!r}, which lies outside the set; fetch it again")
    near = file.parent
    where = [[near], files.folders(near), [near.parent], files.folders(near.parent)]
    if folder:
        where = [[folder]]
    for folders in where:
        candidates = [_located(place, names) for place in folders]
        most = max((candidate.found for candidate in candidates), default=0)
        if most:
            break
    else:
        raise UserError(
            f"eval.sets: none of the {len(names)} images of {file} is there, such as {names[0]}; put them into one "
            "folder beside it"
        )
    best, *others = [candidate for candidate in candidates if candidate.found == most]
    if others:
        raise UserError(
            f"eval.sets: the images of {file} are in {best.folder} and in {others[0].folder}; {remedy(best.folder)}"
        )
    return best.paths


class LocatedImages(NamedTuple):
    """The places of a file's images if they are in this folder."""

    folder: Path
    paths: list[Path]
    # How many of them are there.
    found: int


def _located(folder: Path, names: Sequence[str]) -> LocatedImages:
    """The images by their names or by the names' last segments: what finds more of them; in a tie, by their names."""
    full_paths = [folder / name for name in names]
    leaves = [folder / path.name for path in full_paths]
    by_name = LocatedImages(folder, full_paths, sum(map(os.path.isfile, full_paths)))
    by_leaf = LocatedImages(folder, leaves, sum(map(os.path.isfile, leaves)))
    return by_leaf if by_leaf.found > by_name.found else by_name
