"""The published sets of `known.yaml`: where each lies under a folder of sets, its main metric, and its source."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from clipscale.common import files

# The source of most sets.
WEBDATASETS = "https://huggingface.co/datasets/clip-benchmark"
# Names of folders that hold the evaluation part of a set.
HELD_OUT = ("val", "valid", "validation", "test")


@dataclass(frozen=True)
class KnownSet:
    """One entry of `known.yaml`."""

    # Its name in CLIP_benchmark, such as `vtab/caltech101`.
    name: str
    source: str
    # Names of its folder, or of its caption file, beside the names in webdataset layouts.
    folders: Sequence[str] = ()
    # The main metric; if empty, its kind's.
    metric: str = ""
    # Width of a red frame around its pictures, in pixels.
    frame: int = 0

    @property
    def candidates(self) -> list[str]:
        """The names under which it is looked for: DataComp's, CLIP_benchmark's, then its own.

        A place within a folder comes before the folder: imagenet/val before imagenet.
        """
        plain = self.name.replace("/", "-")
        names = dict.fromkeys([plain, self.name, *self.folders])
        return [f"wds_{plain}_test", f"wds_{plain}", *sorted(names, key=lambda name: -name.count("/"))]

    @property
    def ends(self) -> tuple[str, ...]:
        """The possible endings of a path to the set."""
        return tuple(f"/{name}" for name in self.candidates)

    def find(self, root: Path) -> Path | None:
        return next((root / name for name in self.candidates if (root / name).exists()), None)


def frame_width(path: Path) -> int:
    """Width of the frame around the pictures of a folder, by the name of a published set; 0 for none."""
    lower = path.as_posix().lower()
    framed = [known_set for known_set in known_sets().values() if known_set.frame]
    return max((known_set.frame for known_set in framed if lower.endswith(known_set.ends)), default=0)


@cache
def known_sets() -> dict[str, KnownSet]:
    return {
        name: KnownSet(name, **{"source": f"{WEBDATASETS}/wds_{name.replace('/', '-')}"} | entry)
        for name, entry in files.read_yaml(Path(__file__).with_name("known.yaml"))["sets"].items()
    }
