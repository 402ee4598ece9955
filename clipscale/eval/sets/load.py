"""Loads evaluation sets: recognises the layout of each path, and gives each set a name of its own.

Loading a set notes each image's place, and its label or captions. Images are read when they are evaluated.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from clipscale.common.errors import UserError, one_line
from clipscale.eval.sets import captions, folders, shards
from clipscale.eval.sets.item import IMAGE_SUFFIXES, EvalSet

NO_NAMES = {"data", "dev", "eval", "images", "test", "train", "val", "valid", "validation"}
"""Folders that say nothing of their set: imagenet/val and places/val, evaluated one after the other, are two sets."""


def load_sets(paths: Sequence[str]) -> list[EvalSet]:
    """Every set of `eval.sets`, named after its folder, with the parent where the folder says nothing.

    Loaded sets are cached. Raises UserError for a set that is missing, empty or inconsistent.
    """
    resolved = [Path(path).expanduser().absolute() for path in paths]
    return [replace(load_set(path), name=_name(path)) for path in resolved]


def _name(path: Path) -> str:
    plain = path.with_suffix("") if path.suffix == ".json" else path
    if plain.name in NO_NAMES:
        return f"{plain.parent.name}/{plain.name}"
    return plain.name.removeprefix("wds_")


@lru_cache(maxsize=64)
def load_set(path: Path) -> EvalSet:
    """Recognise the layout of `path` and load the set. Raises UserError, whatever is wrong with its files."""
    try:
        if not path.exists():
            raise UserError(f"eval.sets: {path} does not exist; give the folder of a set, or a caption file")
        if path.is_file() and path.suffix != ".json":
            raise UserError(f"eval.sets: {path} is no caption file (.json); give the set's folder, unpacked")
        if (path / "test" / "nshards.txt").is_file():
            return shards.load(path)
        if path.is_dir() and folders.has_class_folders(path):
            return folders.load(path)
        if tars := sorted(path.glob("*.tar")):
            return shards.load_pairs(path, tars)
        jsons = [path] if path.is_file() else list(path.glob("*.json"))
        if len(jsons) == 1:
            return captions.load(jsons[0])
    except (OSError, ValueError) as error:  # a file that cannot be read, or a text that is not UTF-8
        raise UserError(f"eval.sets: {path} cannot be read ({one_line(error)}); fetch it again") from error
    raise UserError(
        f"eval.sets: {path} is none of the known layouts; it needs test/nshards.txt (CLIP_benchmark), shards of pairs "
        f"(*.tar), folders of images ({', '.join(IMAGE_SUFFIXES)}) named after their classes, or one caption JSON"
    )
