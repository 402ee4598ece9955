"""Stored features of a frozen image tower, read in the place of pictures: their format, and whether they fit the model.

D: feature width.
"""

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.lib import format as npy

from clipscale.common.errors import UserError
from clipscale.config.data import DataConfig
from clipscale.config.sections import ModelConfig
from clipscale.data.order import CounterRNG
from clipscale.data.sample import BrokenSampleError
from clipscale.data.shards.listing import list_shards

if TYPE_CHECKING:  # loader workers import this module and need no models
    from clipscale.models.towers import ClipModel

NOTE = "features.json"
"""The file beside the shards that describes where the features come from."""


@dataclass(frozen=True)
class StoredFeatures:
    """Reads a sample's feature row from a member's bytes (NumPy's format), in the place of a picture's transform."""

    member: str
    width: int
    dtype: str

    def __call__(self, data: bytes, rng: CounterRNG, out: np.ndarray) -> None:
        """Write the row to `out`, (D,). Raises BrokenSampleError (`bad_features`) before anything is written."""
        try:
            row = self._row(data)
        except (ValueError, TypeError) as error:
            raise BrokenSampleError("bad_features", str(error)) from error
        if not np.isfinite(row).all():
            raise BrokenSampleError("bad_features", "a value is not finite")
        np.copyto(out, row)

    def _row(self, data: bytes) -> np.ndarray:
        """The array of a .npy file. Its header is checked first: numpy would allocate whatever that claims."""
        stream = io.BytesIO(data)
        shape, _, dtype = npy_header(stream)
        if shape != (self.width,) or dtype != self.dtype:
            raise ValueError(f"{dtype} {shape}, not {self.dtype} ({self.width},)")
        return np.frombuffer(data, dtype, self.width, stream.tell())


def npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether by columns, and dtype of a .npy file, which is left at the array's bytes. Raises ValueError."""
    try:
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[npy.read_magic(file)]
        shape, by_columns, dtype = read(file)
    except Exception as error:  # numpy parses the header as Python's literals, which fail in many ways
        raise ValueError(f"{type(error).__name__}: {str(error)[:200]}") from error
    return shape, by_columns, dtype


def encoded_row(row: np.ndarray) -> bytes:
    """The member that holds a feature row."""
    out = io.BytesIO()
    np.save(out, row, allow_pickle=False)
    return out.getvalue()


def stored_features(data: DataConfig, config: ModelConfig, model: "ClipModel") -> StoredFeatures | None:
    """The reader that `data.image_features` asks for; None where it asks for none.

    Raises UserError for features that this model's frozen image tower did not compute.
    """
    member = data.stored_member
    if member is None:
        return None
    if not config.freeze_image:
        raise UserError(
            "data.image_features: stored features cannot train the image tower; set model.freeze_image=true, or "
            "read pictures"
        )
    note = _read_note(list_shards(data)[0][0])
    if member != note["member"]:
        raise UserError(f"data.image_features={member}: the shards hold them as {note['member']!r}")
    for what, theirs, ours in (
        ("width", note["width"], model.width),
        ("image size", note["image_size"], model.image_size),
        ("pixel mean and deviation", [note["mean"], note["std"]], [list(config.mean), list(config.std)]),
        ("weights", note["weights"], model.image.digest()),
    ):
        if theirs != ours:
            raise UserError(
                f"data.image_features: computed with {note['model']} of {what} {theirs}, but model.name={config.name} "
                f"has {ours}; give the same model and weights (model.image.weights=PATH), or compute them anew with "
                "`clipscale embed format=webdataset`"
            )
    return StoredFeatures(member, note["width"], note["dtype"])


def _read_note(shard: str) -> dict[str, Any]:
    """The note beside a shard. Raises UserError where there is none."""
    path = Path(shard).parent / NOTE
    try:
        return dict(json.loads(path.read_text())["features"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"data.image_features: {path} cannot be read ({error}); give data.train the shards that "
            "`clipscale embed format=webdataset` has written"
        ) from error
