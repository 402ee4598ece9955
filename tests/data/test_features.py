"""Training from stored features equals training with the frozen tower that computed them."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipscale.common.errors import UserError
from clipscale.config.data import AugmentConfig, DataConfig
from clipscale.config.sections import DistillConfig, EvalConfig, ModelConfig, TowerConfig
from clipscale.config.train import TrainConfig
from clipscale.data.features import StoredFeatures, encoded_row, stored_teachers
from clipscale.data.order import CounterRNG
from clipscale.data.sample import BrokenSampleError
from clipscale.data.shards.reader import ReadProblem, read_shard
from clipscale.models.towers import load_model
from clipscale.tools.data.demo import paths
from clipscale.tools.embed.run import main
from clipscale.tools.embed.settings import EmbedConfig
from clipscale.train import train
from tests.data.files import sample, write_tar
from tests.support.runs import ARCHITECTURE, curve, settings

FROZEN = ModelConfig(name="test", architecture=ARCHITECTURE, image=TowerConfig(train="none"))


@pytest.fixture(scope="module")
def stored(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run from pictures, and its frozen tower's features of the demo set in both dtypes."""
    root, data = tmp_path_factory.mktemp("features"), DataConfig(train=[paths(demo).train])
    train(locked(demo, root / "pictures"))
    options: dict[str, Any] = {"run": str(root / "pictures"), "batch": 24, "device": "cpu", "transform": "train"}
    options |= {"data": data, "format": "webdataset", "features": "image"}
    configs = {dtype: EmbedConfig(out=str(root / dtype), dtype=dtype, **options) for dtype in ("float16", "float32")}
    return {"pictures": root / "pictures"} | {dtype: Path(main(config)["out"]) for dtype, config in configs.items()}


def locked(demo: Path, run: Path, **changes: Any) -> TrainConfig:
    """Locked-image training without augmentation."""
    data = DataConfig(train=[paths(demo).train], workers=0, augment=AugmentConfig(scale=(1.0, 1.0), ratio=(1.0, 1.0)))
    return settings(demo, run, **{"model": FROZEN, "data": data, "samples": 384, "seed": 0, **changes})


def from_features(folder: Path, **changes: Any) -> DataConfig:
    return DataConfig(train=[str(folder)], **{"workers": 0, "image_features": "true", **changes})


def test_training_from_features_is_training_with_the_frozen_tower(
    demo: Path, stored: dict[str, Path], tmp_path: Path
) -> None:
    expected = curve(stored["pictures"])
    evaluation = EvalConfig(sets=[str(demo / "objects")], limit=48)
    for dtype, tolerance in (("float32", 1e-6), ("float16", 1e-3)):
        train(locked(demo, tmp_path / dtype, data=from_features(stored[dtype]), eval=evaluation))
        worst = max(abs(a - b) / b for a, b in zip(curve(tmp_path / dtype), expected, strict=True))
        assert worst <= tolerance, f"{dtype}: {worst:.1e}"
    assert expected[-1] < expected[0] - 0.05, "something was learnt"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ModelConfig(name="test", architecture=ARCHITECTURE)}, r"set model\.image\.train=none"),
        ({"model": replace(FROZEN, architecture=ARCHITECTURE | {"embed_dim": 16})}, r"test of width 32, .* has 16"),
        ({"seed": 4}, r"computed with test of weights \w+, .*model\.image\.weights=PATH"),
        ({"offload": "encoded"}, r"offload=encoded is for pictures"),
    ],
)
def test_features_of_another_model_are_refused(
    demo: Path, stored: dict[str, Path], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        train(locked(demo, tmp_path / "run", **{"data": from_features(stored["float16"]), **changes}))


def test_shards_of_pictures_are_no_features(demo: Path, tmp_path: Path) -> None:
    data = DataConfig(train=[paths(demo).train], workers=0, image_features="true")
    with pytest.raises(UserError, match=r"features\.json .*embed format=webdataset"):
        train(locked(demo, tmp_path / "run", data=data))


def test_a_member_that_is_no_feature_row_is_broken() -> None:
    """Only the header is believed, and it is checked first: numpy would allocate whatever it claims."""
    read, out = StoredFeatures("npy", (4,), "float16"), np.zeros(4, np.float16)
    row = np.arange(4, dtype=np.float16)
    read(encoded_row(row), CounterRNG(0), out)
    assert np.array_equal(out, row)
    huge = b"\x93NUMPY\x01\x00" + b"\xff" * (1 << 20)
    nan = encoded_row(np.full(4, np.nan, np.float16))
    for data in (b"", huge, nan, encoded_row(row)[:-1], encoded_row(row.astype(np.float32)), encoded_row(row[:3])):
        with pytest.raises(BrokenSampleError, match="bad_features"):
            read(data, CounterRNG(0), out)


def test_teachers_are_written_beside_the_pictures_and_read_with_them(stored: dict[str, Path], tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [m for i in range(40) for m in (sample(f"{i:02d}", i) if i else [("0.txt", b"x")])])
    options: dict[str, Any] = {"run": str(stored["pictures"]), "device": "cpu", "format": "webdataset"}
    folder = str(tmp_path / "0.tar")
    for name in ("a", "b"):
        data, out = DataConfig(train=[folder]), str(tmp_path / name)
        folder = main(EmbedConfig(out=out, data=data, teacher=name, dtype="float32", **options))["out"]
    plain = main(EmbedConfig(out=str(tmp_path / "plain"), data=DataConfig(train=[folder]), dtype="float32", **options))
    given, data = DistillConfig(["a", "b"]), DataConfig(train=[folder], workers=0)
    readers = stored_teachers(data, given)
    scale = load_model(stored["pictures"])[0].logit_scale.exp().item()
    assert [(r.shape, r.scale) for r in readers] == [((2, 32), pytest.approx(scale))] * 2
    both, separate = (list(read_shard(f"{f}/0.tar", ReadProblem())) for f in (folder, plain["out"]))
    for raw, features in zip(both[1:], separate[1:], strict=True):
        expected = [np.load(io.BytesIO(features.members[name])) for name in ("npy", "text.npy")]
        assert {"png", "txt", "json", "a.npy", "b.npy"} == raw.members.keys()
        assert all(np.allclose(reader.array(raw.members[reader.member]), expected, atol=1e-6) for reader in readers)
    with pytest.raises(BrokenSampleError, match="no_features"):
        readers[0].array(both[0].members.get("a.npy"))
    for changed, distill, message in (
        ({}, DistillConfig(["c"]), r"none of the first 40 samples has the member c.npy; .* teacher=c"),
        ({"captions": ["json:alt"]}, given, r"has seen data.captions=\['txt'\]; take the same"),
        ({"train": [plain["out"]]}, DistillConfig(["text"], [5]), r"text.npy must be \(2, width\)"),
    ):
        with pytest.raises(UserError, match=message):
            stored_teachers(replace(data, **changed), distill)
    (Path(folder) / "features.json").unlink()
    with pytest.raises(UserError, match=r"says the teacher's scale; give distill.scales"):
        stored_teachers(data, given)
    assert [reader.scale for reader in stored_teachers(data, DistillConfig(["a", "b"], [5, 6]))] == [5, 6]
