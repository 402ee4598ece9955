"""Loads evaluation sets: recognises the layout of each path, and gives each set a name of its own.

Loading a set notes each image's place, and its label or captions. Images are read when they are evaluated.
"""

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from clipscale.common import files
from clipscale.common.errors import UserError, to_user_error
from clipscale.data.sample import IMAGE_TYPES
from clipscale.data.shards.listing import SHARD_SUFFIXES
from clipscale.eval.sets import caption_files, folders, shards
from clipscale.eval.sets.item import EvalSet, by_reason
from clipscale.eval.sets.known import HELD_OUT, frame_width

# Names of folders that do not name a set: imagenet/val and places/val are two sets.
NO_NAMES = {"data", "dev", "eval", "holdout", "images", "train", *HELD_OUT}


def load_sets(paths: Sequence[str]) -> list[EvalSet]:
    """Load the sets of `eval.sets`. Each is named after its folder, and its parent if the folder is in NO_NAMES.

    Loaded sets are cached. Their paths exist. Raises UserError for a set that is empty or inconsistent.
    """
    sets = []
    for name in paths:
        path = Path(name).expanduser().absolute()
        loaded = load_set(path)
        sets.append(replace(loaded, name=_name(loaded.path if loaded.path.is_dir() else path)))
    return sets


def _name(path: Path) -> str:
    plain = path.with_suffix("") if path.suffix == ".json" else path
    if plain.name in NO_NAMES:
        return f"{plain.parent.name}/{plain.name}"
    return plain.name.removeprefix("wds_")


@lru_cache(maxsize=64)
def load_set(path: Path) -> EvalSet:
    """Recognise the layout of `path` and load the set. Raises UserError, whatever is wrong with its files."""
    with to_user_error(f"eval.sets: {path} cannot be read", "; fetch it again"):
        if path.is_file() and path.suffix != ".json":
            raise UserError(f"eval.sets: {path} is not a caption file (.json); give the set's folder, unpacked")
        loaded = caption_files.load(path) if path.is_file() else _load_folder(path)
    frame = frame_width(path)
    if frame:
        loaded = replace(loaded, images=[image._replace(frame=frame) for image in loaded.images])
    defects = Counter(image.defect for image in loaded.images)
    if defects.total() and not defects[""]:
        raise UserError(f"eval.sets: {path} has nothing to evaluate: {by_reason(defects)}; fetch it again")
    return loaded


def _load_folder(path: Path) -> EvalSet:
    """Recognise the layout of a folder.

    Caption files, in the folder or in one below, come before folders that may be classes. Shards come before caption
    files, since they have json files beside them.
    """
    if (path / "test" / "nshards.txt").is_file():
        return shards.load(path)
    inside = files.visible_entries(path)
    below = {file.name for file in inside if file.is_dir()}
    tars = [file for file in inside if file.name.endswith(SHARD_SUFFIXES)]
    captioned = {} if tars else caption_files.caption_files(path) or caption_files.published_files_below(path)
    if len(captioned) > 1:
        one, other, *_ = [str(file.relative_to(path)) for file in captioned]
        chosen = max(captioned, key=lambda file: any(name in file.stem for name in HELD_OUT))  # the first in a tie
        raise UserError(
            f"eval.sets: {path} has the captions {one} and {other}; give one, as eval.sets={shlex.quote(str(chosen))}"
        )
    if captioned:
        return caption_files.with_images(*captioned.popitem())
    held_out = [name for name in HELD_OUT if name in below]
    if held_out and "train" in below and below <= NO_NAMES:
        return _load_folder(path / held_out[0])
    if folders.has_class_folders(path):
        return folders.load(path)
    if tars:
        return shards.load_pairs(path, tars)
    if any(map(folders.is_image, inside)):
        beside = caption_files.caption_files(path.parent)
        if len(beside) == 1:
            return caption_files.with_images(*beside.popitem(), folder=path)
    raise UserError(
        f"eval.sets: {path} is none of the known layouts; it needs test/nshards.txt (CLIP_benchmark), shards of pairs "
        f"(*.tar), folders of images ({', '.join(IMAGE_TYPES)}) named after their classes, or one caption JSON; "
        f"`clipscale data pack {shlex.quote(str(path))} out=DIR` makes shards of pictures with texts"
    )
