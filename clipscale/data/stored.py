"""Features of a frozen image tower in the place of pictures: shards whose samples hold a row of numbers, and the note beside them.

D: feature width.
"""

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clipscale.data.decode import BrokenSampleError
from clipscale.data.order import CounterRNG
from clipscale.errors import UserError

NOTE = "features.json"
"""Lies beside the shards and says where the features come from."""
DTYPES = ("float16", "float32")


@dataclass(frozen=True)
class StoredRows:
    """A member's bytes (NumPy's own format) to a feature row; used where pictures have their transform."""

    member: str
    width: int
    dtype: str

    def __call__(self, data: bytes, rng: CounterRNG, out: np.ndarray) -> None:
        """Write the row to `out`, (D,). Raises BrokenSampleError (`bad_features`) before anything is written."""
        try:
            row = np.load(io.BytesIO(data), allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise BrokenSampleError("bad_features", str(error)) from error
        if row.shape != (self.width,) or row.dtype != self.dtype or not np.isfinite(row).all():
            raise BrokenSampleError("bad_features", f"{row.dtype} {row.shape}, not {self.dtype} ({self.width},)")
        np.copyto(out, row)


def encoded_row(row: np.ndarray) -> bytes:
    """A feature row as a shard's member."""
    out = io.BytesIO()
    np.save(out, row, allow_pickle=False)
    return out.getvalue()


def read_note(urls: list[str]) -> dict[str, Any]:
    """What was noted beside the shards. Raises UserError where there is no note, or several that differ."""
    notes: dict[str, Any] = {}
    for folder in sorted({str(Path(url).parent) for url in urls}):
        path = Path(folder) / NOTE
        try:
            notes[folder] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(
                f"data.image_features: {path} cannot be read ({error}); give data.train the shards that `clipscale data features` has "
                "written"
            ) from error
    first, *others = notes.items()
    for folder, note in others:
        if note["features"] != first[1]["features"]:
            raise UserError(f"data.train: the features in {first[0]} and in {folder} are not of the same kind")
    return dict(first[1])
