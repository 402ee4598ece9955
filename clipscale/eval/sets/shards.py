"""Reads CLIP_benchmark's webdataset layout: test/nshards.txt, test/0.tar, ..., and text files beside them.

Also reads plain shards of pairs, as training takes them.
"""

import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from clipscale.common.errors import UserError
from clipscale.data.sample import IMAGE_TYPES, MAX_TEXT_BYTES, BrokenSampleError, captions_in, json_fields
from clipscale.data.shards.reader import Archive
from clipscale.data.shards.tar import open_archive
from clipscale.eval.classification import ClassificationSet
from clipscale.eval.retrieval import PairSet, RetrievalSet
from clipscale.eval.sets import prompts
from clipscale.eval.sets.item import EvalSet, ImageRef

# The text members of a sample, by extension.
Texts = dict[str, bytes]
TEXTS = ("cls", "txt", "json")


def load(root: Path) -> EvalSet:
    """The set in `root`. Raises UserError."""
    retrieval = _dataset_type(root) == RetrievalSet.kind
    images, answers = _read(_shard_paths(root), _lines if retrieval else _label)
    if not images:
        raise UserError(f"eval.sets: {root} holds no image; check {root / 'test'}")
    if retrieval:
        return RetrievalSet(name=root.name, path=root, images=images, answers=answers)

    names = prompts.classnames(root)
    if not names:
        raise UserError(f"eval.sets: {root} has no {prompts.CLASSNAMES}; write a class name a line, by label")
    outside = [label for label in answers if not 0 <= label < len(names)]
    if outside:
        raise UserError(
            f"eval.sets: {root} has {len(outside)} labels outside its {len(names)} classes (such as {outside[0]}); "
            "check classnames.txt against the labels"
        )
    return ClassificationSet(
        name=root.name,
        path=root,
        images=images,
        answers=answers,
        classnames=names,
        templates=prompts.templates(root),
    )


def load_pairs(root: Path, tars: Sequence[Path]) -> PairSet:
    """Pictures with their captions: the list `captions` of the json, or else the text. Raises UserError.

    Their EXIF orientation counts, as in training.
    """
    images, answers = _read(tars, _captions)
    if not images:
        raise UserError(f"eval.sets: {root} holds no picture with a caption (.txt, or `captions` in .json)")
    upright = [image._replace(upright=True) for image in images]
    return PairSet(name=root.name, path=root, images=upright, answers=answers)


def _read(shards: Iterable[Path], answer: Callable[[Texts, str], Any]) -> tuple[list[ImageRef], list[Any]]:
    """The images of all samples, and their answers.

    `answer(texts, name)`: the answer that a sample's texts give; `name` is for messages. The sample's image has a
    defect if this raises BrokenSampleError, or if there is no image.
    """
    images = []
    answers = []
    for shard in shards:
        for key, image, texts in _samples(shard):
            try:
                answers.append(answer(texts, f"sample {key} of {shard}"))
            except BrokenSampleError as error:
                answers.append([])
                image = image._replace(defect=image.defect or error.reason)
            images.append(image)
    return images, answers


def _dataset_type(root: Path) -> str:
    file = root / "dataset_type.txt"
    text = prompts.read(file).strip().lower() if file.is_file() else ClassificationSet.kind
    if text not in (ClassificationSet.kind, RetrievalSet.kind):
        raise UserError(f"eval.sets: {file} says {text[:40]!r}; only classification and retrieval sets are evaluated")
    return text


def _shard_paths(root: Path) -> Iterator[Path]:
    file = root / "test" / "nshards.txt"
    text = prompts.read(file).strip()
    if not text.isdecimal():
        raise UserError(f"eval.sets: {file} must hold the number of shards, it holds {text[:40]!r}")
    for index in range(int(text)):
        shard = root / "test" / f"{index}.tar"
        if not shard.is_file():
            raise UserError(f"eval.sets: {shard} is missing, {file} counts {text}; fetch it, or correct the count")
        yield shard


def _samples(shard: Path) -> Iterator[tuple[str, ImageRef, Texts]]:
    """Key, image and texts of each sample that has an image or a text.

    As in webdataset, a sample's members follow one another. Raises UserError for a damaged shard.
    """
    try:
        with shard.open("rb") as tar:
            if not open_archive(tar, shard.name)[1]:
                raise UserError(f"eval.sets: {shard} is gzipped, and pictures are read where they lie; gunzip it first")
            archive = Archive(tar, can_seek=True)
            for key, members in archive.samples():
                pictures = {}
                texts: Texts = {}
                defect = ""
                for member in members:
                    if member.extension not in IMAGE_TYPES and member.extension not in TEXTS:
                        continue
                    if member.extension in pictures or member.extension in texts:
                        defect = "repeated_member"
                    elif member.link_error:
                        defect = "link"
                    elif member.extension in IMAGE_TYPES:
                        pictures[member.extension] = ImageRef(shard, archive.content_offset(member), member.size)
                    elif member.size <= MAX_TEXT_BYTES:
                        texts[member.extension] = archive.read(member)
                if pictures or texts or defect:
                    first = min(pictures, key=IMAGE_TYPES.index, default="")
                    image = pictures.get(first, ImageRef(shard, defect="no_image"))
                    yield key, image._replace(defect=defect or image.defect), texts
            if archive.offset > tar.seek(0, os.SEEK_END):
                raise tarfile.ReadError("ends within a member")
    except (tarfile.TarError, ValueError) as error:
        raise UserError(f"eval.sets: cannot read {shard} ({error}); fetch it again") from error


def _captions(texts: Texts, _: str) -> list[str]:
    with suppress(BrokenSampleError):  # training does not read the json where `data.captions` is [txt]
        if isinstance(json_fields(texts.get("json", b"{}")).get("captions"), list):
            return captions_in(texts, "json:captions")
    return captions_in(texts, "txt" if "txt" in texts else "json:captions")


def _lines(texts: Texts, _: str) -> list[str]:
    return prompts.stripped("".join(captions_in(texts, "txt")).splitlines())


def _label(texts: Texts, name: str) -> int:
    text = texts.get("cls")
    try:
        return int(text or b"")
    except ValueError:
        problem = "no .cls member" if text is None else f"the label {text[:20]!r}"
        raise UserError(f"eval.sets: {name} has {problem}; give a whole number in its .cls") from None
