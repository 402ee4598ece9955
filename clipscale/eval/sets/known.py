"""The published sets of `known.yaml`: where each lies under a folder of sets, its main metric, and where it comes from."""

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
    """CLIP_benchmark's key of its class names."""
    inliers: str = ""
    """The set that has pictures of its classes, if its own pictures are of none."""
    originals: tuple[dict[str, Any], ...] = ()
    """How the files of its own site are read, in each layout; `Original` of originals.py has the keys."""

    @property
    def candidates(self) -> list[str]:
        """The names under which it is looked for: DataComp's, CLIP_benchmark's, then what it is itself called.

        A place within a folder comes before the folder: imagenet/val before imagenet.
        """
        plain = self.name.replace("/", "-")
        packed = [archive for layout in self.originals for archive in layout.get("archive", [])]
        own = dict.fromkeys([plain, self.name, *self.folders, f"{plain}.tar", *packed])
        return [f"wds_{plain}_test", f"wds_{plain}", *sorted(own, key=lambda name: -name.count("/"))]

    def find(self, root: Path) -> Path | None:
        """Where it lies under `root`."""
        return next((root / name for name in self.candidates if (root / name).exists()), None)

    def missing(self, root: Path) -> str:
        """One line: what is missing, as what it is looked for, and where it comes from."""
        packed = [root / (name + end) for name in self.candidates for end in (".tar.gz", ".tgz", ".zip")]
        archive = next((path for path in packed if path.is_file()), None)
        if archive:
            return f"{self.name} is packed; give {archive} in eval.sets if it has class folders, else unpack it there"
        parts = [" + ".join(layout["archives"]) for layout in self.originals if "archives" in layout]
        names = ", ".join([*self.candidates, *(f"a folder {self.candidates[2]} with {names}" for names in parts)])
        return f"{self.name} is missing in {root} (as {names}); it comes from {self.source}"

    def main_metric(self, item: EvalSet) -> tuple[str, ...]:
        return BOTH_R1 if not self.metric and item.kind == RETRIEVAL else (self.metric or "top1",)


@cache
def table() -> dict[str, Any]:
    """The content of known.yaml: `sets` and `suites`."""
    content: dict[str, Any] = yaml.safe_load(resources.files(__package__).joinpath("known.yaml").read_text("utf-8"))
    return content


@cache
def known_sets() -> dict[str, KnownSet]:
    """All sets of the table, by name."""
    found = {}
    for name, entry in table()["sets"].items():
        given: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()
        }
        given.setdefault("source", f"https://huggingface.co/datasets/clip-benchmark/wds_{name.replace('/', '-')}")
        found[name] = KnownSet(name, **given)
    return found


def source_of(path: Path) -> str:
    """Where a set comes from, as the end of a message; nothing if its folder has no known name."""
    known = next((known for known in known_sets().values() if path.name in known.candidates), None)
    return f"; {known.name} comes from {known.source}" if known else ""


def published_classnames(known: KnownSet) -> list[str] | None:
    """CLIP_benchmark's class names of a set, by label; None if it has none, or is not installed."""
    return (
        _of_clip_benchmark("en_classnames.json", known.classes, *_keys(known)) if find_spec("clip_benchmark") else None
    )


def published_templates(known: KnownSet, default: list[str] | None = None) -> list[str]:
    """CLIP_benchmark's prompts of a set; like CLIP_benchmark, those of ImageNet for a set without its own.

    Raises UserError where it is not installed, unless there is a default.
    """
    if find_spec("clip_benchmark") is None:
        if default is not None:
            return default
        raise UserError(
            f"eval.root: {known.name} brings no prompts; pip install clip-benchmark, which has the published ones, or write "
            "zeroshot_classification_templates.txt into its folder, or give eval.prompts"
        )
    return _of_clip_benchmark("en_zeroshot_classification_templates.json", *_keys(known), "imagenet1k") or []


def _keys(known: KnownSet) -> tuple[str, str]:
    return known.name, known.name.rpartition("/")[2]


@cache
def _of_clip_benchmark(file: str, *keys: str) -> list[str] | None:
    """Of a file of CLIP_benchmark, the entry under the first of `keys` that it has."""
    tree = json.loads(resources.files("clip_benchmark.datasets").joinpath(file).read_text(encoding="utf-8"))
    return next((tree[key] for key in keys if key in tree), None)
