"""The published sets of `known.yaml`: where each lies under a folder of sets, its main metric, and its source."""

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from clipscale.common.errors import UserError
from clipscale.eval.sets.item import RETRIEVAL, EvalSet

BOTH_R1 = ("image_to_text_r1", "text_to_image_r1")
"""The main metric of retrieval: DataComp's mean recall@1."""


@dataclass(frozen=True)
class KnownSet:
    """One entry."""

    name: str
    """CLIP_benchmark's, such as `vtab/caltech101`."""
    source: str
    folders: tuple[str, ...] = ()
    """Names of its folder, or of its caption file, in addition to those of the webdataset layouts."""
    metric: str = ""
    """The main metric. Empty: top-1, or the mean of both recalls at 1."""
    group: int | None = None
    """The column of the samples' metadata (.npy) that names their group."""
    classes: str = ""
    """CLIP_benchmark's key of its class names, where that is not the set's name."""

    @property
    def candidates(self) -> list[str]:
        """The names under which it is looked for: DataComp's, CLIP_benchmark's, then what it is itself called.

        A place within a folder comes before the folder: imagenet/val before imagenet.
        """
        plain = self.name.replace("/", "-")
        names = dict.fromkeys([plain, self.name, *self.folders])
        return [f"wds_{plain}_test", f"wds_{plain}", *sorted(names, key=lambda name: -name.count("/"))]

    def find(self, root: Path) -> Path | None:
        """Where it lies under `root`."""
        return next((root / name for name in self.candidates if (root / name).exists()), None)

    def main_metric(self, eval_set: EvalSet) -> tuple[str, ...]:
        return BOTH_R1 if not self.metric and eval_set.kind == RETRIEVAL else (self.metric or "top1",)


@cache
def table() -> dict[str, Any]:
    """The content of known.yaml: `sets` and `suites`."""
    content: dict[str, Any] = yaml.safe_load(resources.files(__package__).joinpath("known.yaml").read_text("utf-8"))
    return content


@cache
def known_sets() -> dict[str, KnownSet]:
    """All sets of the table, by name."""
    sets = {}
    for name, entry in table()["sets"].items():
        source = f"https://huggingface.co/datasets/clip-benchmark/wds_{name.replace('/', '-')}"
        sets[name] = KnownSet(name, **{"source": source} | entry | {"folders": tuple(entry.get("folders", ()))})
    return sets


def source_of(path: Path) -> str:
    """Where a set comes from, as the end of a message; nothing if its folder has no known name."""
    known = next((known for known in known_sets().values() if path.name in known.candidates), None)
    return f"; {known.name} comes from {known.source}" if known else ""


def published_classnames(known: KnownSet) -> list[str]:
    """CLIP_benchmark's class names of a set, by label; empty if it has none, or is not installed."""
    if find_spec("clip_benchmark") is None:
        return []
    return _of_clip_benchmark("en_classnames.json", known.classes, *_keys(known))


def published_templates(known: KnownSet) -> list[str]:
    """CLIP_benchmark's prompts of a set; like CLIP_benchmark, those of ImageNet for a set without its own.

    Raises UserError where it is not installed.
    """
    if find_spec("clip_benchmark") is None:
        raise UserError(
            f"eval.root: {known.name} brings no prompts; pip install clip-benchmark, which has the published ones, or "
            "write zeroshot_classification_templates.txt into its folder"
        )
    return _of_clip_benchmark("en_zeroshot_classification_templates.json", *_keys(known), "imagenet1k")


def _keys(known: KnownSet) -> tuple[str, str]:
    return known.name, known.name.rpartition("/")[2]


@cache
def _of_clip_benchmark(file: str, *keys: str) -> list[str]:
    """Of a file of CLIP_benchmark, the entry under the first of `keys` that it has."""
    tree = json.loads(resources.files("clip_benchmark.datasets").joinpath(file).read_text(encoding="utf-8"))
    return next((tree[key] for key in keys if key in tree), [])
