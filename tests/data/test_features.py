"""Teachers' features are written beside the pictures and read with them; their note says what they are."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from clipscale.config.data import DataConfig
from clipscale.config.sections import DistillConfig
from clipscale.data.features import TeacherFeatures, encoded_array, stored_teachers
from clipscale.data.sample import BrokenSampleError, ChosenSample, RawSample
from tests.data.files import write_shards
from tests.support.refused import refused


def with_array(content: bytes | None) -> ChosenSample:
    members = {} if content is None else {"t.npy": content}
    return ChosenSample(RawSample("0.tar", "a", 0, members), [], "")


def test_a_member_that_is_no_array_of_this_shape_is_broken() -> None:
    """Only the header is believed, and it is checked first: numpy would allocate whatever it claims."""
    teacher, array = TeacherFeatures("t.npy", 4, "float16"), np.arange(8, dtype=np.float16).reshape(2, 4)
    assert np.array_equal(teacher.of(with_array(encoded_array(array))), array)
    huge = b"\x93NUMPY\x01\x00" + b"\xff" * (1 << 20)
    nan = encoded_array(np.full((2, 4), np.nan, np.float16))
    others = (encoded_array(array.astype(np.float32)), encoded_array(array[:, :3]), encoded_array(array)[:-1])
    for data in (b"", huge, nan, *others):
        with pytest.raises(BrokenSampleError, match="bad_features"):
            teacher.of(with_array(data))
    with pytest.raises(BrokenSampleError, match="no_features"):
        teacher.of(with_array(None))


def test_teachers_are_read_as_their_note_says(tmp_path: Path) -> None:
    note = {name: {"width": 4, "dtype": "float16", "scale": scale} for name, scale in (("a", 2.5), ("b", 4))}
    note["b"] |= {"captions": ["txt"]}
    (tmp_path / "features.json").write_text(json.dumps(note))
    shard, other = write_shards(tmp_path, [1])[0], write_shards(tmp_path / "other", [1])[0]
    data, both = DataConfig(train=[str(shard)]), DistillConfig(["a", "b"])
    readers = stored_teachers(data, both)
    assert [(r.member, r.shape, r.dtype, r.scale) for r in readers] == [
        ("a.npy", (2, 4), "float16", 2.5),
        ("b.npy", (2, 4), "float16", 4),
    ]
    assert [reader.scale for reader in stored_teachers(data, replace(both, scales=[5, 6]))] == [5, 6]
    for changed, distill, message in (
        ({}, DistillConfig(["c"]), r"distill.teachers=c: no features.json .* has its features; .* teacher=c"),
        ({"train": [str(other)]}, both, r"distill.teachers=a: no features.json"),
        ({"captions": ["json:alt"]}, both, r"has seen data.captions=\['txt'\]; take the same"),
    ):
        with refused(message):
            stored_teachers(replace(data, **changed), distill)
