"""Finds the training split of a classification set, for probes: train/ beside test/ in webdataset layouts, or a folder train beside val."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from clipscale.errors import UserError
from clipscale.eval.sets import folders, shards
from clipscale.eval.sets.item import CLASSIFICATION, EvalSet

EVALUATION_FOLDERS = ("test", "val", "valid", "validation")
"""Names of the folder beside which a folder train is looked for."""


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
    train = _load(item.path, tuple(item.classnames))
    return train.limited(item.size if item.whole is not None else None) if train else None


@lru_cache(maxsize=64)
def _load(root: Path, classnames: tuple[str, ...]) -> EvalSet | None:
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
