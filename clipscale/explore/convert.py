"""Writes the features of `embed format=parquet` and `webdataset` as those of `npy`, which a search maps. No model takes part.

D: feature width.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clipscale.common import files
from clipscale.common.terminal import say
from clipscale.config.data import DataConfig
from clipscale.data.features import NOTE, StoredFeatures
from clipscale.data.order import CounterRNG
from clipscale.data.sample import BrokenSampleError, RawSample, limits
from clipscale.data.shards import parquet
from clipscale.data.shards.reader import ReadProblem, read_shard
from clipscale.embed.encode import Group, caption_members, first_caption
from clipscale.embed.formats import MEMBERS, write_npy
from clipscale.embed.note import SHARDS
from clipscale.explore.embedded import kinds_of

ROWS = 1 << 12
"""Samples that are read together."""


def as_arrays(folder: Path, out: Path, data: DataConfig) -> Path:
    """The folder, if it holds arrays; else one in `out` with the same features, which is written by the first call. Raises UserError.

    `data` says which members of shards are captions.
    """
    with files.reported("data", folder / SHARDS, "embed the set again"):
        try:
            note = dict(files.read_tree(folder / NOTE)["features"])
            entries = {Path(name).name: dict(entry) for name, entry in files.read_tree(folder / SHARDS).items()}
            if any(name.endswith(".jsonl") for name in entries):
                return folder
            return _converted(folder, out, note, entries, data)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"an entry is missing or of another type: {error}") from error


def _converted(folder: Path, out: Path, note: dict[str, Any], entries: dict[str, Any], data: DataConfig) -> Path:
    """Raises ValueError for features that are damaged, and OSError."""
    abouts = {name: (folder / name).stat() for name in entries}
    captions = caption_members(data)
    facts = [str(folder.resolve()), note, captions, {n: [one.st_size, one.st_mtime_ns] for n, one in abouts.items()}]
    key = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()
    place, kinds = files.inner_folder(out, key), kinds_of(note)
    readers = {kind: StoredFeatures(MEMBERS[kind], int(note["width"]), str(note["dtype"])) for kind in kinds}
    parts = {name: f"{name.rpartition('.')[0]}.jsonl" for name in entries}
    if len(set(parts.values())) < len(parts):
        raise ValueError("a shard is there in two formats; embed each into a folder of its own")
    for name, entry in entries.items():
        path = place / parts[name]
        if not path.is_file():
            table = name.endswith(".parquet")
            read = _of_table(folder / name, readers) if table else _of_shard(folder / name, readers, captions)
            write_npy(path, _all(read, name, entry["samples"]), kinds)
            say(f"{folder / name}: its features are kept in {path.parent}")
    shards = {parts[name]: {"source": str(entry["source"])} for name, entry in entries.items()}
    files.write_json(place / SHARDS, shards)
    files.write_json(place / NOTE, {"features": note})
    return place


def _all(groups: Iterator[Group], name: str, samples: int) -> Iterator[Group]:
    """The groups. Raises ValueError at their end if they are not so many samples."""
    found = 0
    for group in groups:
        found += len(group.raws)
        yield group
    if found != samples:
        raise ValueError(f"{name} has {found} samples, not {samples}")


def _of_table(path: Path, readers: dict[str, StoredFeatures]) -> Iterator[Group]:
    for batch in parquet.batches(str(path), ROWS):
        keys, captions = (parquet.plain_values(batch.column(name)) for name in ("key", "caption"))
        raws = [RawSample(str(path), str(key), number, {}) for number, key in enumerate(keys)]
        rows = np.stack([_rows(batch.column(kind), one) for kind, one in readers.items()], 1)
        yield Group(raws, captions, rows)


def _rows(column: Any, reader: StoredFeatures) -> np.ndarray:
    """The features (n, D) of a column; of a null, NaN."""
    rows = np.full((len(column), reader.width), np.nan, reader.dtype)
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    values = column.flatten().to_numpy(zero_copy_only=False)
    if getattr(column.type, "list_size", None) != reader.width or values.dtype != rows.dtype:
        raise ValueError(f"a column of {column.type}, not of {reader.width} numbers of {reader.dtype}")
    rows[valid] = values.reshape(-1, reader.width)
    return rows


def _of_shard(path: Path, readers: dict[str, StoredFeatures], captions: Sequence[str]) -> Iterator[Group]:
    problem, first = ReadProblem(), next(iter(readers.values()))
    members = limits([reader.member for reader in readers.values()], [one.partition(":")[0] for one in captions])
    for raw in read_shard(str(path), problem, kinds=members):
        row = np.full((1, len(readers), first.width), np.nan, first.dtype)
        for number, reader in enumerate(readers.values()):
            if reader.member in raw.members:
                try:
                    reader(raw.members[reader.member], CounterRNG(0), row[0, number])
                except BrokenSampleError as error:
                    raise ValueError(f"{path.name}: sample {raw.key}: {error}") from error
        yield Group([raw], [first_caption(raw, captions)], row)
    if problem.reason:
        raise ValueError(f"{path.name}: {problem.reason} ({problem.detail})")
