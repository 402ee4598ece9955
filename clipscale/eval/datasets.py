"""Reads evaluation sets: CLIP_benchmark's webdataset layout, folders of class folders, and caption files beside their images.

Loading a set notes each image's place, and its label or captions. Images are read when they are evaluated.
"""

import json
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from clipscale.data.sample import key_and_extension
from clipscale.errors import UserError
from clipscale.eval.zero_shot import Template

CLASSIFICATION, RETRIEVAL = "classification", "retrieval"
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
_WNID = re.compile(r"n\d{8}")
_SUBSET_OF_IMAGENET = re.compile(r"imagenet[-_]?([aro]|100|200)$")


class ImageRef(NamedTuple):
    """The place of one encoded image: a whole file, or `size` bytes from `offset` within a tar."""

    path: Path
    offset: int = 0
    size: int = -1

    def read(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


@dataclass(frozen=True)
class EvalSet:
    """One classification set (labels, classnames, templates) or retrieval set (captions, owner), in reading order."""

    name: str
    path: Path
    kind: str
    images: Sequence[ImageRef]
    labels: Sequence[int] = ()
    """Classification: the class of each image."""
    classnames: Sequence[str] = ()
    templates: Sequence[Template] = ()
    captions: Sequence[str] = ()
    """Retrieval: all captions."""
    owner: Sequence[int] = ()
    """Retrieval: the image each caption belongs to."""

    def __len__(self) -> int:
        return len(self.images)

    def limited(self, limit: int | None) -> "EvalSet":
        """At most `limit` images, evenly spaced: a set that is sorted by class keeps all its classes."""
        if limit is None or limit >= len(self):
            return self
        kept = [i * len(self) // limit for i in range(limit)]
        new_index = {old: new for new, old in enumerate(kept)}
        pairs = [(c, new_index[o]) for c, o in zip(self.captions, self.owner) if o in new_index]
        return replace(
            self,
            images=[self.images[i] for i in kept],
            labels=[self.labels[i] for i in kept] if self.labels else (),
            captions=[caption for caption, _ in pairs],
            owner=[owner for _, owner in pairs],
        )


def load_sets(paths: Sequence[str], limit: int | None = None) -> list[EvalSet]:
    """Every set of `eval.sets`, named after its folder, and its parents where two folders share a name.

    Loaded sets are cached. Raises UserError for a set that is missing, empty or inconsistent.
    """
    resolved = [Path(path).expanduser().absolute() for path in paths]
    if len(set(resolved)) < len(resolved):
        raise UserError(f"eval.sets names a set twice: {', '.join(sorted(map(str, paths)))}; keep one of them")
    return [replace(load_set(path), name=name).limited(limit) for path, name in zip(resolved, _names(resolved))]


def _names(paths: Sequence[Path]) -> list[str]:
    """The fewest trailing path parts by which the sets differ."""
    plain = [path.with_suffix("") if path.suffix == ".json" else path for path in paths]
    for parts in range(1, max((len(path.parts) for path in plain), default=1) + 1):
        names = ["/".join(path.parts[-parts:]).removeprefix("wds_") for path in plain]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


@lru_cache(maxsize=64)
def load_set(path: Path) -> EvalSet:
    """Recognise the layout of `path` and load the set. Raises UserError."""
    if not path.exists():
        raise UserError(
            f"eval.sets: {path} does not exist; give a folder in CLIP_benchmark's layout (PATH/test/nshards.txt)"
        )
    if path.is_file():
        if path.suffix != ".json":
            raise UserError(f"eval.sets: {path} is a file that is no caption JSON; give the set's folder")
        return _caption_json(path)
    if (path / "test" / "nshards.txt").is_file():
        return _shards(path)
    if any(_is_image(file) for folder in path.iterdir() if folder.is_dir() for file in folder.iterdir()):
        return _class_folders(path)
    jsons = sorted(path.glob("*.json"))
    if len(jsons) == 1:
        return _caption_json(jsons[0])
    raise UserError(
        f"eval.sets: {path} is none of the known layouts; it needs test/nshards.txt (CLIP_benchmark), folders of images named "
        "after their classes, or one caption JSON"
    )


# --- CLIP_benchmark's webdataset layout ------------------------------------------------------------------------------------------


def _shards(root: Path) -> EvalSet:
    kind = _dataset_type(root)
    images: list[ImageRef] = []
    labels: list[int] = []
    captions: list[str] = []
    owner: list[int] = []
    for shard in _shard_paths(root):
        for key, image, members in _samples(shard):
            if kind == RETRIEVAL:
                lines = _stripped(members.get("txt", b"").decode("utf-8", "replace").splitlines())
                if not lines:
                    raise UserError(
                        f"eval.sets: sample {key} of {shard} has no captions; add {key}.txt with one caption a line"
                    )
                captions += lines
                owner += [len(images)] * len(lines)
            else:
                labels.append(_label(key, shard, members.get("cls")))
            images.append(image)
    if not images:
        raise UserError(f"eval.sets: {root} holds no image; check {root / 'test'}")
    if kind == RETRIEVAL:
        return EvalSet(root.name, root, kind, images, captions=captions, owner=owner)

    names = _classnames(root, labels)
    outside = [label for label in labels if not 0 <= label < len(names)]
    if outside:
        raise UserError(
            f"eval.sets: {root} has {len(outside)} labels outside its {len(names)} classes (such as {outside[0]}); "
            "check classnames.txt against the labels"
        )
    return EvalSet(root.name, root, kind, images, labels, names, _templates(root, len(names)))


def _dataset_type(root: Path) -> str:
    file = root / "dataset_type.txt"
    kind = file.read_text().strip().lower() if file.is_file() else CLASSIFICATION
    if kind not in (CLASSIFICATION, RETRIEVAL):
        raise UserError(f"eval.sets: {file} says {kind!r}; only classification and retrieval sets are evaluated")
    return kind


def _shard_paths(root: Path) -> Iterator[Path]:
    file = root / "test" / "nshards.txt"
    text = file.read_text().strip()
    if not text.isdigit():
        raise UserError(f"eval.sets: {file} must hold the number of shards, it holds {text[:40]!r}")
    for index in range(int(text)):
        shard = root / "test" / f"{index}.tar"
        if not shard.is_file():
            raise UserError(
                f"eval.sets: {shard} is missing though {file} counts {text} shards; fetch it, or correct the count"
            )
        yield shard


def _samples(shard: Path) -> Iterator[tuple[str, ImageRef, dict[str, bytes]]]:
    """Key, image and text members of each sample. As in webdataset, a sample's members follow one another.

    Raises UserError for a label or captions without an image: the set is incomplete.
    """
    try:
        with tarfile.open(shard, "r:") as tar:
            files = ((key_and_extension(file.name), file) for file in tar if file.isfile())
            named = ((*name, file) for name, file in files if name)
            for key, members in groupby(named, key=itemgetter(0)):
                image, texts = None, dict[str, bytes]()
                for _, extension, file in members:
                    if extension in IMAGE_SUFFIXES:
                        image = ImageRef(shard, file.offset_data, file.size)
                    elif extension in ("cls", "txt"):
                        content = tar.extractfile(file)
                        assert content is not None
                        texts[extension] = content.read()
                if image is not None:
                    yield key, image, texts
                elif texts:
                    raise UserError(
                        f"eval.sets: sample {key} of {shard} has no image ({', '.join(IMAGE_SUFFIXES)}); fetch it again"
                    )
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UserError(f"eval.sets: cannot read {shard} ({error}); fetch it again") from error


def _label(key: str, shard: Path, text: bytes | None) -> int:
    try:
        return int(text or b"")
    except ValueError:
        what = "no .cls member" if text is None else f"the label {text[:20]!r}"
        raise UserError(
            f"eval.sets: sample {key} of {shard} has {what}; it needs {key}.cls holding a whole number"
        ) from None


def _stripped(texts: Iterable[str]) -> list[str]:
    """The texts without spaces around them; empty ones are left out."""
    return [text for text in map(str.strip, texts) if text]


def _lines(file: Path) -> list[str]:
    return _stripped(file.read_text(encoding="utf-8").splitlines())


def _classnames(root: Path, labels: Sequence[int]) -> list[str]:
    file = root / "classnames.txt"
    if file.is_file():
        return _lines(file)
    name = root.name.lower()
    if _SUBSET_OF_IMAGENET.search(name) or ("imagenet" not in name and len(set(labels)) != 1000):
        raise UserError(
            f"eval.sets: {root} has no classnames.txt; write one class name a line, in the order of the labels"
        )
    from open_clip import IMAGENET_CLASSNAMES

    return list(IMAGENET_CLASSNAMES)


def _templates(root: Path, classes: int) -> list[Template]:
    """The set's own templates; without any, open_clip's for ImageNet or a single one."""
    file = root / "zeroshot_classification_templates.txt"
    if not file.is_file():
        if "imagenet" not in root.name.lower() and classes != 1000:
            return [_template("a photo of a {c}.")]
        from open_clip import OPENAI_IMAGENET_TEMPLATES

        return list(OPENAI_IMAGENET_TEMPLATES)
    lines = _lines(file)
    for line in lines:
        if not re.search(r"\{(c|classname)?\}", line):
            raise UserError(
                f"eval.sets: the template {line!r} of {file} has no place for the class; write {{c}} where it goes"
            )
    if not lines:
        raise UserError(f"eval.sets: {file} holds no template; write one a line, such as: a photo of a {{c}}.")
    return [_template(line) for line in lines]


def _template(line: str) -> Template:
    # Not str.format: templates may contain other braces.
    return lambda name: re.sub(r"\{(c|classname)?\}", lambda _: name, line)


# --- folders of class folders ------------------------------------------------------------------------------------------------------


def _is_image(file: Path) -> bool:
    return file.suffix.lower().removeprefix(".") in IMAGE_SUFFIXES


def _class_folders(root: Path) -> EvalSet:
    """Class folders in alphabetical order, named by classnames.txt, else by WordNet id as in ImageNet, else by the folders."""
    folders = sorted(folder for folder in root.iterdir() if folder.is_dir())
    images, labels = [], []
    for label, folder in enumerate(folders):
        files = sorted(file for file in folder.iterdir() if _is_image(file))
        images += [ImageRef(file) for file in files]
        labels += [label] * len(files)
    wnids = all(_WNID.fullmatch(folder.name) for folder in folders)
    templates = _templates(root, 1000 if wnids else 0)
    if (root / "classnames.txt").is_file():
        names = _lines(root / "classnames.txt")
        if len(names) != len(folders):
            raise UserError(
                f"eval.sets: {root} has {len(folders)} class folders but {len(names)} lines in classnames.txt"
            )
    elif wnids:
        names = _names_of_wnids(root, [folder.name for folder in folders])
    else:
        names = [folder.name.replace("_", " ") for folder in folders]
    return EvalSet(root.name, root, CLASSIFICATION, images, labels, names, templates)


def _names_of_wnids(root: Path, wnids: Sequence[str]) -> list[str]:
    from open_clip import IMAGENET_CLASSNAMES
    from timm.data import ImageNetInfo

    order = {wnid: index for index, wnid in enumerate(ImageNetInfo().label_names())}
    unknown = [wnid for wnid in wnids if wnid not in order]
    if unknown:
        raise UserError(
            f"eval.sets: {root / unknown[0]} is no class of ImageNet-1k; write the class names into classnames.txt"
        )
    return [IMAGENET_CLASSNAMES[order[wnid]] for wnid in wnids]


# --- caption files -----------------------------------------------------------------------------------------------------------------


def _caption_json(file: Path) -> EvalSet:
    """COCO's caption annotations, or Karpathy's split of COCO / Flickr30k (images marked `test`), images beside the file."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        entries = list(_karpathy(record) if "sentences" in record["images"][0] else _coco(record))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(f"eval.sets: {file} is neither COCO's caption JSON nor Karpathy's ({error!r})") from error
    entries = [(name, kept) for name, texts in entries if (kept := _stripped(texts))]
    if not entries:
        raise UserError(f"eval.sets: {file} holds no image with captions in its test split")
    find = _image_finder(file, entries[0][0])
    images = [ImageRef(find(name)) for name, _ in entries]
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
