"""Reads which samples a run takes from its shards, and how often: `data.only_keys` and `data.sample_weights`."""

import hashlib
import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from clipscale.common import files
from clipscale.common.errors import UserError, to_user_error
from clipscale.config.data import DataConfig
from clipscale.data.hashing import digest, utf8
from clipscale.data.sample import BrokenSampleError, json_fields

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

# A row of a table of weights: the halves of a uid or of a key's digest, and the weight.
WEIGHT_ROW_DTYPE = np.dtype([("f0", "u8"), ("f1", "u8"), ("weight", "f4")])
UID_DTYPE = np.dtype("u8,u8")
# Rows of a Parquet file that are read at a time. A few bytes may stand for many equal cells of a megabyte.
BATCH_ROWS = 2**10
# Bytes of a column of a Parquet file that are read at a time.
BUFFER_BYTES = 1 << 20
# A Parquet file with more rows per byte is refused. Even consecutive keys take a tenth of a byte each.
ROWS_PER_BYTE = 32
# Bound on a weight: a reader counts a sample's repeats one by one.
MAX_WEIGHT = 10_000


class SampleTable(NamedTuple):
    """The samples that a file lists, sorted by the halves of a uid or a digest. Large tables stay on the disk."""

    rows: np.ndarray
    # Whether a sample is found by the `uid` in its json; otherwise by its key.
    has_uids: bool
    # Most times that a sample may come in an epoch.
    max_copies: int = 1

    def digest(self) -> str:
        """A digest of the rows: the same for every file that lists the same. 10^7 rows take half a second."""
        return hashlib.blake2b(self.rows.view("u1").data).hexdigest()


class SubsetFile(NamedTuple):
    """A file that lists samples, as a setting names it."""

    # The value of the setting.
    value: str
    # Whether the setting is `data.sample_weights`; otherwise it is `data.only_keys`.
    has_weights: bool

    @property
    def setting(self) -> str:
        """The setting with its value, for messages."""
        return f"data.{'sample_weights' if self.has_weights else 'only_keys'}={self.value}"

    @property
    def path(self) -> Path:
        return Path(self.value).expanduser().absolute()


@dataclass(frozen=True)
class Subset:
    """The samples that a file lists. Pickles as the file's path: each process reads the file itself."""

    file: SubsetFile
    # A digest of the file's path, size and time of change, and of the form of its index.
    name: str

    def __reduce__(self) -> tuple[object, ...]:
        return open_subset, (self.file,)

    @property
    def table(self) -> SampleTable:
        return _read(self.file, self.name)

    def may_repeat(self, key: str) -> bool:
        """Whether the sample with this key, and any json, may come more than once in an epoch."""
        table = self.table
        return table.max_copies > 1 and (table.has_uids or self.weight(key, b"") > 1)

    def weight(self, key: str, json_bytes: bytes) -> float:
        """How often the sample with this key and json comes in an epoch, on average; 0 if it is not listed."""
        rows, has_uids, *_ = self.table
        try:
            uid = json_fields(json_bytes)["uid"] if has_uids else _digest(key).hex()
            if not isinstance(uid, str):
                return 0.0
            halves = int(uid[:16], 16), int(uid[16:], 16)
        except (KeyError, TypeError, ValueError, BrokenSampleError):
            return 0.0
        row = bisect_left(rows, halves, key=lambda row: row.item()[:2])
        if row == len(rows) or rows[row].item()[:2] != halves:
            return 0.0
        return float(rows[row]["weight"]) if rows.dtype == WEIGHT_ROW_DTYPE else 1.0


def open_subset(file: SubsetFile) -> Subset:
    """The subset that a file lists. Raises UserError if there is no such file."""
    with to_user_error(f"{file.setting}: cannot be read"):
        state = file.path.stat()
    return Subset(file, digest(f"{file.path} {state.st_size} {state.st_mtime_ns} weights 2"))


def subset_of(config: DataConfig) -> Subset | None:
    """The subset of `data.only_keys` or `data.sample_weights`. Raises UserError if there is no such file."""
    if config.sample_weights is not None:
        return open_subset(SubsetFile(config.sample_weights, has_weights=True))
    return open_subset(SubsetFile(config.only_keys, has_weights=False)) if config.only_keys is not None else None


def _digest(key: str) -> bytes:
    """The digest of a key by `utf8`: files that list samples can hold no bytes that are not UTF-8."""
    return hashlib.blake2b(utf8(key).encode(), digest_size=16).digest()


@lru_cache(maxsize=1)
def _read(file: SubsetFile, name: str) -> SampleTable:
    """The file's table. Raises UserError."""
    with to_user_error(f"{file.setting}: cannot be read"):
        if file.has_weights:
            return _weights(file, name)
        if file.path.suffix != ".npy":
            keys = files.read_text(file.path).split("\n")
            digests = np.frombuffer(b"".join(_digest(key.strip()) for key in keys), ">u8").astype("u8")
            return SampleTable(np.unique(digests.view(UID_DTYPE)), has_uids=False)
        pairs = np.lib.format.open_memmap(file.path, mode="r")
    if pairs.dtype != UID_DTYPE or pairs.ndim != 1:
        raise UserError(f"{file.setting}: {pairs.dtype} {pairs.shape}, not rows of numpy's dtype('u8,u8')")
    if (pairs["f0"][:-1] > pairs["f0"][1:]).any():
        raise UserError(f"{file.setting}: its rows are not in order; sort and save them again with numpy")
    return SampleTable(pairs, has_uids=True)


def _weights(file: SubsetFile, name: str) -> SampleTable:
    """A table of weights. Writes its sorted rows to the user's cache. Raises UserError, and what pyarrow raises."""
    table = parquet_file(file.path)
    names = table.schema_arrow.names
    if "uid" in names:
        column = "uid"
    elif "key" in names:
        column = "key"
    else:
        column = ""
    if not column or "weight" not in names:
        raise UserError(f"{file.setting}: has the columns {', '.join(names)}, not key or uid, and weight")
    cached = files.user_cache() / "weights" / f"{name}.npy"
    if not cached.exists():
        rows = np.concatenate([np.zeros(0, WEIGHT_ROW_DTYPE), *_rows_of(table, column)])
        rows = rows[np.lexsort((rows["f1"], rows["f0"]))]
        bad = ~((rows["weight"] >= 0) & (rows["weight"] <= MAX_WEIGHT))  # NaN too
        halves = rows[["f0", "f1"]]
        twice = halves[1:] == halves[:-1]
        problem = ""
        if bad.any():
            problem = f"{bad.sum()} weights are not numbers from 0 to {MAX_WEIGHT:,}"
        elif twice.any():
            problem = f"{twice.sum()} samples come twice"
        if problem:
            raise UserError(f"{file.setting}: {problem}; give each sample one weight")
        cached.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(cached) as new:  # several processes may write: the last one wins
            np.save(new, rows)
    rows = np.load(cached, mmap_mode="r")
    if not rows["weight"].any():
        raise UserError(f"{file.setting}: all weights are 0; nothing is left to train on")
    return SampleTable(rows, column == "uid", math.ceil(rows["weight"].max()))


def parquet_file(file: str | Path) -> "ParquetFile":
    """Open a Parquet file.

    Raises UserError without pyarrow, and for more than ROWS_PER_BYTE rows a byte. Also raises what pyarrow raises.
    """
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise UserError("Parquet needs pyarrow: pip install 'clipscale[parquet]'") from error
    table = ParquetFile(file, buffer_size=BUFFER_BYTES, pre_buffer=False)
    size = Path(file).stat().st_size
    if table.metadata.num_rows > ROWS_PER_BYTE * size:
        raise UserError(
            f"{file}: {table.metadata.num_rows:,} rows in {size:,} bytes; give each sample a row of its own"
        )
    return table


def _rows_of(table: "ParquetFile", column: str) -> Iterator[np.ndarray]:
    """The rows of a Parquet file, BATCH_ROWS at a time."""
    to_digest = bytes.fromhex if column == "uid" else _digest
    for batch in table.iter_batches(BATCH_ROWS, columns=[column, "weight"]):
        rows = np.empty(len(batch), WEIGHT_ROW_DTYPE)
        halves = np.frombuffer(b"".join(map(to_digest, batch[column].to_pylist())), ">u8").reshape(-1, 2)
        rows["f0"] = halves[:, 0]
        rows["f1"] = halves[:, 1]
        rows["weight"] = batch["weight"].cast("float32")
        yield rows
