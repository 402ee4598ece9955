"""Class names and prompts of classification sets: their own files first, else those of a known data set. Nothing is guessed."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from clipscale.common import files
from clipscale.common.errors import UserError

CLASSNAMES, TEMPLATES = "classnames.txt", "zeroshot_classification_templates.txt"
SINGLE = "a photo of a {c}."
MOST_CLASSES, MOST_TEMPLATES = 1 << 17, 1 << 10
"""Lines of the texts of a set. The text tower encodes every class with every template; ImageNet-21k has 21,841 and 80."""
_IMAGENET_1K = re.compile(
    r"(wds_)?(imagenet|ilsvrc)[-_]?(1k|2012)?([-_]?(val|validation|test))?|(wds_)?imagenet[-_]?(v2.*|sketch)"
)
"""Names of folders whose labels are ImageNet-1k's: ImageNet itself, its second version, and ImageNet-Sketch."""


def classnames(root: Path, published: Sequence[str] = (), *, numbers: bool = True) -> list[str]:
    """The set's own class names, else ImageNet's where labels are numbers, else the published ones. Raises UserError."""
    if (root / CLASSNAMES).is_file():
        return lines(root / CLASSNAMES)
    return imagenet_classnames() if numbers and _IMAGENET_1K.fullmatch(root.name.lower()) else list(published)


def imagenet_classnames() -> list[str]:
    """The names of ImageNet's 1000 classes that CLIP's authors curated."""
    from open_clip import IMAGENET_CLASSNAMES

    return list(IMAGENET_CLASSNAMES)


def render(template: str, name: str) -> str:
    """The prompt for a class. Not by str.format, because templates may contain other braces."""
    return template.replace("{c}", name)


def text_of(file: Path, root: Path, most: int = files.SMALL) -> str:
    """A text of a set, whose folder is `root`. Raises UserError, also for a link that leads out of the set."""
    if not files.inside(file, files.own_root(root)):
        raise UserError(f"eval.sets: {file} is a link to a file outside the set; copy that file there")
    with files.reported("eval.sets", file, "fetch the set again"):
        return files.read_text(file, most)


def lines_of(file: Path, most: int = files.SMALL) -> list[str]:
    """The lines of a text in the set's folder, split at line feeds alone: captions may hold other separators. Raises UserError."""
    return [line.strip() for line in text_of(file, file.parent, most).rstrip().split("\n")]


def lines(file: Path, most: int = MOST_CLASSES) -> list[str]:
    """The lines of a text in a set's folder without spaces around them; empty ones are left out. Raises UserError."""
    found = stripped(text_of(file, file.parent).splitlines())
    if len(found) > most:
        raise UserError(f"eval.sets: {file} has {len(found)} lines, more than {most}; fetch the set again")
    return found


def stripped(texts: Iterable[str]) -> list[str]:
    """The texts without spaces around them, and without lone surrogates, which JSON can hold; empty ones are left out."""
    plain = (text.encode("utf-8", "replace").decode() for text in texts)
    return [text for text in map(str.strip, plain) if text]


def templates(root: Path) -> list[str]:
    """The set's own templates; without any, CLIP's 80 for ImageNet and its variants, or a single one. Raises UserError."""
    if (root / TEMPLATES).is_file():
        return templates_of(root / TEMPLATES)
    return imagenet_templates() if "imagenet" in root.name.lower() else [SINGLE]


def imagenet_templates(*, simple: bool = False) -> list[str]:
    """CLIP's 80 prompts for ImageNet, or the best 7 of them."""
    from open_clip import OPENAI_IMAGENET_TEMPLATES, SIMPLE_IMAGENET_TEMPLATES

    return [template("{c}") for template in (SIMPLE_IMAGENET_TEMPLATES if simple else OPENAI_IMAGENET_TEMPLATES)]


def chosen(name: str) -> list[str]:
    """The templates of `eval.prompts`: `80` and `7` of CLIP, `simple`, or a file's. Raises UserError."""
    if name in ("80", "7"):
        return imagenet_templates(simple=name == "7")
    if name == "simple":
        return [SINGLE]
    file = Path(name).expanduser()
    if not file.is_file():
        raise UserError(
            f"eval.prompts={name}: choose 80, 7 or simple, or give a file with one template a line, such as: {SINGLE}"
        )
    return templates_of(file)


def templates_of(file: Path) -> list[str]:
    """The templates in a file, one a line, with {c}, {classname} or {} for the class. Raises UserError."""
    found = lines(file, MOST_TEMPLATES)
    for line in found:
        if not re.search(r"\{(c|classname)?\}", line):
            raise UserError(
                f"eval.sets: the template {line!r} of {file} has no place for the class; write {{c}} where it goes"
            )
    if not found:
        raise UserError(f"eval.sets: {file} holds no template; write one a line, such as: {SINGLE}")
    return [re.sub(r"\{(c|classname)?\}", "{c}", line) for line in found]
