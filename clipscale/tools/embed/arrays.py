"""The arrays of `clipscale embed`: where they are, and the set that they make, for `explore`.

D: feature width.
"""

import itertools
import json
import linecache
from bisect import bisect_right
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from clipscale.common import files
from clipscale.common.errors import library
from clipscale.common.record import Record
from clipscale.data.shards.listing import check_address
from clipscale.tools.embed.settings import KINDS

# The file of a folder that says what its features are.
NOTE = "features.json"
# The file of a folder that says where the samples of each of its files come from.
SHARDS = "shards.json"


def array_path(path: Path, kind: str) -> Path:
    return path.with_name(f"{path.name.removesuffix('.jsonl')}.{kind}.npy")


class EmbeddedSet:
    """A folder of arrays by `clipscale embed`, which somebody may have sent. Raises UserError for another folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Around what reads the files: raises UserError for damaged ones.
        self.reading = partial(
            library, f"data: {folder} is damaged, or not of `clipscale embed`", "; embed its shards again"
        )
        with self.reading():
            self.note = files.read_json(folder / NOTE)["features"]
            shards = files.read_json(folder / SHARDS)
            # The shard that has the pictures of each part.
            self.sources = {Path(name).stem: entry["source"] for name, entry in shards.items()}
            for source in self.sources.values():
                check_address(source, f"data: {folder}: source")
            self.paths = [folder / Path(name).name for name in shards]  # nothing elsewhere
            self.firsts = [0, *itertools.accumulate(int(entry["samples"]) for entry in shards.values())]
            for kind in KINDS:
                for _ in self.features(kind):  # each mapped file takes a descriptor: one at a time
                    pass

    def __len__(self) -> int:
        return self.firsts[-1]

    def features(self, kind: str) -> Iterator[np.ndarray]:
        """Of each part, (rows, D), mapped. Raises ValueError, and what numpy raises."""
        for path, (first, last) in zip(self.paths, itertools.pairwise(self.firsts)):
            array = np.lib.format.open_memmap(array_path(path, kind), mode="r")
            form = f"{self.note['dtype']} {(last - first, self.note['width'])}"
            found = f"{array.dtype} {array.shape}"
            if (last - first or len(array)) and (array.dtype.kind != "f" or found != form):
                raise ValueError(f"{array_path(path, kind).name}: {found}, not {form}")
            yield array

    def sample(self, number: int) -> Record:
        """The row of that number, counted through all parts, as the page names and shows it."""
        part = bisect_right(self.firsts, number) - 1
        path = self.paths[part]
        row = number - self.firsts[part]
        entry = json.loads(linecache.getline(str(path), row + 1))
        return {"part": path.stem, "row": row, "key": entry["key"], "caption": entry.get("caption") or ""}
