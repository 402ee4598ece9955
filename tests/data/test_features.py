"""Teachers' features are written beside the pictures and read with them; their note says what they are."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from clipscale.common.errors import UserError
from clipscale.config.data import DataConfig
from clipscale.config.sections import DistillConfig
from clipscale.data.features import TeacherFeatures, encoded_array, stored_teachers
from clipscale.data.sample import BrokenSampleError, ChosenSample, RawSample
from clipscale.data.shards.reader import ReadProblem, read_shard
from clipscale.models.towers import build_model
from clipscale.tools.embed.run import main
from clipscale.tools.embed.settings import EmbedConfig
from tests.data.files import sample, write_tar
from tests.eval.test_verb import TINY
from tests.support.checkpoints import save_model


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


def test_teachers_are_written_beside_the_pictures_and_read_with_them(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = build_model(TINY)
    save_model(tmp_path / "run", model, TINY)
    options = {"run": str(tmp_path / "run"), "device": "cpu", "dtype": "float32"}
    write_tar(tmp_path / "0.tar", [m for i in range(9) for m in (sample(f"{i:02d}", i) if i else [("0.txt", b"x")])])
    folder = str(tmp_path / "0.tar")
    for name in ("a", "b"):
        out, data = str(tmp_path / name), DataConfig(train=[folder])
        folder = main(EmbedConfig(out=out, data=data, teacher=name, **options))["out"]
    data, config = DataConfig(train=[folder], workers=0), DistillConfig(["a", "b"])
    readers = stored_teachers(data, config)
    scale = model.logit_scale.exp().item()
    assert [(r.shape, r.scale) for r in readers] == [((2, model.width), pytest.approx(scale))] * 2
    first, *raws = read_shard(f"{folder}/0.tar", ReadProblem())
    assert first.members == {"txt": b"x"}
    for raw in raws:
        assert raw.members.keys() == {"png", "txt", "json", "a.npy", "b.npy"}
        assert raw.members["a.npy"] == raw.members["b.npy"]
    for changed, distill, message in (
        ({}, DistillConfig(["c"]), r"distill.teachers=c: no features.json .* has its features; .* teacher=c"),
        ({"train": [str(tmp_path / "0.tar")]}, config, r"distill.teachers=a: no features.json"),
        ({"captions": ["json:alt"]}, config, r"has seen data.captions=\['txt'\]; take the same"),
    ):
        with pytest.raises(UserError, match=message):
            stored_teachers(replace(data, **changed), distill)
    assert [reader.scale for reader in stored_teachers(data, DistillConfig(["a", "b"], [5, 6]))] == [5, 6]
    note = json.loads(Path(folder, "features.json").read_text())
    assert note["a"]["dtype"] == "float32"
