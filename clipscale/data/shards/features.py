"""Features of teachers, stored beside the pictures in members of NumPy's format: (2, D), of picture and caption.

D: feature width.
"""

import io
import json
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TypedDict

import numpy as np

from clipscale.common.errors import UserError
from clipscale.config.conditions import source_names
from clipscale.config.data import DataConfig
from clipscale.data.addresses import dirname
from clipscale.data.sample import MAX_TEXT_BYTES, BrokenSampleError
from clipscale.data.shards.index import folder_of_shard
from clipscale.data.shards.listing import expand
from clipscale.data.shards.requests import SourceError
from clipscale.data.shards.store import Store

# The file beside the shards that describes each teacher's features.
FEATURES_FILE = "features.json"


class TeacherNote(TypedDict, total=False):
    """The entry of a teacher in FEATURES_FILE, as far as training reads it."""

    width: int
    dtype: str
    # The teacher's logit scale, the multiplier itself.
    scale: float
    # The caption sources. The teacher has seen the first text of these.
    captions: list[str]


@dataclass(frozen=True)
class TeacherFeatures:
    """Reads a teacher's features of picture and caption, (2, D), from a member of the sample."""

    # The extension of the member.
    member: str
    width: int
    dtype: str
    # The teacher's logit scale.
    scale: float

    @property
    def shape(self) -> tuple[int, int]:
        return 2, self.width

    @cached_property
    def header(self) -> bytes:
        """The bytes of the member before the values: numpy's own header for this shape and dtype."""
        empty = np.zeros(self.shape, self.dtype)
        return encoded_array(empty)[: -empty.nbytes]

    def read(self, members: dict[str, bytes]) -> np.ndarray:
        """A sample's array. Raises BrokenSampleError: `no_features`, `bad_features`.

        numpy would allocate whatever a header claims, so this has to be the one that numpy writes.
        """
        data = members.get(self.member)
        if data is None:
            raise BrokenSampleError("no_features", self.member)
        num_bytes = 2 * self.width * np.dtype(self.dtype).itemsize
        if not data.startswith(self.header) or len(data) != len(self.header) + num_bytes:
            raise BrokenSampleError("bad_features", f"{self.member} is not {self.dtype} {self.shape}")
        array = np.frombuffer(data, self.dtype, offset=len(self.header)).reshape(self.shape)
        if not np.isfinite(array).all():
            raise BrokenSampleError("bad_features", f"{self.member}: a value is not finite")
        return array


def encoded_array(array: np.ndarray) -> bytes:
    """The member that holds an array."""
    out = io.BytesIO()
    np.save(out, array, allow_pickle=False)
    return out.getvalue()


def find_teachers(
    data: DataConfig, names: Sequence[str], scales: Sequence[float] | None = None
) -> tuple[TeacherFeatures, ...]:
    """The readers of these teachers' features, as the notes in the folders of all shards describe them.

    `scales`: replace the notes' logit scales.

    Raises UserError for a teacher that a note does not have, for other captions, and for folders whose features of a
    teacher are not of one model.
    """
    if not names:
        return ()
    urls = one_of_each_folder(chain.from_iterable(map(expand, data.train or [])))
    notes = {url: notes_beside(url) for url in urls}
    captions = source_names(data.captions)
    teachers = []
    for number, name in enumerate(names):
        scale = scales[number] if scales else None
        readers = [_reader(name, url, note.get(name, {}), captions, scale) for url, note in notes.items()]
        teachers.append(readers[0])
        for url in urls[1:]:
            if notes[url][name] != notes[urls[0]][name]:
                raise UserError(
                    f"distill.teachers={name}: {url} has features of another model or pixels than {urls[0]}; "
                    f"write both with one `clipscale embed teacher={name}`"
                )
    return tuple(teachers)


def one_of_each_folder(urls: Iterable[str]) -> list[str]:
    """A shard of each folder."""
    return list({dirname(url): url for url in urls}.values())


def _reader(name: str, url: str, note: TeacherNote, captions: Sequence[str], scale: float | None) -> TeacherFeatures:
    """The reader of one teacher, by the note beside this shard. Raises UserError."""
    try:
        width = int(note["width"])
        dtype = np.dtype(note["dtype"])
        if not 0 < width <= MAX_TEXT_BYTES or dtype.kind != "f":
            raise ValueError(f"width={width}, dtype={dtype}")
        teacher = TeacherFeatures(f"{name}.npy", width, str(dtype), float(note["scale"] if scale is None else scale))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"distill.teachers={name}: no {FEATURES_FILE} beside {url} has its features; write them with `clipscale "
            f"embed teacher={name}`"
        ) from error
    if note.get("captions", captions) != captions:
        raise UserError(
            f"distill.teachers={name}: {url}: the teacher has seen data.captions={note['captions']}; take the same"
        )
    return teacher


def notes_beside(url: str) -> dict[str, TeacherNote]:
    """Teacher -> the note of its features beside a shard; empty if there is no such file.

    Raises UserError for one that cannot be read.
    """
    path = f"{folder_of_shard(url)}/{FEATURES_FILE}"
    try:
        with closing(Store().open(path)[0]) as file:
            return dict(json.loads(file.read(MAX_TEXT_BYTES)))
    except (FileNotFoundError, SourceError):
        return {}
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}); write it again with `clipscale embed`") from error
