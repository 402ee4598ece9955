"""Reads CLIP_benchmark's webdataset layout: test/nshards.txt, test/0.tar, ..., and text files beside them.

And plain shards of pairs, as training takes them.
"""

import os
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from clipscale.common.errors import UserError
from clipscale.data.decode import captions_of, json_fields
from clipscale.data.sample import MAX_IMAGE_BYTES, MAX_TEXT_BYTES, BrokenSampleError
from clipscale.data.shards.archive import Archive
from clipscale.eval.classification import ClassificationSet
from clipscale.eval.retrieval import PairSet, RetrievalSet
from clipscale.eval.sets import prompts
from clipscale.eval.sets.item import IMAGE_SUFFIXES, EvalSet, ImageRef


def load(root: Path) -> EvalSet:
    """The set in `root`. Raises UserError."""
    retrieval = _dataset_type(root) == RetrievalSet.kind
    answer = _captions if retrieval else _label
    images: list[ImageRef] = []
    answers: list[Any] = []
    for shard in _shard_paths(root):
        for key, image, members in _samples(shard):
            answers.append(answer(key, shard, members))
            images.append(image)
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
    """Pictures with their captions: the list `captions` of the json, or else the text. Samples without one are left
    out. Raises UserError."""
    images = []
    answers = []
    for shard in tars:
        for _, image, members in _samples(shard):
            with suppress(BrokenSampleError):
                listed = json_fields(members.get("json", b"{}")).get("captions")
                answers.append(captions_of(members, "json:captions" if isinstance(listed, list) else "txt"))
                images.append(image)
    if not images:
        raise UserError(f"eval.sets: {root} holds no picture with a caption (.txt, or `captions` in .json)")
    return PairSet(name=root.name, path=root, images=images, answers=answers)


def _dataset_type(root: Path) -> str:
    file = root / "dataset_type.txt"
    kind = file.read_text(encoding="utf-8").strip().lower() if file.is_file() else ClassificationSet.kind
    if kind not in (ClassificationSet.kind, RetrievalSet.kind):
        raise UserError(f"eval.sets: {file} says {kind[:40]!r}; only classification and retrieval sets are evaluated")
    return kind


def _shard_paths(root: Path) -> Iterator[Path]:
    file = root / "test" / "nshards.txt"
    text = file.read_text(encoding="utf-8").strip()
    if not text.isdecimal():
        raise UserError(f"eval.sets: {file} must hold the number of shards, it holds {text[:40]!r}")
    for index in range(int(text)):
        shard = root / "test" / f"{index}.tar"
        if not shard.is_file():
            raise UserError(f"eval.sets: {shard} is missing, {file} counts {text}; fetch it, or correct the count")
        yield shard


def _samples(shard: Path) -> Iterator[tuple[str, ImageRef, dict[str, bytes]]]:
    """Key, image and text members of each sample. As in webdataset, a sample's members follow one another.

    Raises UserError for a label or captions without an image: the set is incomplete.
    """
    try:
        with shard.open("rb") as tar:
            archive = Archive(tar, can_seek=True, most=MAX_IMAGE_BYTES)
            for key, members in archive.samples():
                image = None
                texts = {}
                for member in members:
                    if member.extension in IMAGE_SUFFIXES:
                        image = ImageRef(shard, tar.tell(), member.size)
                    elif member.extension in ("cls", "txt", "json"):
                        texts[member.extension] = archive.read(member, MAX_TEXT_BYTES)
                if image is not None:
                    yield key, image, texts
                elif texts:
                    raise UserError(f"eval.sets: sample {key} of {shard} has no jpg, png or webp; fetch the set again")
            size = tar.seek(0, os.SEEK_END)
            if not size:
                raise tarfile.ReadError("empty")
            if archive.at > size:
                raise tarfile.ReadError("ends within a member")
    except (tarfile.TarError, ValueError) as error:
        raise UserError(f"eval.sets: cannot read {shard} ({error}); fetch it again") from error


def _captions(key: str, shard: Path, members: dict[str, bytes]) -> list[str]:
    lines = prompts.stripped(members.get("txt", b"").decode("utf-8", "replace").splitlines())
    if not lines:
        raise UserError(f"eval.sets: sample {key} of {shard} has no captions; add lines to {key}.txt")
    return lines


def _label(key: str, shard: Path, members: dict[str, bytes]) -> int:
    text = members.get("cls")
    try:
        return int(text or b"")
    except ValueError:
        what = "no .cls member" if text is None else f"the label {text[:20]!r}"
        raise UserError(f"eval.sets: sample {key} of {shard} has {what}; give a whole number in {key}.cls") from None
