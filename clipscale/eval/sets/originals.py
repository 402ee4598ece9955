"""Reads sets as their own sites give them: archives, or what is unpacked from them. `original` in known.yaml describes each layout.

N: pictures, C: channels, H, W: pixels. Pictures that are stored as numbers are held in memory, and encoded as PNG when they are read.
"""

import io
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from clipscale.common.errors import UserError
from clipscale.eval.sets import archives, folders, matlab, pickled, prompts
from clipscale.eval.sets.archives import Tree
from clipscale.eval.sets.item import CLASSIFICATION, IMAGE_SUFFIXES, EvalSet, ImageRef, Picture
from clipscale.eval.sets.known import KnownSet, known_sets, published_classnames, published_templates

MOST_ARRAY = 1 << 28
"""Bytes of a file of pixels. STL-10's has 2.2e8."""
MOST_TEXT = 1 << 24
"""Bytes of a file of lines. GTSRB's has 4e5."""
MOST_PICTURES = 1 << 20
"""Pictures that are stored as numbers, each of which becomes an object: a shape may claim any number of empty ones."""
MOST_FOLDERS = 32
"""Folders below a set's folder in which its files may be."""
SPLITS = ("train", "training", "val", "valid", "validation", "test")
ALL = "all images"
"""The mark of a set whose site names no test pictures."""


class Pixels(NamedTuple):
    """A picture that is stored as numbers: (C, H, W) uint8."""

    values: np.ndarray

    def read(self) -> bytes:
        """As a PNG."""
        return _png(Image.fromarray(np.ascontiguousarray(self.values.transpose(1, 2, 0).squeeze())))


class Found(NamedTuple):
    """What a reader has read."""

    images: Sequence[Picture]
    labels: Sequence[int]
    """Classes, from `Original.first`."""
    names: Sequence[str] = ()
    """The class names that the set itself has."""


@dataclass(frozen=True)
class Original:
    """An entry `original`: how the set's own files are read."""

    reader: str
    """A key of READERS."""
    needs: list[str]
    """Files, and folders (with a final slash), by which the set is recognised."""
    archive: list[str] = field(default_factory=list)
    """Names of the published archive, which has all of these."""
    archives: list[str] = field(default_factory=list)
    """The published files that have these together."""
    names: str = ""
    """The file with one class name a line."""
    lines: str = ""
    """A regular expression of the lines of `needs[0]`: `image`, and `label` (a number) or `name` (of a class)."""
    image: str = ""
    """The picture's file, with {image}; of class folders, the beginning of their names."""
    first: int = 0
    """The first label."""
    shape: list[int] = field(default_factory=list)
    """C, H, W of stored pixels."""
    labels: list[int] = field(default_factory=list)
    """Bytes of labels before the pixels of a record, and the place of the one that counts."""
    keys: list[str] = field(default_factory=list)
    """Of pickles: the entries with the labels, and with the names."""
    all: bool = False
    """Whether the site names no test pictures."""


def load(path: Path) -> EvalSet | None:
    """The set at `path`, in the layout of its own site; None for anything else. Raises UserError, also for several sets."""
    layouts = [(known, Original(**entry)) for known in known_sets().values() for entry in known.originals]
    if path.is_file():
        packed = archives.is_archive(path)
        found = [(known, original, [path]) for known, original in layouts if packed or [path.name] == original.needs]
        for others in (original.archives for _, original in layouts):
            if path.name in others and all(path.with_name(name).is_file() for name in others):
                raise UserError(f"eval.sets: {path} is one of {', '.join(others)}; give their folder, {path.parent}")
    else:
        inner = [one for one in path.iterdir() if one.is_dir()]
        places = [path, *inner] if len(inner) <= MOST_FOLDERS else [path]
        found = [(known, original, sources) for known, original in layouts if (sources := _sources(places, original))]
        beside = {known.name for known in known_sets().values() if any(one.name in known.candidates for one in inner)}
        names = sorted({known.name for known, _, _ in found} | beside)
        if found and len(names) > 1:
            raise UserError(
                f"eval.sets: {path} holds several sets ({', '.join(names)}); give the files of one, or suite=NAME eval.root={path}"
            )
    trees = ((known, original, _tree(sources, original)) for known, original, sources in found)
    return next((_loaded(path, known, original, tree) for known, original, tree in trees if tree is not None), None)


def _loaded(path: Path, known: KnownSet, original: Original, tree: Tree) -> EvalSet:
    found = READERS[original.reader](tree, original)
    labels = [label - original.first for label in found.labels]
    if path.is_dir() and (path / prompts.CLASSNAMES).is_file():
        names = prompts.lines(path / prompts.CLASSNAMES)
    else:
        own = found.names if original.reader != "folders" else ()
        names = list(own or published_classnames(known) or found.names)
    if not found.images:
        raise UserError(f"eval.sets: {path} holds no image of {known.name}; fetch it again")
    if not names:
        raise UserError(
            f"eval.sets: {path} has no class names of {known.name}; pip install clip-benchmark, which has the published ones, or write "
            f"{prompts.CLASSNAMES} into its folder"
        )
    count = len(found.names) or max(labels) + 1
    if count > len(names) or (found.names and count != len(names)) or min(labels) < 0:
        raise UserError(f"eval.sets: {path} has {count} classes, and {known.name} {len(names)}; fetch it again")
    texts = prompts.templates(path)
    if texts == [prompts.SINGLE] and not (path / prompts.TEMPLATES).is_file():
        texts = published_templates(known, default=texts)
    marks = (ALL,) if original.all else ()
    return EvalSet(path.name, path, CLASSIFICATION, found.images, labels, names, texts, marks=marks)


# -- where the files are -----------------------------------------------------------------------------------------------


def _sources(places: Sequence[Path], original: Original) -> list[Path]:
    """Where the set is in a folder and those right below it: a folder, or archives. Nothing if it is not there."""
    for place in places:
        if not (original.all and place.name in SPLITS) and _has(place, original.needs):
            return [place]
    packed = [places[0] / name for name in original.archives]
    if packed and all(one.is_file() for one in packed):
        return packed
    return [one for name in original.archive if (one := places[0] / name).is_file()][:1]


def _tree(sources: Sequence[Path], original: Original) -> Tree | None:
    if sources[0].is_dir():
        return archives.contents(sources[0])
    return _within({k: v for one in sources for k, v in archives.contents(one).items()}, original)


def _has(place: Path, needs: Sequence[str]) -> bool:
    return all((place / need).is_dir() if need.endswith("/") else (place / need).is_file() for need in needs)


def _within(tree: Tree, original: Original) -> Tree | None:
    """The files below the first folder that has what the set needs, by their names there."""
    first, *others = original.needs
    tried = set[str]()
    for name in tree:
        before, found, after = f"/{name}".partition(f"/{first}")
        base = f"{before}/".lstrip("/")
        if not found or bool(after) != first.endswith("/") or base in tried:
            continue
        tried.add(base)
        split = original.all and before.rpartition("/")[2] in SPLITS
        if not split and all(
            any(k.startswith(base + need) for k in tree) if need.endswith("/") else base + need in tree
            for need in others
        ):
            return {k.removeprefix(base): ref for k, ref in tree.items() if k.startswith(base)}
        if len(tried) > MOST_FOLDERS:
            break
    return None


# -- readers -----------------------------------------------------------------------------------------------------------


def _folders(tree: Tree, original: Original) -> Found:
    """A folder a class, of any depth; their order is alphabetical, whatever the case, or that of a file."""
    top = original.image
    pictures: dict[str, list[Picture]] = {}
    for name in sorted(tree):
        folder, _, file = name.removeprefix(top).rpartition("/")
        if name.startswith(top) and folder and file.lower().endswith(IMAGE_SUFFIXES):
            pictures.setdefault(folder, []).append(tree[name])
    order = sorted(pictures, key=str.lower)
    if original.names:
        order = [line.strip("/") for line in _lines(tree, original.names)]
    # SUN397's folders, which a file lists, begin with a letter.
    names = [name.partition("/")[2] if original.names else name for name in order]
    images = [image for name in order for image in pictures.get(name, [])]
    labels = [label for label, name in enumerate(order) for _ in pictures.get(name, [])]
    return Found(images, labels, [name.replace("_", " ").replace("/", " ") for name in names])


def _list(tree: Tree, original: Original) -> Found:
    """A line a picture, with its label or its class."""
    matches = [re.fullmatch(original.lines, line) for line in _lines(tree, original.needs[0])]
    wrong = sum(match is None for match in matches)
    if wrong > 1 or (wrong and matches[0]):  # the first may be a heading
        raise ValueError(f"{original.needs[0]} has {wrong} lines of another form")
    entries = [match for match in matches if match]
    if "label" in re.compile(original.lines).groupindex:
        return _listed(tree, original, [(entry["image"], int(entry["label"])) for entry in entries])
    order = _lines(tree, original.names) if original.names else sorted({entry["name"] for entry in entries})
    label_of = {name: label for label, name in enumerate(order)}
    listed = [(entry["image"], label_of[entry["name"]]) for entry in entries]
    return _listed(tree, original, listed, [name.replace("_", " ") for name in order])


def _listed(tree: Tree, original: Original, entries: Iterable[tuple[Any, int]], names: Sequence[str] = ()) -> Found:
    """Pictures by what stands for {image} in the names of their files, and their labels."""
    pairs = [(_file(tree, original.image.format(image=image)), label) for image, label in entries]
    return Found([image for image, _ in pairs], [label for _, label in pairs], names)


def _records(tree: Tree, original: Original) -> Found:
    """CIFAR's binary version: labels and pixels of a picture, one after another."""
    before, place = original.labels
    size = before + int(np.prod(original.shape))
    rows = np.frombuffer(_bytes(tree, original.needs[0]), np.uint8).reshape(-1, size)
    return _stored(rows[:, before:].reshape(-1, *original.shape), rows[:, place], _lines(tree, original.names))


def _pickled(tree: Tree, original: Original) -> Found:
    """CIFAR's python version."""
    batch, meta = (pickled.values(_bytes(tree, name)) for name in original.needs)
    labels, names = original.keys
    pixels = batch["data"].reshape(-1, *original.shape)
    return _stored(pixels, batch[labels], pickled.texts(meta[names]))


def _idx(tree: Tree, original: Original) -> Found:
    """MNIST's two files: a magic number, the sizes, and the bytes."""
    arrays = []
    for name in original.needs:
        data = _bytes(tree, name)
        dimensions = data[3]
        shape = struct.unpack_from(f">{dimensions}I", data, 4)
        if data[:3] != b"\0\0\x08" or len(data) != 4 + 4 * dimensions + int(np.prod(shape, dtype=object)):
            raise ValueError(f"{name} is damaged")
        arrays.append(np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape))
    pixels, labels = arrays
    return _stored(pixels[:, None], labels)


def _stl10(tree: Tree, original: Original) -> Found:
    """Pixels by columns, and labels from 1."""
    C, H, W = original.shape
    pixels = np.frombuffer(_bytes(tree, original.needs[0]), np.uint8).reshape(-1, C, W, H).swapaxes(2, 3)
    return _stored(pixels, _bytes(tree, original.needs[1]), _lines(tree, original.names))


def _svhn(tree: Tree, original: Original) -> Found:
    """X (H, W, C, N) and y (N, 1), in which 10 is the digit 0."""
    found = matlab.variables(_bytes(tree, original.needs[0]))
    return _stored(found["X"].transpose(3, 2, 0, 1), found["y"].ravel() % 10)


def _flowers(tree: Tree, original: Original) -> Found:
    """The numbers of the test pictures, and the labels of all, from 1."""
    ids, labels = (matlab.variables(_bytes(tree, name)) for name in original.needs[:2])
    wanted, of_all = [int(n) for n in ids["tstid"].ravel()[:MOST_PICTURES]], labels["labels"].ravel()
    return _listed(tree, original, [(f"{n:05d}", int(of_all[n - 1])) for n in wanted])


def _cars(tree: Tree, original: Original) -> Found:
    """A structure a picture, with its class, from 1, and its file."""
    entries = matlab.variables(_bytes(tree, original.needs[0]))["annotations"]
    names = matlab.variables(_bytes(tree, original.names))["class_names"]
    return _listed(tree, original, [(entry["fname"], int(entry["class"].item())) for entry in entries], names)


def _imagenet(tree: Tree, original: Original) -> Found:
    """The numbers of the validation pictures' synsets; the label is the place of a synset's WordNet id among those of all classes."""
    synsets = matlab.variables(_bytes(tree, original.needs[0]))["synsets"]
    wnids = {int(one["ILSVRC2012_ID"].item()): one["WNID"] for one in synsets if not one["num_children"].item()}
    order = sorted(wnids.values())
    label_of = {wnid: label for label, wnid in enumerate(order)}
    labels = [label_of[wnids[int(line)]] for line in _lines(tree, original.needs[1])]
    names = folders.names_of_wnids(Path(original.needs[0]), order)
    return _listed(tree, original, [(f"{n + 1:08d}", label) for n, label in enumerate(labels)], names)


def _stored(pixels: np.ndarray, labels: Sequence[Any] | np.ndarray, names: Sequence[str] = ()) -> Found:
    """Pictures (N, C, H, W) and their labels. Raises ValueError."""
    if pixels.dtype != np.uint8 or not len(pixels) == len(labels) <= MOST_PICTURES:
        raise ValueError(f"{len(pixels)} pictures of {pixels.dtype} and {len(labels)} labels")
    return Found([*map(Pixels, pixels)], [int(label) for label in labels], names)


READERS: dict[str, Callable[[Tree, Original], Found]] = {
    one.__name__.removeprefix("_"): one
    for one in (_folders, _list, _records, _pickled, _idx, _stl10, _svhn, _flowers, _cars, _imagenet)
}


def _file(tree: Tree, name: str) -> ImageRef:
    """A file, as a picture that Pillow opens. Raises ValueError if it is missing."""
    if name not in tree:
        raise ValueError(f"it has no {name}")
    ref = tree[name]
    return ref._replace(forms=(*ref.forms, _of_ppm)) if name.endswith(".ppm") else ref


def _bytes(tree: Tree, name: str, most: int = MOST_ARRAY) -> bytes:
    return _file(tree, name).read(most)


def _lines(tree: Tree, name: str) -> list[str]:
    """The lines of a text that are not empty."""
    return prompts.stripped(_bytes(tree, name, MOST_TEXT).decode("utf-8", "replace").splitlines())


def _png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG", compress_level=1)
    return out.getvalue()


def _of_ppm(data: bytes) -> bytes:
    """A PNG of GTSRB's pictures, which Pillow would open in any of PPM's forms. Raises OSError."""
    head = re.match(rb"P6\s+([1-9]\d{0,4})\s+([1-9]\d{0,4})\s+255\s", data)
    if head is None or len(data) != head.end() + 3 * int(head[1]) * int(head[2]):
        raise OSError("no PPM picture of 8 bits")
    width, height = int(head[1]), int(head[2])
    return _png(Image.fromarray(np.frombuffer(data, np.uint8, offset=head.end()).reshape(height, width, 3)))
