"""Features of teachers, stored beside the pictures in members of NumPy's format: (2, D), of picture and caption.

D: feature width.
"""

import io
import json
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from clipscale.common.errors import UserError
from clipscale.common.record import Record
from clipscale.config.conditions import source_names
from clipscale.config.data import DataConfig
from clipscale.config.sections import DistillConfig
from clipscale.data.sample import MAX_TEXT_BYTES, BrokenSampleError, ChosenSample
from clipscale.data.shards.addresses import SourceError
from clipscale.data.shards.index import folder_of
from clipscale.data.shards.listing import list_shards
from clipscale.data.shards.store import Store

NOTE = "features.json"
"""The file beside the shards that describes each teacher's features."""


@dataclass(frozen=True)
class TeacherFeatures:
    """Reads a teacher's features of picture and caption, (2, D), from a member of the sample."""

    member: str
    width: int
    dtype: str
    scale: float = 1.0
    """The teacher's logit scale."""

    @property
    def shape(self) -> tuple[int, int]:
        return 2, self.width

    def of(self, sample: ChosenSample) -> np.ndarray:
        """The sample's array. Raises BrokenSampleError: `no_features`, `bad_features`.

        numpy would allocate whatever a header claims, so this has to be the one that numpy writes.
        """
        data = sample.raw.members.get(self.member)
        if data is None:
            raise BrokenSampleError("no_features", self.member)
        empty = np.zeros(self.shape, self.dtype)
        encoded = encoded_array(empty)
        header = encoded[: len(encoded) - empty.nbytes]
        if not data.startswith(header) or len(data) != len(encoded):
            raise BrokenSampleError("bad_features", f"{self.member} is not {self.dtype} {self.shape}")
        array = np.frombuffer(data, self.dtype, offset=len(header)).reshape(self.shape)
        if not np.isfinite(array).all():
            raise BrokenSampleError("bad_features", f"{self.member}: a value is not finite")
        return array


def encoded_array(array: np.ndarray) -> bytes:
    """The member that holds an array."""
    out = io.BytesIO()
    np.save(out, array, allow_pickle=False)
    return out.getvalue()


def stored_teachers(data: DataConfig, config: DistillConfig) -> tuple[TeacherFeatures, ...]:
    """The readers of `distill.teachers`, as the note beside the shards describes them.

    Raises UserError for a teacher that the note does not have, and for other captions.
    """
    if not config.teachers:
        return ()
    url = list_shards(data, once=lambda work: [])[0][0]
    notes = notes_beside(url)
    captions = source_names(data.captions)
    teachers = []
    for number, name in enumerate(config.teachers):
        note = notes.get(name, {})
        try:
            scale = config.scales[number] if config.scales else note["scale"]
            teachers.append(TeacherFeatures(f"{name}.npy", int(note["width"]), str(note["dtype"]), float(scale)))
        except (KeyError, TypeError, ValueError) as error:
            remedy = f"write them with `clipscale embed teacher={name}`"
            raise UserError(f"distill.teachers={name}: no {NOTE} beside {url} has its features; {remedy}") from error
        if note.get("captions", captions) != captions:
            seen = f"data.captions={note['captions']}"
            raise UserError(f"distill.teachers={name}: {url}: the teacher has seen {seen}; take the same")
    return tuple(teachers)


def notes_beside(url: str) -> Record:
    """The notes of the features in a shard, of each teacher by its name; empty if there is no such file.

    Raises UserError for one that cannot be read.
    """
    path = f"{folder_of(url)}/{NOTE}"
    try:
        with closing(Store().open(path)[0]) as file:
            return dict(json.loads(file.read(MAX_TEXT_BYTES)))
    except (FileNotFoundError, SourceError):
        return {}
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}); write it again with `clipscale embed`") from error
