"""An embedded set as arrays, which `clipscale embed format=npy` and convert.py write, and exact search in it.

A search maps one file of features at a time, and compares every row, tile by tile. A caption is read when its sample is shown.

n: rows of a tile, D: feature width, k: results.
"""

import json
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.config.tools import IMAGE, TEXT
from clipscale.data.features import NOTE
from clipscale.embed.formats import LONGEST_LINE, StoredArray, array_path, stored_array
from clipscale.embed.note import SHARDS

KINDS = (IMAGE, TEXT)
TILE = 1 << 14
"""Rows compared at once: 32 MiB of 512 float32 numbers."""


def kinds_of(note: Mapping[str, Any]) -> tuple[str, ...]:
    """The features that a folder's note names."""
    return tuple(kind for kind in KINDS if kind in note.get("kinds", [IMAGE]))


class Sample(NamedTuple):
    """A row of a set, as the page names and shows it."""

    part: str
    """The file that it is in, without `.jsonl`."""
    row: int
    key: str
    caption: str


@dataclass(frozen=True)
class Part:
    """The rows of one shard."""

    name: str
    source: str
    """Where its pictures are."""
    path: Path
    lines: "array[int]"
    """Where the line of each row begins in `path`."""
    features: dict[str, StoredArray]
    """Of each kind; empty for a part without rows."""


class EmbeddedSet:
    """The parts of a folder. Raises UserError for a folder that holds anything else, and for damaged files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with files.reported("data", folder / SHARDS, "embed the set again"):
            try:
                self._read()
            except (KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"an entry is missing or of another type: {error}") from error
        self.firsts = np.cumsum([0, *(len(part.lines) for part in self.parts)]).tolist()
        if not len(self):
            raise UserError(f"data={folder}: the set has no samples")

    def _read(self) -> None:
        self.note: dict[str, Any] = dict(files.read_tree(self.folder / NOTE)["features"])
        sources = {str(name): str(entry["source"]) for name, entry in files.read_tree(self.folder / SHARDS).items()}
        if others := [name for name in sources if not name.endswith(".jsonl")]:
            raise ValueError(f"{others[0]} is of another format than the others; embed into a folder of its own")
        self.kinds = kinds_of(self.note)
        self.parts = [self._part(name, source) for name, source in sources.items()]

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def _part(self, name: str, source: str) -> Part:
        path = self.folder / Path(name).name
        lines: array[int] = array("q")
        at = 0
        for line in files.lines(path, LONGEST_LINE):
            lines.append(at)
            at += len(line)
        kinds = self.kinds if lines else ()
        features = {kind: self._stored(array_path(path, kind), len(lines)) for kind in kinds}
        return Part(path.name.removesuffix(".jsonl"), source, path, lines, features)

    def _stored(self, path: Path, rows: int) -> StoredArray:
        found = stored_array(path)
        if found.shape != (rows, int(self.note["width"])) or found.dtype not in (np.float16, np.float32):
            raise ValueError(f"{path.name} holds {found.dtype} {list(found.shape)}")
        return found

    def features(self, kind: str) -> Iterator[np.ndarray]:
        """Of each part, (rows, D), mapped; none if the set was embedded without them. Raises OSError."""
        return (part.features[kind].mapped() for part in self.parts if kind in part.features)

    def sample(self, number: int) -> Sample:
        """The row of that number, counted through all parts. Raises OSError."""
        place = bisect_right(self.firsts, number) - 1
        part, row = self.parts[place], number - self.firsts[place]
        with files.opened(part.path) as file:
            file.seek(part.lines[row])
            line = file.readline(LONGEST_LINE)
        try:
            found = json.loads(line)
            return Sample(part.name, row, str(found["key"]), str(found.get("caption") or ""))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise OSError(f"{part.path}: row {row} is damaged") from error


def nearest(parts: Iterable[np.ndarray], query_D: Tensor, count: int) -> list[tuple[int, float]]:
    """The k = `count` rows with the largest dot products, and these, best first; of equal ones the first row.

    Rows with a NaN are left out.

    parts: arrays (n, D) of any float type, often mapped from files; their rows are numbered through.
    """
    scores, rows = query_D.new_empty(0), torch.empty(0, dtype=torch.int64, device=query_D.device)
    first, space = 0, query_D.new_empty(TILE, len(query_D))  # allocating it for each tile takes longer than the product
    for part in parts:
        for start in range(0, len(part), TILE):
            stored = torch.from_numpy(np.array(part[start : start + TILE]))
            tile = space[: len(stored)].copy_(stored)
            found = (tile @ query_D).nan_to_num(nan=-torch.inf)
            numbers = torch.arange(first + start, first + start + len(tile), device=query_D.device)
            scores, rows = torch.cat([scores, found]), torch.cat([rows, numbers])
            kept = scores.argsort(descending=True, stable=True)[:count]
            scores, rows = scores[kept], rows[kept]
        first += len(part)
    return [(row, score) for row, score in zip(rows.tolist(), scores.tolist()) if score > -torch.inf]
