"""Stored features equal the model's own, whatever is embedded, in every format, by any number of processes, and after a kill."""

import io
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from clipscale import checkpoint
from clipscale.cli.main import main as cli
from clipscale.common.errors import UserError
from clipscale.config.data import DataConfig, TableConfig
from clipscale.config.sections import LaunchConfig
from clipscale.config.tools import EmbedConfig
from clipscale.data.shards.reader import ReadProblem, read_shard
from clipscale.embed.encode import FeatureEncoder
from clipscale.embed.verb import main
from clipscale.launch.run_lock import RunLock
from clipscale.models.towers import ClipModel, build_model
from tests.checkpoint.test_kill import begin
from tests.data.files import picture, sample, write_shards, write_tar
from tests.eval.test_verb import TINY
from tests.support.ranks import run_ranks


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("run")
    checkpoint.save(folder, 7, {"model": build_model(TINY).state_dict(), "model_config": asdict(TINY)}, keep=0)
    return str(folder)


def embed(run: str, source: str | Path, out: Path, **changes: Any) -> Path:
    config = EmbedConfig(
        run=run,
        out=str(out),
        data=DataConfig(train=[str(source)]),
        batch=4,
        dtype="float32",
        device="cpu",
        launch=LaunchConfig(threads=1),
    )
    return Path(main(replace(config, **changes))["out"])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def of_npy(folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    found = {}
    for file in folder.glob("*.jsonl"):
        arrays = [np.load(file.with_name(f"{file.stem}.{kind}.npy"), mmap_mode="r") for kind in ("image", "text")]
        for number, line in enumerate(file.read_text().splitlines()):
            found[json.loads(line)["key"]] = (arrays[0][number], arrays[1][number])
    return found


def of_parquet(folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rows = [row for file in folder.glob("*.parquet") for row in pq.read_table(file).to_pylist()]
    for row in rows:
        assert row["similarity"] == pytest.approx(np.dot(row["image"], row["text"]), abs=1e-6)
    return {row["key"]: (np.float32(row["image"]), np.float32(row["text"])) for row in rows}


def of_shards(folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    raws = [raw for file in folder.glob("*.tar") for raw in read_shard(str(file), ReadProblem())]
    arrays = {raw.key: [np.load(io.BytesIO(raw.members[name])) for name in ("npy", "text.npy")] for raw in raws}
    return {key: (image, text) for key, (image, text) in arrays.items()}


def plain(model: ClipModel, data: bytes, caption: str) -> tuple[np.ndarray, np.ndarray]:
    """Features one at a time, by the model itself."""
    with torch.no_grad():
        image = model.image(torch.from_numpy(model.eval_transform()(data))[None])[0]
        return image.numpy(), model.text(model.tokenizer([caption]))[0].numpy()


@pytest.mark.parametrize(("form", "read"), [("npy", of_npy), ("parquet", of_parquet), ("webdataset", of_shards)])
def test_features_are_the_models_own_under_the_samples_keys(run: str, tmp_path: Path, form: str, read: Any) -> None:
    torch.manual_seed(3)
    model = build_model(TINY).eval()
    write_shards(tmp_path / "in", [5, 6])
    found = read(embed(run, tmp_path / "in", tmp_path / "out", format=form))
    assert len(found) == 11
    for key, (image, text) in found.items():
        theirs = plain(model, picture(int(key[-4:]) % 7), f"caption {key}")
        assert max(np.abs(image - theirs[0]).max(), np.abs(text - theirs[1]).max()) < 1e-6, key
    shards = json.loads((tmp_path / "out/shards.json").read_text())
    assert [entry["samples"] for entry in shards.values()] == [5, 6]
    assert next(iter(shards.values()))["source"] == str(tmp_path / "in/00000.tar")


def test_tables_and_folders_of_pictures_are_embedded_as_shards_are(run: str, tmp_path: Path) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    lines = ["filepath,title"]
    members = []
    for number in range(6):
        (pictures / f"{number}.png").write_bytes(picture(number))
        (pictures / f"{number}.txt").write_text(f"caption {number}")
        lines.append(f"{number}.png,caption {number}")
        members += sample(str(number), number)
    (pictures / "all.csv").write_text("\n".join(lines))
    write_tar(tmp_path / "a.tar", members)
    shard = of_npy(embed(run, tmp_path / "a.tar", tmp_path / "of-shard"))
    table = of_npy(embed(run, pictures / "all.csv", tmp_path / "of-table"))
    folder = of_npy(embed(run, pictures, tmp_path / "of-folder"))
    assert set(table) == {f"{number}.png" for number in range(6)}
    assert set(folder) == {str(pictures / f"{number}.png") for number in range(6)}
    for number in range(6):
        for kind in range(2):
            wanted = shard[str(number)][kind]
            for found in (table[f"{number}.png"], folder[str(pictures / f"{number}.png")]):
                assert np.abs(found[kind] - wanted).max() < 1e-6
    rows = of_shards(embed(run, pictures / "all.csv", tmp_path / "shards", format="webdataset"))
    assert set(rows) == {f"{number:09d}" for number in range(6)}, "a path is no key of a shard"


def test_a_sample_without_a_usable_picture_or_text_keeps_its_row(run: str, tmp_path: Path) -> None:
    members = [*sample("a"), ("b.png", b"no picture"), ("b.txt", b"words"), ("c.png", picture(1)), *sample("d")]
    write_tar(tmp_path / "x.tar", members)
    found = of_npy(embed(run, tmp_path / "x.tar", tmp_path / "npy"))
    assert [key for key, (image, _) in found.items() if np.isnan(image).all()] == ["b"]
    assert [key for key, (_, text) in found.items() if np.isnan(text).all()] == ["c"]
    table = pq.read_table(embed(run, tmp_path / "x.tar", tmp_path / "parquet", format="parquet") / "x.parquet")
    assert table["key"].to_pylist() == ["a", "b", "c", "d"]
    assert [row is None for row in table["image"].to_pylist()] == [False, True, False, False]
    assert [row is None for row in table["similarity"].to_pylist()] == [False, True, True, False]


@pytest.mark.parametrize("form", ["npy", "parquet", "webdataset"])
def test_samples_without_a_feature_are_counted_in_every_start(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    (tmp_path / "in").mkdir()
    write_tar(tmp_path / "in/a.tar", [("b.png", b"no picture"), ("b.txt", b"words"), *sample("d")])
    write_tar(tmp_path / "in/b.tar", [("b.png", b"no picture"), ("c.png", picture(1)), *sample("d")])
    wanted = "features of 5 samples, 2 without features of their image, 2 without features of their text: "
    out, said = tmp_path / "out", []
    for event in ("first", "again", "a killed start has not listed its shards", "an older list"):
        if "killed" in event:
            (out / "shards.json").unlink()
        if "older" in event:
            listed = json.loads((out / "shards.json").read_text())
            older = {name: {key: entry[key] for key in ("source", "samples")} for name, entry in listed.items()}
            (out / "shards.json").write_text(json.dumps(older))
        embed(run, tmp_path / "in", out, format=form)
        said.append(wanted in capsys.readouterr().out)
        listed = json.loads((out / "shards.json").read_text())
        assert [entry.get("missing") for entry in listed.values()] == [{"image": 1, "text": 0}, {"image": 1, "text": 2}]
    assert all(said)


def test_a_shard_of_the_same_name_from_elsewhere_is_refused(run: str, tmp_path: Path) -> None:
    write_shards(tmp_path / "a", [2])
    write_shards(tmp_path / "b", [3])
    embed(run, tmp_path / "a", tmp_path / "out")
    with pytest.raises(UserError, match=r"00000\.jsonl has the features of .*/a/00000\.tar, not of .*/b/00000\.tar"):
        embed(run, tmp_path / "b", tmp_path / "out")
    (tmp_path / "a").rename(tmp_path / "moved")
    listed = tmp_path / "out/shards.json"
    listed.write_text('{"00000.jsonl": {}}')
    with pytest.raises(UserError, match=r"shards\.json \(an entry is missing or of another type\)"):
        embed(run, tmp_path / "moved", tmp_path / "out")
    source = str(tmp_path / "moved/00000.tar")
    for text in ("{}", json.dumps({"00000.jsonl": {"source": source, "samples": 2, "missing": {"image": "x"}}})):
        listed.write_text(text)
        embed(run, tmp_path / "moved", tmp_path / "out")
        assert json.loads(listed.read_text())["00000.jsonl"]["missing"] == {"image": 0, "text": 0}


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, most: float = float("inf")) -> Iterator[list[int]]:
    """The number of inputs of each pass; the process is stopped in the pass after `most`."""
    passes: list[int] = []
    original = FeatureEncoder.encode

    def encode(self: FeatureEncoder, inputs: Any, towers: Any) -> np.ndarray:
        if len(passes) >= most:
            raise KeyboardInterrupt
        passes.append(len(inputs))
        return original(self, inputs, towers)

    with monkeypatch.context() as patch:
        patch.setattr(FeatureEncoder, "encode", encode)
        yield passes


@pytest.mark.parametrize("form", ["npy", "parquet", "webdataset"])
def test_an_interrupted_embedding_goes_on_and_gives_the_same_bytes(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    write_shards(tmp_path / "in", [9, 10])
    wanted = contents(embed(run, tmp_path / "in", tmp_path / "whole", format=form))
    with counted(monkeypatch, most=9), pytest.raises(KeyboardInterrupt):  # in the second shard
        embed(run, tmp_path / "in", tmp_path / "out", format=form)
    with counted(monkeypatch) as passes:
        out = embed(run, tmp_path / "in", tmp_path / "out", format=form)
    assert sum(passes) == 2 * 10, "the first shard is complete"
    assert contents(out) == wanted


def test_a_folder_that_another_process_writes_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(tmp_path / "in", [1])
    (tmp_path / "out").mkdir()
    monkeypatch.setattr("clipscale.launch.run_lock.SAME_HOST_S", 0.0)
    lock = RunLock(tmp_path / "out")
    lock.acquire()
    with pytest.raises(UserError, match=r"^out=.* is in use by process .*; stop that run, or choose another out=NAME"):
        embed(run, tmp_path / "in", tmp_path / "out")
    lock.release()
    embed(run, tmp_path / "in", tmp_path / "out")


def test_a_damaged_file_of_an_earlier_start_is_one_line(run: str, tmp_path: Path) -> None:
    """Its rows without features are counted anew, since no list names it."""
    write_shards(tmp_path / "in", [2])
    embed(run, tmp_path / "in", tmp_path / "out")
    (tmp_path / "out/shards.json").unlink()
    array = tmp_path / "out/00000.text.npy"
    array.write_bytes(array.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"00000\.jsonl \(00000\.text\.npy is cut off\); remove it, and start again"):
        embed(run, tmp_path / "in", tmp_path / "out")


def share(rank: int, size: int, run: str, source: str, out: str) -> None:
    embed(run, source, Path(out))


@pytest.mark.slow
def test_processes_share_the_shards_and_write_the_same_files(run: str, tmp_path: Path) -> None:
    write_shards(tmp_path / "in", [3, 5, 2])
    wanted = contents(embed(run, tmp_path / "in", tmp_path / "1"))
    for size in (2, 4):
        run_ranks(share, size, run, str(tmp_path / "in"), str(tmp_path / str(size)))
        assert contents(tmp_path / str(size)) == wanted, f"{size} processes"


def test_features_of_another_model_or_kind_are_refused(run: str, tmp_path: Path) -> None:
    source = write_shards(tmp_path / "in", [2])[0]
    embed(run, source, tmp_path / "out")
    for changes, what in (
        ({"dtype": "float16"}, "dtype: float32, not float16"),
        ({"features": "image"}, r"kinds: \['image', 'text'\], not None"),
        ({"transform": "train"}, "transform: eval, not train"),
    ):
        with pytest.raises(UserError, match=rf"holds features of another kind \({what}\); choose another folder"):
            embed(run, source, tmp_path / "out", **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"caption_key": "json:caption"},
        {"captions": ["txt=0.5", "json:caption=0.5"]},
        {"max_pixels": 100},
        {"max_bytes": 999},
        {"table": TableConfig(rows=2)},
        {"table": TableConfig(caption="other")},
        {"table": TableConfig(image="other")},
        {"table": TableConfig(root="/")},
    ],
    ids=str,
)
def test_a_start_with_other_inputs_is_refused(run: str, tmp_path: Path, changes: dict[str, Any]) -> None:
    (tmp_path / "0.png").write_bytes(picture(0))
    (tmp_path / "t.csv").write_text("filepath,title,other\n0.png,words,0.png\n")
    data = DataConfig(train=[str(tmp_path / "t.csv")])
    embed(run, "", tmp_path / "out", data=data)
    with pytest.raises(UserError, match=rf"holds features of another kind \(data\.{next(iter(changes))[:5]}"):
        embed(run, "", tmp_path / "out", data=replace(data, **changes))


def test_only_inputs_that_apply_are_compared(run: str, tmp_path: Path) -> None:
    """A folder of image features of an older version, which names no inputs, goes on; one with texts does not."""
    source = write_shards(tmp_path / "in", [2])[0]
    of_images: dict[str, Any] = {"features": "image", "format": "webdataset"}
    for out, changes in (("images", of_images), ("both", {})):
        embed(run, source, tmp_path / out, **changes)
        note = json.loads((tmp_path / out / "features.json").read_text())
        del note["features"]["inputs"]
        (tmp_path / out / "features.json").write_text(json.dumps(note))
    data = DataConfig(train=[str(source)], caption_key="json:caption", table=TableConfig(rows=3))
    embed(run, source, tmp_path / "images", data=data, **of_images)
    with pytest.raises(UserError, match=r"data\.max_pixels"):
        embed(run, source, tmp_path / "images", data=replace(data, max_pixels=100), **of_images)
    with pytest.raises(UserError, match="of an older version, which do not say from which texts"):
        embed(run, source, tmp_path / "both")


def test_the_verb_takes_a_source_as_data(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_shards(tmp_path / "in", [3])[0]
    words = [f"run={run}", f"data={source}", f"out={tmp_path / 'out'}", "device=cpu", "features=text"]
    assert cli(["embed", *words]) == 0
    assert "features of 3 samples" in capsys.readouterr().out
    assert np.load(tmp_path / "out/00000.text.npy").shape == (3, 16)
    assert not (tmp_path / "out/00000.image.npy").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_killed_embedding_goes_on_and_gives_the_same_bytes(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process kills itself, without a cleanup, before a pass of its own."""
    write_shards(tmp_path / "in", [9, 10, 6])
    wanted = contents(embed(run, tmp_path / "in", tmp_path / "whole"))
    original = FeatureEncoder.encode

    def killed_before(most: int) -> None:
        passes = 0

        def encode(self: FeatureEncoder, inputs: Any, towers: Any) -> np.ndarray:
            nonlocal passes
            if passes == most:
                os.kill(os.getpid(), signal.SIGKILL)
            passes += 1
            return original(self, inputs, towers)

        monkeypatch.setattr(FeatureEncoder, "encode", encode)
        embed(run, tmp_path / "in", tmp_path / "out")

    for most in (0, 1, 3, 4, 6, 1):
        _, status = os.waitpid(begin(killed_before, most), 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "it has ended by itself"
    with counted(monkeypatch) as passes:
        assert contents(embed(run, tmp_path / "in", tmp_path / "out")) == wanted
    assert 0 < sum(passes) < 2 * 25, "something was left to do, and not everything"
