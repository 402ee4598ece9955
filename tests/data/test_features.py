"""Training from stored features equals training with the frozen tower that computed them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clipscale.common.errors import UserError
from clipscale.config.data import AugmentConfig, DataConfig
from clipscale.config.sections import EvalConfig, ModelConfig
from clipscale.config.tools import EmbedConfig
from clipscale.config.train import TrainConfig
from clipscale.data.shards.addresses import SourceError
from clipscale.data.shards.reader import ReadProblem, read_shard
from clipscale.data.shards.store import Opened, Store
from clipscale.data.tools.demo import paths
from clipscale.embed.run import main
from clipscale.train import train
from tests.data.files import sample, write_tar
from tests.support.runs import ARCHITECTURE, curve, settings

FROZEN = ModelConfig(name="test", architecture=ARCHITECTURE, freeze_image=True)


def compute(source: str, out: Path, **changes: Any) -> Path:
    data, options = DataConfig(train=[source]), {"batch": 24, "device": "cpu", "transform": "train"}
    config = EmbedConfig(out=str(out), model=FROZEN, data=data, format="webdataset", features="image", **options)
    return Path(main(replace(config, **changes))["out"])


@pytest.fixture(scope="module")
def stored(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("features")
    return {dtype: compute(paths(demo).train, root / dtype, dtype=dtype) for dtype in ("float16", "float32")}


def locked(demo: Path, run: Path, **changes: Any) -> TrainConfig:
    """Locked-image training without augmentation."""
    data = DataConfig(train=[paths(demo).train], workers=0, augment=AugmentConfig(scale=(1.0, 1.0), ratio=(1.0, 1.0)))
    return settings(demo, run, **{"model": FROZEN, "data": data, "samples": 384, "seed": 0, **changes})


def from_features(folder: Path, **changes: Any) -> DataConfig:
    return DataConfig(train=[str(folder)], **{"workers": 0, "image_features": "true", **changes})


def test_training_from_features_is_training_with_the_frozen_tower(
    demo: Path, stored: dict[str, Path], tmp_path: Path
) -> None:
    train(locked(demo, tmp_path / "pictures"))
    expected = curve(tmp_path / "pictures")
    evaluation = EvalConfig(sets=[str(demo / "objects")], limit=48)
    for dtype, tolerance in (("float32", 1e-6), ("float16", 1e-3)):
        train(locked(demo, tmp_path / dtype, data=from_features(stored[dtype]), eval=evaluation))
        worst = max(abs(a - b) / b for a, b in zip(curve(tmp_path / dtype), expected, strict=True))
        print(f"{dtype}: losses differ by {worst:.1e}, bit for bit equal: {curve(tmp_path / dtype) == expected}")
        assert worst <= tolerance, f"{dtype}: {worst:.1e}"
    assert expected[-1] < expected[0] - 0.05, "something was learnt"


@pytest.mark.parametrize(("offload", "workers"), [("disk", 0), pytest.param("host", 2, marks=pytest.mark.slow)])
def test_features_can_be_offloaded_like_pixels(
    demo: Path, stored: dict[str, Path], tmp_path: Path, offload: str, workers: int
) -> None:
    data = from_features(stored["float16"], workers=workers)
    train(locked(demo, tmp_path / "plain", data=replace(data, workers=0)))
    train(locked(demo, tmp_path / "run", data=data, offload=offload))
    assert curve(tmp_path / "run") == curve(tmp_path / "plain")


def test_shards_keep_names_keys_captions_and_order(demo: Path, stored: dict[str, Path]) -> None:
    for ours in sorted(stored["float16"].glob("*.tar"))[:3]:
        theirs = Path(paths(demo).train).parent / ours.name
        pairs = list(zip(*(read_shard(str(path), ReadProblem()) for path in (ours, theirs)), strict=True))
        assert len(pairs) == json.loads((stored["float16"] / "sizes.json").read_text())[ours.name] > 0
        for a, b in pairs:
            assert a.key == b.key and a.members["txt"] == b.members["txt"]
            assert set(a.members) == set(b.members) - {"jpg", "png"} | {"npy"}


def test_a_broken_picture_keeps_its_place_without_features(tmp_path: Path) -> None:
    broken = [("5.png", b"no picture"), ("5.txt", b"words")]
    members = [member for i in range(12) for member in (broken if i == 5 else sample(str(i), i))]
    (tmp_path / "in").mkdir()
    write_tar(tmp_path / "in/a.tar", members)
    out = compute(str(tmp_path / "in"), tmp_path / "out")
    raws = list(read_shard(str(out / "a.tar"), ReadProblem()))
    assert [raw.key for raw in raws] == [str(i) for i in range(12)]
    assert [raw.key for raw in raws if "npy" not in raw.members] == ["5"]
    before = (out / "a.tar").stat().st_mtime_ns
    compute(str(tmp_path / "in"), tmp_path / "out")
    assert (out / "a.tar").stat().st_mtime_ns == before, "a shard that is there is not computed again"
    with pytest.raises(UserError, match="holds features of another kind"):
        compute(str(tmp_path / "in"), tmp_path / "out", dtype="float32")


def test_the_sources_are_not_overwritten(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [m for i in range(4) for m in sample(str(i), i)])
    before = (tmp_path / "a.tar").read_bytes()
    with pytest.raises(UserError, match=r"data\.train has shards there; choose another folder"):
        compute(str(tmp_path / "a.tar"), tmp_path / "x" / "..")
    assert (tmp_path / "a.tar").read_bytes() == before
    assert not (tmp_path / "features.json").exists()


def test_a_shard_that_could_not_be_fetched_is_fetched_again_and_a_damaged_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tar(tmp_path / "a.tar", [m for i in range(4) for m in sample(str(i), i)])
    (tmp_path / "b.tar").write_bytes((tmp_path / "a.tar").read_bytes()[:4000])
    open_as_it_is = Store.open

    def fail_to_open(store: Store, url: str) -> Opened:
        if url.endswith("a.tar"):
            raise SourceError("unreachable_shard", "9 requests failed")
        return open_as_it_is(store, url)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "open", fail_to_open)
        with pytest.raises(UserError, match="1 of 2 shards could not be fetched; start again"):
            compute(str(tmp_path / "{a,b}.tar"), tmp_path / "out")
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == ["b.tar", "features.json", "shards.json", "sizes.json"]
    compute(str(tmp_path / "{a,b}.tar"), tmp_path / "out")
    assert json.loads((tmp_path / "out/sizes.json").read_text())["a.tar"] == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ModelConfig(name="test", architecture=ARCHITECTURE)}, r"set model\.freeze_image=true"),
        ({"model": replace(FROZEN, architecture=ARCHITECTURE | {"embed_dim": 16})}, r"test of width 32, .* has 16"),
        ({"seed": 4}, r"computed with test of weights \w+, .*model\.image\.weights=PATH"),
        ({"model": replace(FROZEN, mean=(0.5, 0.5, 0.5))}, "pixel mean and deviation"),
        ({"offload": "encoded"}, r"offload=encoded is for pictures"),
    ],
)
def test_features_of_another_model_are_refused(
    demo: Path, stored: dict[str, Path], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        train(locked(demo, tmp_path / "run", **{"data": from_features(stored["float16"]), **changes}))


def test_shards_of_pictures_are_no_features(demo: Path, stored: dict[str, Path], tmp_path: Path) -> None:
    data = DataConfig(train=[paths(demo).train], workers=0, image_features="true")
    with pytest.raises(
        UserError, match=r"data\.image_features: .*features\.json cannot be read .*embed format=webdataset"
    ):
        train(locked(demo, tmp_path / "run", data=data))
    with pytest.raises(UserError, match=r"data\.image_features=emb: the shards hold them as 'npy'"):
        train(locked(demo, tmp_path / "run", data=from_features(stored["float16"], image_features="emb")))
