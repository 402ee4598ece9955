"""Stored features: of a frozen image tower, read in the place of pictures, and of teachers, read beside them.

D: feature width.
"""

import io
import json
import math
from contextlib import closing
from dataclasses import dataclass
from itertools import islice, repeat
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.lib import format as npy

from clipscale.common.errors import UserError
from clipscale.config.data import DataConfig
from clipscale.config.sections import DistillConfig, ModelConfig
from clipscale.data.conditions import caption_sources
from clipscale.data.order import CounterRNG
from clipscale.data.sample import BrokenSampleError, ChosenSample, limits
from clipscale.data.shards.listing import list_shards
from clipscale.data.shards.reader import ReadProblem, read_shard
from clipscale.data.shards.store import Store

if TYPE_CHECKING:  # loader workers import this module and need no models
    from clipscale.models.towers import ClipModel

NOTE = "features.json"
"""The file beside the shards that describes where the features come from."""
PEEK = 64
"""Samples of the first shard that are looked at for the size of its pictures, and the features of teachers."""


@dataclass(frozen=True)
class StoredFeatures:
    """Reads features from a member's bytes (NumPy's format): of a picture, (D,), in the place of its pixels, or a
    teacher's of picture and caption, (2, D).
    """

    member: str
    shape: tuple[int, ...]
    dtype: str
    scale: float = 1.0
    """A teacher's logit scale."""

    def __call__(self, data: bytes, rng: CounterRNG, out: np.ndarray) -> None:
        """Write the features to `out`. Raises BrokenSampleError before anything is written."""
        np.copyto(out, self.array(data))

    def of(self, sample: ChosenSample) -> np.ndarray:
        """A teacher's features of a sample. Raises BrokenSampleError as `array`."""
        return self.array(sample.raw.members.get(self.member))

    def array(self, data: bytes | None) -> np.ndarray:
        """The array of a .npy file. Its header is checked first: numpy would allocate whatever that claims.

        Raises BrokenSampleError: `no_features` (None), `bad_features`.
        """
        if data is None:
            raise BrokenSampleError("no_features", self.member)
        stream = io.BytesIO(data)
        try:
            shape, _, dtype = npy_header(stream)
            if shape != self.shape or dtype != self.dtype:
                raise ValueError(f"{dtype} {shape}, not {self.dtype} {self.shape}")
            array = np.frombuffer(data, dtype, math.prod(shape), stream.tell()).reshape(shape)
            if not np.isfinite(array).all():
                raise ValueError("a value is not finite")
        except (ValueError, TypeError) as error:
            raise BrokenSampleError("bad_features", str(error)) from error
        return array


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
    if config.image.groups != 0:
        raise UserError(
            "data.image_features: stored features cannot train the image tower; set model.image.train=none, or read "
            "pictures"
        )
    url = list_shards(data)[0][0]
    note = notes_beside(url).get("features")
    if note is None:
        remedy = "give data.train the shards that `clipscale embed format=webdataset` has written"
        raise UserError(f"data.image_features: no {NOTE} beside {url} has them; {remedy}")
    if member != note["member"]:
        raise UserError(f"data.image_features={member}: the shards hold them as {note['member']!r}")
    for what, theirs, ours in (
        ("width", note["width"], model.width),
        ("image size", note["image_size"], model.image_size),
        ("pixel mean and deviation", [note["mean"], note["std"]], [list(model.pixels.mean), list(model.pixels.std)]),
        ("weights", note["weights"], model.image.digest()),
    ):
        if theirs != ours:
            raise UserError(
                f"data.image_features: computed with {note['model']} of {what} {theirs}, but model.name={config.name} "
                f"has {ours}; give the same model and weights (model.image.weights=PATH), or compute them anew with "
                "`clipscale embed format=webdataset`"
            )
    return StoredFeatures(member, (note["width"],), note["dtype"])


def stored_teachers(data: DataConfig, config: DistillConfig) -> tuple[StoredFeatures, ...]:
    """The readers of `distill.teachers`, by the first samples of the data.

    Raises UserError where these have none, or of another shape, for a scale that nobody says, and for other captions.
    """
    if not config.teachers:
        return ()
    url, teachers = list_shards(data)[0][0], []
    members = [f"{name}.npy" for name in config.teachers]
    with closing(read_shard(url, ReadProblem(), lambda i: i < PEEK, limits((), members), store=Store(data))) as raws:
        samples = [raw.members for raw in islice(raws, PEEK)]
    notes, captions = notes_beside(url), [name for name, _ in caption_sources(data.captions)]
    for name, member, given in zip(config.teachers, members, config.scales or repeat(None)):
        what, note = f"distill.teachers={name}: {url}", notes.get(name, {})
        row = next((sample[member] for sample in samples if member in sample), None)
        scale = note.get("scale") if given is None else given
        if row is None:
            remedy = f"write them with `clipscale embed format=webdataset teacher={name}`"
            raise UserError(f"{what}: none of the first {len(samples)} samples has the member {member}; {remedy}")
        if scale is None:
            raise UserError(f"{what}: no {NOTE} beside it says the teacher's scale; give distill.scales=[...]")
        if note.get("captions", captions) != captions:
            raise UserError(f"{what}: the teacher has seen data.captions={note['captions']}; take the same")
        try:
            shape, _, dtype = npy_header(io.BytesIO(row))
            if str(dtype) not in ("float16", "float32"):
                raise ValueError(f"it is {dtype}")
            teachers.append(StoredFeatures(member, (2, *shape[1:2]), str(dtype), float(scale)))
            teachers[-1].array(row)
        except (ValueError, BrokenSampleError) as error:
            raise UserError(f"{what}: {member} must be (2, width), of picture and caption ({error})") from error
    return tuple(teachers)


def notes_beside(shard: str) -> dict[str, Any]:
    """The notes of the features in a shard: of each teacher by its name, of `data.image_features` by `features`.

    None where there is no such file. Raises UserError for one that cannot be read.
    """
    path = Path(shard).parent / NOTE
    try:
        return dict(json.loads(path.read_text())) if path.is_file() else {}
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}); write it again with `clipscale embed`") from error
