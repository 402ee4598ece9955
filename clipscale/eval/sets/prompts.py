"""Class names and prompts of classification sets: from the set's own files, else ImageNet's."""

import re
from collections.abc import Iterable
from pathlib import Path

from open_clip import IMAGENET_CLASSNAMES, OPENAI_IMAGENET_TEMPLATES

from clipscale.common.errors import UserError
from clipscale.data.sample import BrokenSampleError, text_of

CLASSNAMES = "classnames.txt"
TEMPLATES = "zeroshot_classification_templates.txt"
SINGLE = "a photo of a {c}."
# Most lines of a set's text. The text tower encodes every class with every template; ImageNet-21k has 21,841 classes.
MAX_LINES = 1 << 17
# A line of a program instead of a text: a function, a string in quotes, a list's beginning or end, an assignment.
_PROGRAM = re.compile(
    r"lambda\b.*:.*|[fbru]{0,2}['\"].*['\"\]}]\s*,?|[\[({]+(\s*['\"].*)?|[\])}]+\s*,?|\w+\s*[=:]\s*[\[({'\"].*"
)
# Names of folders with ImageNet-1k's labels: ImageNet itself, its second version, and ImageNet-Sketch.
_IMAGENET_1K = re.compile(
    r"(wds_)?(imagenet|ilsvrc)[-_]?(1k|2012)?([-_]?(val|validation|test))?|(wds_)?imagenet[-_]?(v2.*|sketch)"
)


def classnames(root: Path, *, numbers: bool = True) -> list[str]:
    """The set's own class names, or ImageNet's where labels are numbers; else empty. Raises UserError."""
    if (root / CLASSNAMES).is_file():
        return lines(root / CLASSNAMES)
    return list(IMAGENET_CLASSNAMES) if numbers and _IMAGENET_1K.fullmatch(root.name.lower()) else []


def templates(root: Path, *, imagenet: bool = False) -> list[str]:
    """Templates with {c} for the class: the set's own, else CLIP's 80 for ImageNet and its variants, else a single one.

    A set's own may also have {classname} or {}. Raises UserError.
    """
    file = root / TEMPLATES
    placeholder = re.compile(r"\{(c|classname)?\}")
    if not file.is_file():
        if imagenet or "imagenet" in root.name.lower():
            return [template("{c}") for template in OPENAI_IMAGENET_TEMPLATES]
        return [SINGLE]
    texts = lines(file)
    for line in texts or [""]:
        if not placeholder.search(line):
            raise UserError(f"eval.sets: the template {line!r} of {file} has no place for the class; write {{c}} there")
    return [placeholder.sub("{c}", line) for line in texts]


def read(file: Path) -> str:
    """The text of a file of a set, decoded by `encoding_of`. Raises UserError."""
    try:
        return text_of(file.read_bytes())
    except BrokenSampleError as error:
        raise UserError(f"eval.sets: {file} is not in UTF-8 ({error}); save it so") from error


def lines(file: Path) -> list[str]:
    """The lines of a text in a set's folder without spaces around them; empty ones are left out. Raises UserError."""
    texts = stripped(read(file).splitlines())
    if len(texts) > MAX_LINES:
        raise UserError(f"eval.sets: {file} has {len(texts)} lines, more than {MAX_LINES}; fetch the set again")
    if program := [text for text in texts if _PROGRAM.fullmatch(text)]:
        raise UserError(
            f"eval.sets: {file} has lines of a program, such as {program[0][:80]!r}; write the texts alone, one a line"
        )
    return texts


def stripped(texts: Iterable[str]) -> list[str]:
    """The texts without spaces around them and lone surrogates, which JSON can hold; empty ones are left out."""
    plain = (text.encode("utf-8", "replace").decode().strip() for text in texts)
    return [text for text in plain if text]
