"""Reads caption files beside their images: COCO's annotations, and Karpathy's splits of COCO and Flickr30k."""

from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from clipscale import files
from clipscale.errors import UserError
from clipscale.eval.sets import prompts
from clipscale.eval.sets.item import RETRIEVAL, EvalSet, ImageRef
from clipscale.eval.sets.prompts import stripped

MOST_BYTES = 192 << 20
"""Size of a caption file, which takes ten times as much in memory; Karpathy's of COCO has 138 MiB."""


def load(file: Path) -> EvalSet:
    """COCO's caption annotations, or Karpathy's split of COCO / Flickr30k (images marked `test`), images beside the file."""
    try:
        record = files.parse_json(prompts.text_of(file, file.parent, MOST_BYTES))
        entries = list(_karpathy(record) if "sentences" in record["images"][0] else _coco(record))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(f"eval.sets: {file} is neither COCO's caption JSON nor Karpathy's ({error!r})") from error
    entries = [(name, kept) for name, texts in entries if (kept := stripped(texts))]
    outside = [name for name, _ in entries if name.startswith("/") or ".." in PurePosixPath(name).parts]
    if outside:
        raise UserError(f"eval.sets: {file} names {outside[0]!r}, which lies outside the set; fetch it again")
    if not entries:
        raise UserError(f"eval.sets: {file} holds no image with captions in its test split")
    find = _image_finder(file, entries[0][0])
    images = [ImageRef(find(name)) for name, _ in entries]
    roots = [files.own_root(folder) for folder in (find(""), file.parent)]
    for image in images:
        if not any(files.inside(image.path, root) for root in roots):
            raise UserError(f"eval.sets: {file} names {image.path}, which lies outside the set; copy the image there")
    missing = [image.path for image in images if not image.path.is_file()]
    if missing:
        raise UserError(
            f"eval.sets: {len(missing)} of {len(images)} images of {file} are missing, such as {missing[0]}"
        )
    captions = [text for _, texts in entries for text in texts]
    owner = [index for index, (_, texts) in enumerate(entries) for _ in texts]
    return EvalSet(file.stem, file, RETRIEVAL, images, captions=captions, owner=owner)


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


def _image_finder(file: Path, first: str) -> Callable[[str], Path]:
    """From an image's name to its path, in the folder near the caption file where the first image is found."""
    bases = [file.parent, *sorted(p for p in file.parent.iterdir() if p.is_dir()), file.parent.parent]
    bases += sorted(p for p in file.parent.parent.iterdir() if p.is_dir())
    for base in bases:
        for name in (lambda n: n, lambda n: PurePosixPath(n).name):
            if (base / name(first)).is_file():
                return lambda n, base=base, name=name: base / name(n)  # type: ignore[misc]
    raise UserError(f"eval.sets: cannot find the image {first} of {file}; put the images into a folder beside it")
