"""Reads the arrays of `clipscale embed` as one set, for `explore` and `data select`.

D: feature width.
"""

import itertools
import json
import linecache
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np

from clipscale.common import files
from clipscale.common.errors import UserError, to_user_error
from clipscale.common.terminal import print_line
from clipscale.common.text import counted
from clipscale.data.shards.features import FEATURES_FILE
from clipscale.data.shards.listing import check_address
from clipscale.tools.embed.settings import SIDES

# A file beside the arrays. It says from which shard the samples of each array come.
SHARDS_FILE = "shards.json"


class FeaturesNote(TypedDict):
    """The origin of features: the weights that compute them, and how their inputs are made."""

    model: str
    # The digest of the image tower's weights.
    weights: str
    # The digest of the text tower's weights.
    text: str
    # D.
    width: int
    # The type of the numbers.
    dtype: str
    image_size: int
    mean: list[float]
    std: list[float]
    resize: str
    interpolation: str
    # The sources of captions.
    captions: list[str]
    # The logit scale of a teacher.
    scale: NotRequired[float]


class Sample(TypedDict):
    """A sample of an embedded set: `part` and `row` name its place."""

    part: str
    row: int
    key: str
    caption: str
    # The sample's number over all parts.
    number: NotRequired[int]
    # Its similarity to a query.
    score: NotRequired[float]
    # Its picture, in base64.
    jpeg: NotRequired[str]


class ShardEntry(TypedDict):
    """An entry of SHARDS_FILE for a file of features: the shard of its samples, and their number."""

    source: str
    # Missing until the file is complete.
    samples: NotRequired[int]


def array_path(path: Path, side: str) -> Path:
    return path.with_name(f"{path.name.removesuffix('.jsonl')}.{side}.npy")


@dataclass(frozen=True)
class EmbeddedSet:
    """A folder of arrays by `clipscale embed`, which somebody may have sent. `open_embedded_set` checks it."""

    folder: Path
    # The folder's description of its features.
    note: FeaturesNote
    # The shard that has the pictures of each part.
    sources: dict[str, str]
    # The list of samples of each part.
    paths: list[Path]
    # The number of each part's first sample. The last entry is the number of all samples.
    firsts: list[int]
    # Files that `embed` has not completed, which are no part.
    unfinished: int

    def damage_to_user_error(self) -> AbstractContextManager[None]:
        """Context of code that reads the files: raises UserError for damaged ones."""
        return damaged_set_to_user_error(self.folder)

    def __len__(self) -> int:
        return self.firsts[-1]

    def warn_of_unfinished(self) -> None:
        """Print how many files are left out because they are not complete."""
        if self.unfinished:
            print_line(
                f"warning: {self.folder}: {counted(self.unfinished, 'shard')} of {self.unfinished + len(self.paths)} "
                "left out: `clipscale embed` has not completed them; give its command again",
                error=True,
            )

    def features(self, side: str) -> Iterator[np.ndarray]:
        """The features of each part, (rows, D), mapped into memory. Raises ValueError, and what numpy raises."""
        for part in range(len(self.paths)):
            yield self.features_of_part(part, side)

    def features_of_part(self, part: int, side: str) -> np.ndarray:
        path = array_path(self.paths[part], side)
        rows = self.firsts[part + 1] - self.firsts[part]
        array = np.lib.format.open_memmap(path, mode="r")
        form = f"{self.note['dtype']} {(rows, self.note['width'])}"
        actual = f"{array.dtype} {array.shape}"
        if (rows or len(array)) and (array.dtype.kind != "f" or actual != form):
            raise ValueError(f"{path.name}: {actual}, not {form}")
        return array

    def place(self, number: int) -> tuple[int, int]:
        """The part and the row of the sample with that number, counted through all parts."""
        part = bisect_right(self.firsts, number) - 1
        return part, number - self.firsts[part]

    def feature(self, number: int, side: str) -> np.ndarray:
        """The feature (D,) of the sample with that number. Opens one part's file."""
        part, row = self.place(number)
        return self.features_of_part(part, side)[row]

    def sample(self, number: int) -> Sample:
        """The sample with that number, as the page names and shows it."""
        part, row = self.place(number)
        path = self.paths[part]
        entry = json.loads(linecache.getline(str(path), row + 1))
        return {"part": path.stem, "row": row, "key": entry["key"], "caption": entry.get("caption") or ""}


def damaged_set_to_user_error(folder: Path) -> AbstractContextManager[None]:
    return to_user_error(f"data: {folder} is damaged, or not of `clipscale embed`", "; embed its shards again")


def open_embedded_set(folder: Path) -> EmbeddedSet:
    """The set in a folder. Raises UserError for another folder, and if a file is damaged or missing."""
    if not folder.is_dir():
        raise UserError(f"data: there is no folder {folder}; give one that `clipscale embed` has written")
    with damaged_set_to_user_error(folder):
        note = files.read_json(folder / FEATURES_FILE)["features"]
        entries = files.read_json(folder / SHARDS_FILE)
        shards = {name: entry for name, entry in entries.items() if "samples" in entry}
        if not shards:
            raise ValueError(f"{SHARDS_FILE} names no complete file")
        sources = {Path(name).stem: entry["source"] for name, entry in shards.items()}
        for source in sources.values():
            check_address(source, f"data: {folder}: source")
        paths = [folder / Path(name).name for name in shards]  # nothing elsewhere
        firsts = [0, *itertools.accumulate(int(entry["samples"]) for entry in shards.values())]
        embedded = EmbeddedSet(
            folder=folder,
            note=note,
            sources=sources,
            paths=paths,
            firsts=firsts,
            unfinished=len(entries) - len(shards),
        )
        for side in SIDES:
            for _ in embedded.features(side):  # each mapped file takes a descriptor: one at a time
                pass
    return embedded
