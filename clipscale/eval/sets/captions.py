"""Reads caption files beside their images: COCO's annotations, Karpathy's splits of COCO and Flickr30k, CLIP_benchmark's lists.

Multilingual sets too: XTD (Aggarwal and Kale 2020) and Crossmodal-3600 (Thapliyal et al. 2022). One set holds all languages: its images
are encoded once. Every image has one caption a language, of Crossmodal-3600 the first, as in CLIP_benchmark.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.eval.sets import prompts
from clipscale.eval.sets.item import RETRIEVAL, EvalSet, ImageRef
from clipscale.eval.sets.prompts import stripped

MOST_BYTES = 192 << 20
"""Size of a caption file, which takes ten times as much in memory; Karpathy's of COCO has 138 MiB."""
MOST_JSONL = 64 << 20
"""Size of captions.jsonl, which has 30 MB."""
_NAMES, _CAPTIONS, _JSONL = "test_image_names.txt", "test_1kcaptions_", "captions.jsonl"


def load(file: Path) -> EvalSet:
    """COCO's caption annotations, Karpathy's split of COCO / Flickr30k (images marked `test`), or CLIP_benchmark's list of Flickr
    (.txt); images beside the file.
    """
    if file.suffix == ".txt":
        return _of_entries(file, list(_listed(file)))
    try:
        record = files.parse_json(prompts.text_of(file, file.parent, MOST_BYTES))
        entries = list(_karpathy(record) if "sentences" in record["images"][0] else _coco(record))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(f"eval.sets: {file} is neither COCO's caption JSON nor Karpathy's ({error!r})") from error
    return _of_entries(file, entries)


def _of_entries(file: Path, entries: Sequence[tuple[str, list[str]]]) -> EvalSet:
    """The set of image names and their captions."""
    entries = [(name, kept) for name, texts in entries if (kept := stripped(texts))]
    if not entries:
        raise UserError(f"eval.sets: {file} holds no image with captions in its test split")
    images = images_beside(file, [name for name, _ in entries])
    captions = [text for _, texts in entries for text in texts]
    owner = [index for index, (_, texts) in enumerate(entries) for _ in texts]
    return EvalSet(file.stem, file, RETRIEVAL, images, captions=captions, owner=owner)


def _listed(file: Path) -> Iterator[tuple[str, list[str]]]:
    """A heading, then lines `NAME.jpg,CAPTION`; lines of one image need not follow one another."""
    captions: dict[str, list[str]] = {}
    for line in filter(None, prompts.lines_of(file, MOST_BYTES)[1:]):
        name, found, caption = line.partition(".jpg,")
        if not found:
            raise UserError(f"eval.sets: {file} has the line {line[:60]!r}; it needs lines such as 7.jpg,a black dog")
        captions.setdefault(f"{name}.jpg", []).append(caption)
    yield from captions.items()


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


def images_beside(file: Path, names: Sequence[str], near: Path | None = None) -> list[ImageRef]:
    """The images that a file of the set names: in the folder `near`, by default the file's, in one below or beside it.

    Raises UserError.
    """
    near = near or file.parent
    outside = [name for name in names if name.startswith("/") or ".." in PurePosixPath(name).parts]
    if outside:
        raise UserError(f"eval.sets: {file} names {outside[0]!r}, which lies outside the set; fetch it again")
    bases = [near, *_folders(near), near.parent, *_folders(near.parent)]
    base, images, missing, roots = near, [], [], {near: files.own_root(near)}
    for name in names:
        places = ((folder, folder / n) for folder in [base, *bases] for n in (name, PurePosixPath(name).name))
        place = next((place for place in places if place[1].is_file()), None)
        if place is None:
            missing.append(name)
            continue
        base, path = place
        roots.setdefault(base, files.own_root(base))
        if not any(files.inside(path, roots[folder]) for folder in (base, near)):
            raise UserError(f"eval.sets: {file} names {path}, which lies outside the set; copy the image there")
        images.append(ImageRef(path))
    if not images:
        raise UserError(
            f"eval.sets: cannot find the image {names[0]} of {file}; put the images into a folder beside it"
        )
    if missing:
        raise UserError(f"eval.sets: {len(missing)} of {len(names)} images of {file} are missing, such as {missing[0]}")
    return images


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())


def is_multilingual(root: Path) -> bool:
    """Whether `root` is one of the two: the cloned repository of XTD, or its folder XTD10, or a folder with captions.jsonl."""
    return _xtd_names(root) is not None or (root / _JSONL).is_file()


def load_multilingual(root: Path) -> EvalSet:
    """Loads the set from `root`. Raises UserError."""
    return _xtd(root) if _xtd_names(root) else _crossmodal(root / _JSONL)


def _xtd_names(root: Path) -> Path | None:
    return next((file for file in (root / _NAMES, root / "XTD10" / _NAMES) if file.is_file()), None)


def _xtd(root: Path) -> EvalSet:
    """Line N of every caption file belongs to line N of the image names; MIC/ and STAIR/ hold three of the languages."""
    names_file = _xtd_names(root)
    assert names_file is not None
    names = prompts.text_of(names_file, root).split()
    captions: dict[str, list[str]] = {}
    folders = [names_file.parent, names_file.parent.parent / "MIC", names_file.parent.parent / "STAIR"]
    for file in (file for folder in folders for file in sorted(folder.glob(f"{_CAPTIONS}*.txt"))):
        lines = prompts.lines_of(file)
        if len(lines) != len(names):
            raise UserError(f"eval.sets: {file} has {len(lines)} captions for {len(names)} images; fetch it again")
        captions.setdefault(file.stem.removeprefix(_CAPTIONS), lines)
    if not captions:
        raise UserError(f"eval.sets: {names_file.parent} holds no {_CAPTIONS}LANGUAGE.txt; fetch the repository again")
    return _of_languages(root, names_file, names, captions)


def _crossmodal(file: Path) -> EvalSet:
    """A line of captions.jsonl is an image: its key, and for every language an object with a list `caption`."""
    names: list[str] = []
    captions: dict[str, list[str]] = {}
    try:
        for line in prompts.lines_of(file, MOST_JSONL):
            record = files.parse_json(line)
            for language, texts in record.items():
                if isinstance(texts, dict):
                    before = captions.setdefault(language, [])
                    before += [""] * (len(names) - len(before)) + [str(texts["caption"][0])]
            names.append(f"{record['image/key']}.jpg")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise UserError(f"eval.sets: {file} is not Crossmodal-3600's ({error!r}); fetch captions.zip again") from error
    if not names:
        raise UserError(f"eval.sets: {file} holds no image; fetch captions.zip again")
    return _of_languages(file.parent, file, names, captions)


def _of_languages(root: Path, file: Path, names: Sequence[str], captions: Mapping[str, Sequence[str]]) -> EvalSet:
    """All languages after one another; an image without a caption in one of them is left out there."""
    pairs = [
        (language, text, image)
        for language in sorted(captions)
        for image, text in enumerate(captions[language])
        if prompts.stripped([text])
    ]
    return EvalSet(
        root.name,
        root,
        RETRIEVAL,
        images_beside(file, names, root),
        captions=[prompts.stripped([text])[0] for _, text, _ in pairs],
        owner=[image for _, _, image in pairs],
        part_of=[language for language, _, _ in pairs],
    )
