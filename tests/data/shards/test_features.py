"""Teachers' features are read from beside the pictures; their note says what they are."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from clipscale.config.data import DataConfig
from clipscale.data.sample import BrokenSampleError
from clipscale.data.shards.features import TeacherFeatures, encoded_array, find_teachers
from tests.data.files import write_shards
from tests.support.user_errors import refused


def test_a_member_that_is_no_array_of_this_shape_is_broken() -> None:
    """Only the header is believed, and it is checked first: numpy would allocate whatever it claims."""
    teacher = TeacherFeatures("t.npy", 4, "float16", 1.0)
    array = np.arange(8, dtype=np.float16).reshape(2, 4)
    assert np.array_equal(teacher.read({"t.npy": encoded_array(array)}), array)
    huge = b"\x93NUMPY\x01\x00" + b"\xff" * (1 << 20)
    nan = encoded_array(np.full((2, 4), np.nan, np.float16))
    others = (encoded_array(array.astype(np.float32)), encoded_array(array[:, :3]), encoded_array(array)[:-1])
    for data in (b"", huge, nan, *others):
        with pytest.raises(BrokenSampleError, match="bad_features"):
            teacher.read({"t.npy": data})
    with pytest.raises(BrokenSampleError, match="no_features"):
        teacher.read({})


def test_teachers_are_read_as_their_note_says(tmp_path: Path) -> None:
    note: dict[str, dict] = {
        name: {"width": 4, "dtype": "float16", "scale": scale} for name, scale in (("a", 2.5), ("b", 4))
    }
    note["b"] |= {"captions": ["txt"]}
    note["odd"] = {"width": 4, "dtype": "object", "scale": 1.0}
    note["vast"] = {"width": 10**9, "dtype": "float16", "scale": 1.0}
    (tmp_path / "features.json").write_text(json.dumps(note))
    shard = write_shards(tmp_path, [1])[0]
    other = write_shards(tmp_path / "other", [1])[0]
    data = DataConfig(train=[str(shard)])
    both = ["a", "b"]
    readers = find_teachers(data, both)
    assert [(r.member, r.shape, r.dtype, r.scale) for r in readers] == [
        ("a.npy", (2, 4), "float16", 2.5),
        ("b.npy", (2, 4), "float16", 4),
    ]
    assert [reader.scale for reader in find_teachers(data, both, [5, 6])] == [5, 6]
    missing = r"distill.teachers={}: no features.json .* has its features; .* teacher={}"
    for changed, names, message in (
        *(({}, [name], missing.format(name, name)) for name in ("c", "odd", "vast")),
        ({"train": [str(other)]}, both, r"distill.teachers=a: no features.json"),
        ({"captions": ["json:alt"]}, both, r"has seen data.captions=\['txt'\]; take the same"),
        ({"train": [str(shard), str(other)]}, both, r"distill.teachers=a: no features.json beside .*other"),
    ):
        with refused(message):
            find_teachers(replace(data, **changed), names)
    twice = replace(data, train=[str(shard), str(other)])
    (tmp_path / "other/features.json").write_text(json.dumps(note))
    assert find_teachers(twice, both) == readers
    note["b"] |= {"weights": "others"}
    (tmp_path / "other/features.json").write_text(json.dumps(note))
    with refused("distill.teachers=b: .*other.* has features of another model or pixels than"):
        find_teachers(twice, both)


def test_every_folder_of_a_source_has_the_note_of_the_same_model(tmp_path: Path) -> None:
    """A source may join folders, and so may a file of addresses."""
    shards = [write_shards(tmp_path / name, [1, 1]) for name in "ab"]
    note = {"a": {"width": 4, "dtype": "float16", "scale": 2.5}}
    for folder in "ab":
        (tmp_path / folder / "features.json").write_text(json.dumps(note))
    every = [str(shard) for pair in shards for shard in pair]
    (tmp_path / "all.txt").write_text("\n".join(every))
    sources = ["::".join(every), f"{tmp_path}/{{a,b}}/*.tar", f"@{tmp_path}/all.txt"]
    for source in sources:
        assert len(find_teachers(DataConfig(train=[source]), ["a"])) == 1
    note["a"] |= {"weights": "others"}
    (tmp_path / "b/features.json").write_text(json.dumps(note))
    for source in sources:
        with refused(f"distill.teachers=a: {tmp_path}/b/.* has features of another model or pixels than {tmp_path}/a"):
            find_teachers(DataConfig(train=[source]), ["a"])
    (tmp_path / "b/features.json").unlink()
    for source in sources:
        with refused(f"distill.teachers=a: no features.json beside {tmp_path}/b/"):
            find_teachers(DataConfig(train=[source]), ["a"])
