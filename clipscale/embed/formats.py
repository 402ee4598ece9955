"""Writes the features of a shard as .npy files, as a Parquet table, or as a shard. Each is complete or not there.

K: features of a sample (picture, text or both), D: feature width.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.config.data import FEATURES
from clipscale.config.tools import IMAGE, TEXT
from clipscale.data.decode import IMAGE_TYPES
from clipscale.data.features import encoded_row, npy_header
from clipscale.data.sample import RawSample, limits
from clipscale.data.shards.access import scheme_of
from clipscale.data.shards.counts import count_samples
from clipscale.data.shards.reader import ReadProblem, read_shard
from clipscale.data.shards.tables import part_of
from clipscale.data.shards.writer import shard_writer
from clipscale.embed.encode import Group

MEMBERS = {IMAGE: FEATURES, TEXT: f"text.{FEATURES}"}
"""A shard's members with features."""
ROWS = 1 << 14
"""Rows of an array in memory at once."""
LONGEST_LINE = 8 << 20
"""Bytes of a sample's line: a key and a caption of 1 MiB, of which JSON writes six for one."""


def write_npy(path: Path, groups: Iterable[Group], kinds: Sequence[str]) -> None:
    """NAME.image.npy and NAME.text.npy, (samples, D), and then NAME.jsonl with the key and caption of each row."""
    rows, lines = [], []
    for group in groups:
        rows.append(group.rows)
        for raw, caption in zip(group.raws, group.captions):
            lines.append(json.dumps({"key": raw.key} | ({"caption": caption} if caption is not None else {})) + "\n")
    for number, kind in enumerate(kinds):
        with files.replacing(array_path(path, kind)) as file:
            np.save(file, np.concatenate([part[:, number] for part in rows]) if rows else np.empty((0, 0)))
    files.write_text(path, "".join(lines))


def array_path(path: Path, kind: str) -> Path:
    """The array beside NAME.jsonl."""
    return path.with_name(f"{path.name.removesuffix('.jsonl')}.{kind}.npy")


@dataclass(frozen=True)
class StoredArray:
    """A .npy file (rows, D) whose header has been checked. It is open only while it is read: a set may have many."""

    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    """Bytes of the header."""

    def mapped(self) -> np.ndarray:
        """The rows. Raises OSError, also for a file that has become too short."""
        with files.opened(self.path) as file:
            try:
                return np.memmap(file, self.dtype, "r", self.offset, self.shape)
            except ValueError as error:
                raise OSError(f"{self.path}: {error}") from error


def stored_array(path: Path) -> StoredArray:
    """The array of features in a file. Raises OSError, and ValueError for another array or a damaged one."""
    with files.opened(path) as file:
        try:
            shape, by_columns, dtype = npy_header(file)
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from error
        if len(shape) != 2 or dtype.kind != "f" or by_columns:
            raise ValueError(f"{path.name} holds {dtype} {list(shape)}{' by columns' if by_columns else ''}")
        found = StoredArray(path, dtype, shape, file.tell())
        if file.seek(0, 2) < found.offset + shape[0] * shape[1] * dtype.itemsize:
            raise ValueError(f"{path.name} is cut off")
    return found


def write_parquet(path: Path, groups: Iterable[Group], kinds: Sequence[str]) -> None:
    """NAME.parquet with the columns `key`, `caption`, `image`, `text` (lists of D numbers), and `similarity`, their product."""
    pa, pq = _pyarrow()
    columns: dict[str, list[Any]] = {name: [] for name in ("key", "caption", *kinds)}
    parts = []
    for group in groups:
        columns["key"] += [_unicode(raw.key) for raw in group.raws]
        columns["caption"] += [caption and _unicode(caption) for caption in group.captions]
        parts.append(group.rows)
    rows = np.concatenate(parts) if parts else np.empty((0, len(kinds), 1), np.float32)
    arrays = {name: pa.array(columns[name], pa.string()) for name in ("key", "caption")}
    for number, kind in enumerate(kinds):
        values = np.ascontiguousarray(rows[:, number])
        missing = pa.array(np.isnan(values).all(1))
        arrays[kind] = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1], mask=missing)
    if len(kinds) == 2:
        product = np.einsum("nd,nd->n", *rows.astype(np.float32).swapaxes(0, 1))
        arrays["similarity"] = pa.array(product, mask=np.isnan(product))
    with files.replacing(path) as file:
        pq.write_table(pa.table(arrays), file)


def write_shard(path: Path, groups: Iterable[Group], kinds: Sequence[str]) -> None:
    """A shard whose samples have all members except pictures, and features as KEY.npy and KEY.text.npy."""
    with shard_writer(path) as writer:
        for group in groups:
            for raw, row in zip(group.raws, group.rows):
                writer.write(_sample(raw, row, kinds))


def _sample(raw: RawSample, row: np.ndarray, kinds: Sequence[str]) -> dict[str, str | bytes]:
    """The sample for webdataset's writer. The key of a table's row is its number: a picture's path has an extension."""
    left_out = {*IMAGE_TYPES, *MEMBERS.values(), ""}  # webdataset cannot write a member without an extension
    members = {name: data for name, data in raw.members.items() if name not in left_out}
    for kind, feature in zip(kinds, row):
        if not np.isnan(feature).all():
            members[MEMBERS[kind]] = encoded_row(feature)
    if not members:
        members["missing"] = b""  # the sample keeps its place in the order
    key = f"{part_of(raw.url).first + raw.index:09d}" if scheme_of(raw.url) == "table" else raw.key
    return {**members, "__key__": key}


def missing_npy(path: Path, kinds: Sequence[str]) -> dict[str, int]:
    """The rows of NaN of each array."""
    found = dict.fromkeys(kinds, 0)
    for kind in kinds:
        rows = stored_array(array_path(path, kind)).mapped()
        for start in range(0, len(rows), ROWS):
            found[kind] += int(np.isnan(rows[start : start + ROWS]).all(1).sum())
    return found


def missing_parquet(path: Path, kinds: Sequence[str]) -> dict[str, int]:
    """The nulls of each column."""
    return {kind: int(_pyarrow()[1].read_table(path, columns=[kind])[kind].null_count) for kind in kinds}


def missing_shard(path: Path, kinds: Sequence[str]) -> dict[str, int]:
    """The samples without each member."""
    found = Counter(dict.fromkeys(kinds, 0))
    for raw in read_shard(str(path), ReadProblem(), kinds=limits([MEMBERS[kind] for kind in kinds])):
        found.update(kind for kind in kinds if MEMBERS[kind] not in raw.members)
    return dict(found)


@dataclass(frozen=True)
class Format:
    """How the features of a shard are written."""

    end: str
    """Of the file whose presence says that all of them are complete."""
    write: Callable[[Path, Iterable[Group], Sequence[str]], None]
    """Consumes the groups. Raises OSError."""
    count: Callable[[Path], int]
    """Samples in a complete file."""
    missing: Callable[[Path, Sequence[str]], dict[str, int]]
    """Samples in a complete file that lack the feature of each kind."""
    all_members: bool = False
    """Whether it needs members other than pictures and captions."""


FORMATS = {
    "npy": Format(".jsonl", write_npy, lambda path: sum(1 for _ in files.lines(path, LONGEST_LINE)), missing_npy),
    "parquet": Format(
        ".parquet", write_parquet, lambda path: int(_pyarrow()[1].read_metadata(path).num_rows), missing_parquet
    ),
    "webdataset": Format(".tar", write_shard, lambda path: count_samples(str(path)), missing_shard, all_members=True),
}


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError("format=parquet needs pyarrow; pip install 'clipscale[parquet]'") from error
    return pyarrow, pyarrow.parquet


def _unicode(text: str) -> str:
    """The text without lone surrogates, which Parquet cannot hold."""
    return text.encode("utf-8", "replace").decode()
