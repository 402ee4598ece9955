"""Loads evaluation sets: recognises the layout of each path, and gives each set a name of its own.

Loading a set notes each image's place, and its label or captions. Images are read when they are evaluated. Probes have a second set, the
training split: train/ beside test/ in webdataset layouts, or a folder train beside val.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from clipscale.common.errors import UserError
from clipscale.eval.sets import captions, compositional, folders, originals, shards
from clipscale.eval.sets.archives import is_archive, stem
from clipscale.eval.sets.item import CLASSIFICATION, IMAGE_SUFFIXES, EvalSet
from clipscale.eval.sets.known import source_of

_FILES = (".json", ".txt", ".tar", ".gz", ".tgz", ".zip", ".mat")
"""Endings that are no part of a set's name."""
EVALUATION_FOLDERS = ("test", "val", "valid", "validation")
"""Names of the folder beside which a folder train is looked for."""


def load_sets(paths: Sequence[str]) -> list[EvalSet]:
    """Every set of `eval.sets`, named after its folder, and its parents where two folders share a name.

    Loaded sets are cached. Raises UserError for a set that is missing, empty or inconsistent.
    """
    resolved = [Path(path).expanduser().absolute() for path in paths]
    if len(set(resolved)) < len(resolved):
        raise UserError(f"eval.sets names a set twice: {', '.join(sorted(map(str, paths)))}; keep one of them")
    return [replace(load_set(path), name=name) for path, name in zip(resolved, _names(resolved))]


def _names(paths: Sequence[Path]) -> list[str]:
    """The fewest trailing path parts by which the sets differ."""
    plain = [
        path.with_name(stem(path) if is_archive(path) else Path(path.name).stem) if path.suffix in _FILES else path
        for path in paths
    ]
    for parts in range(1, max((len(path.parts) for path in plain), default=1) + 1):
        names = ["/".join(path.parts[-parts:]).removeprefix("wds_") for path in plain]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


@lru_cache(maxsize=64)
def load_set(path: Path, classnames: tuple[str, ...] = (), group: int | None = None) -> EvalSet:
    """Recognise the layout of `path` and load the set. Raises UserError, whatever is wrong with its files.

    classnames: of the published set, for labels without names. group: the column of the metadata that names the group.
    """
    try:
        return _load_set(path, classnames, group)
    except UserError as error:
        raise UserError(f"{error}{source_of(path)}") from error
    except Exception as error:  # each layout's reader has its own
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"eval.sets: {path} cannot be read ({reason}); fetch it again{source_of(path)}") from error


def _load_set(path: Path, classnames: tuple[str, ...], group: int | None) -> EvalSet:
    if not path.exists():
        raise UserError(
            f"eval.sets: {path} does not exist; give a folder in CLIP_benchmark's layout (PATH/test/nshards.txt)"
        )
    if path.is_dir() and (path / "test" / "nshards.txt").is_file():
        return shards.load(path, classnames, group)
    if (found := originals.load(path)) is not None:
        return found
    if path.is_file():
        if is_archive(path):
            return folders.load(path, classnames)
        if path.suffix not in (".json", ".txt"):
            raise UserError(
                f"eval.sets: {path} is neither a caption file (.json, .txt) nor an archive (.tar, .tgz, .zip); give the set's folder"
            )
        return captions.load(path)
    if folders.is_objectnet(path):
        return folders.load_objectnet(path)
    if captions.is_multilingual(path):
        return captions.load_multilingual(path)
    if compositional.found(path):
        return compositional.load(path)
    if folders.found(path):
        return folders.load(path, classnames)
    jsons = sorted(path.glob("*.json"))
    if len(jsons) == 1:
        return captions.load(jsons[0])
    raise UserError(
        f"eval.sets: {path} is none of the known layouts; it needs test/nshards.txt (CLIP_benchmark), folders of images "
        f"({', '.join(IMAGE_SUFFIXES)}) named after their classes, or one caption JSON; docs/evaluation.md lists all"
    )


def probes(sets: Sequence[EvalSet], wanted: Sequence[int | None]) -> list[EvalSet]:
    """The probes of all classification sets that have a training split: each set once for each number of shots (None: all pictures).

    Raises UserError if no set has one, or if the classes of a split are others.
    """
    found = []
    for item in sets if wanted else ():
        train = train_split(item) if item.kind == CLASSIFICATION else None
        for shots in wanted if train else ():
            mark = "linear probe" if shots is None else f"{shots}-shot"
            probe = replace(item, train=train, shots=shots, templates=(), groups=(), inliers=None, metric=())
            found.append(replace(probe, marks=(*(m for m in item.marks if not m.startswith("prompts ")), mark)))
    if wanted and not found:
        raise UserError(
            "eval.probe: none of the sets has a training split; a probe needs PATH/train/nshards.txt beside PATH/test, or a folder train "
            "beside the folder of class folders, which is called test, val, valid or validation"
        )
    return found


def train_split(item: EvalSet) -> EvalSet | None:
    """The pictures of the training split, at most as many as a limited set has; None if there is no split. Raises UserError."""
    train = _train_split(item.path, tuple(item.classnames))
    return train.limited(item.size if item.whole is not None else None) if train else None


@lru_cache(maxsize=64)
def _train_split(root: Path, classnames: tuple[str, ...]) -> EvalSet | None:
    stem = root.name.partition(".")[0]
    beside = root.with_name("train" + root.name.removeprefix(stem))  # of an archive val.tar, train.tar
    if (root / "train" / "nshards.txt").is_file():
        found = shards.load(root, classnames, split="train")
    elif stem in EVALUATION_FOLDERS and beside.exists():
        found = folders.load(beside, classnames)
    else:
        return None
    if tuple(found.classnames) != classnames:
        raise UserError(f"eval.probe: the training split {found.path} of {root} has other classes; fetch the set again")
    return found
