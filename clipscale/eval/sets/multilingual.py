"""Reads multilingual caption sets as they are published: XTD (Aggarwal and Kale 2020) and Crossmodal-3600 (Thapliyal et al. 2022).

One set holds all languages: its images are encoded once. Every image has one caption a language, of Crossmodal-3600 the first, as in
CLIP_benchmark.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from clipscale import files
from clipscale.errors import UserError
from clipscale.eval.sets import prompts
from clipscale.eval.sets.captions import images_beside
from clipscale.eval.sets.item import RETRIEVAL, EvalSet

MOST_BYTES = 64 << 20
"""Size of captions.jsonl, which has 30 MB."""
_NAMES, _CAPTIONS, _JSONL = "test_image_names.txt", "test_1kcaptions_", "captions.jsonl"


def found(root: Path) -> bool:
    """Whether `root` is one of the two: the cloned repository of XTD, or its folder XTD10, or a folder with captions.jsonl."""
    return _xtd_names(root) is not None or (root / _JSONL).is_file()


def load(root: Path) -> EvalSet:
    """The set in `root`. Raises UserError."""
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
        for line in prompts.lines_of(file, MOST_BYTES):
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
