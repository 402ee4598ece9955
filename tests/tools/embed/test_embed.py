"""Stored features equal the model's own, in both formats, by any number of processes, and after a kill."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from clipscale.cli.main import main as cli
from clipscale.config.data import DataConfig
from clipscale.data.picture import Picture
from clipscale.data.sample import BrokenSampleError
from clipscale.data.shards.features import find_teachers
from clipscale.data.shards.reader import ReadFailure, read_shard
from clipscale.models.towers import ClipModel, build_model
from clipscale.tools.embed import notes
from clipscale.tools.embed.arrays import open_embedded_set
from clipscale.tools.embed.feature_encoder import FeatureEncoder
from clipscale.tools.embed.pictures import stored_picture, thumbnail
from clipscale.tools.embed.settings import EmbedConfig
from clipscale.tools.embed.verb import main
from tests.conftest import Capture
from tests.data.files import picture, sample, write_shards, write_tar
from tests.support.checkpoints import save_model
from tests.support.ranks import run_ranks
from tests.support.user_errors import refused
from tests.tools.eval.test_verb import TINY

SHARDS = {"teacher": "t"}
Rows = dict[str, tuple[np.ndarray, np.ndarray]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("run")
    save_model(folder, build_model(TINY), TINY)
    return str(folder)


def embed(run: str, source: str | Path, out: Path, **changes: Any) -> Path:
    options = {"run": run, "out": str(out), "batch": 4, "dtype": "float32", "device": "cpu"} | changes
    return Path(main(EmbedConfig(data=DataConfig(train=[str(source)]), **options))["out"])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def rows_of_npy(folder: Path) -> Rows:
    rows = {}
    for file in folder.glob("*.jsonl"):
        image, text = (np.load(file.with_name(f"{file.stem}.{kind}.npy")) for kind in ("image", "text"))
        for number, line in enumerate(file.read_text().splitlines()):
            rows[json.loads(line)["key"]] = (image[number], text[number])
    return rows


def rows_of_shards(folder: Path) -> Rows:
    """The features in shards, as training reads them."""
    (teacher,) = find_teachers(DataConfig(train=[str(folder)]), ["t"])
    assert (teacher.member, teacher.dtype) == ("t.npy", "float32")
    raws = [raw for file in folder.glob("*.tar") for raw in read_shard(str(file), ReadFailure())]
    rows = {raw.key: np.load(io.BytesIO(raw.members["t.npy"])) for raw in raws}
    return {key: (image, text) for key, (image, text) in rows.items()}


def by_the_model(model: ClipModel, data: bytes, caption: str) -> tuple[np.ndarray, np.ndarray]:
    """Features one at a time."""
    with torch.no_grad():
        image = model.image(torch.from_numpy(model.eval_transform()(data))[None])[0]
        return image.numpy(), model.text(model.tokenizer([caption]))[0].numpy()


def test_photographs_are_embedded_upright_as_training_sees_them(run: str, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    photo, upright = io.BytesIO(), io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (32, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(photo, "JPEG", exif=exif)
    Image.fromarray(Picture.read(photo.getvalue()).decode()).save(upright, "PNG")
    members = [("a.jpg", photo.getvalue()), ("a.txt", b"red"), ("b.png", upright.getvalue()), ("b.txt", b"red")]
    rows = rows_of_npy(embed(run, write_tar(tmp_path / "0.tar", members), tmp_path / "out"))
    assert np.array_equal(rows["a"][0], rows["b"][0])
    assert Image.open(io.BytesIO(thumbnail(photo.getvalue(), 64))).size == (32, 64)


@pytest.mark.parametrize(("form", "read"), [({}, rows_of_npy), (SHARDS, rows_of_shards)])
def test_features_are_the_models_own_under_the_samples_keys(run: str, tmp_path: Path, form: dict, read: Any) -> None:
    torch.manual_seed(3)
    model = build_model(TINY).eval()
    write_shards(tmp_path / "in", [5, 6])
    rows = read(embed(run, tmp_path / "in", tmp_path / "out", **form))
    assert len(rows) == 11
    for key, (image, text) in rows.items():
        expected = by_the_model(model, picture(int(key[-4:]) % 7), f"caption {key}")
        assert max(np.abs(image - expected[0]).max(), np.abs(text - expected[1]).max()) < 1e-6, key
    shards = json.loads((tmp_path / "out/shards.json").read_text())
    assert [entry["samples"] for entry in shards.values()] == [5, 6]
    assert next(iter(shards.values()))["source"] == str(tmp_path / "in/00000.tar")


def test_a_sample_without_a_usable_picture_or_text_keeps_its_row(
    run: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    members = [*sample("a"), ("b.png", b"no picture"), ("b.txt", b"words"), ("c.png", picture(1)), *sample("d")]
    write_tar(tmp_path / "x.tar", members)
    rows = rows_of_npy(embed(run, tmp_path / "x.tar", tmp_path / "npy"))
    assert [key for key, (image, _) in rows.items() if np.isnan(image).all()] == ["b"]
    assert [key for key, (_, text) in rows.items() if np.isnan(text).all()] == ["c"]
    assert "2 of 4 samples without a usable picture or text" in caplog.text


@pytest.mark.parametrize("form", [{}, SHARDS])
def test_an_interrupted_embedding_goes_on_and_gives_the_same_bytes(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: dict
) -> None:
    write_shards(tmp_path / "in", [9, 10])
    whole = contents(embed(run, tmp_path / "in", tmp_path / "whole", **form))
    encode = FeatureEncoder.encode
    passes = []

    def interrupted(self: FeatureEncoder, tower: Any, prepared: Any, inputs: Any) -> np.ndarray:
        passes.append(len(inputs))
        if len(passes) == 10:  # in the second shard
            raise KeyboardInterrupt
        return encode(self, tower, prepared, inputs)

    monkeypatch.setattr(FeatureEncoder, "encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        embed(run, tmp_path / "in", tmp_path / "out", **form)
    write_shards(tmp_path / "b", [9, 10])
    with refused(r"is of .*/in/00000\.tar and of .*/b/00000\.tar; choose"):
        embed(run, tmp_path / "b", tmp_path / "out", **form)
    if not form:
        with refused("names no complete file.*embed its shards again"):
            open_embedded_set(tmp_path / "out")
    passes.clear()
    assert contents(embed(run, tmp_path / "in", tmp_path / "out", **form)) == whole
    assert sum(passes) == 2 * 10, "the first shard is complete"


def test_a_second_teacher_reads_the_shards_of_the_first(run: str, tmp_path: Path) -> None:
    """A sample without a usable picture or text keeps its place and its members, without features."""
    write_tar(tmp_path / "x.tar", [*sample("a"), ("b.png", b"no picture"), ("b.txt", b"words"), *sample("c")])
    first = embed(run, tmp_path / "x.tar", tmp_path / "one", teacher="one")
    second = embed(run, first, tmp_path / "both", teacher="two", dtype="float16")
    one, two = find_teachers(DataConfig(train=[str(second)]), ["one", "two"])
    assert (one.dtype, two.dtype, one.width, two.width) == ("float32", "float16", 16, 16)
    raws = [*read_shard(str(second / "x.tar"), ReadFailure())]
    assert [(raw.key, len(raw.members)) for raw in raws] == [("a", 5), ("b", 2), ("c", 5)]
    assert np.allclose(one.read(raws[0].members), two.read(raws[0].members), atol=1e-3)


def test_teachers_that_are_not_the_same_in_all_folders_are_not_noted_as_one(run: str, tmp_path: Path) -> None:
    folders = [write_shards(tmp_path / name, [1])[0].parent for name in ("in", "x", "y")]
    for number, folder in enumerate(folders):
        shutil.move(folder / "00000.tar", folder / f"{number}.tar")
        note = {"width": 16, "dtype": "float32", "scale": 1.0}
        notes = {"one": note, "two": note | {"scale": float(number)}} if number else {"one": note}
        (folder / "features.json").write_text(json.dumps(notes))

    def noted(*folders: Path) -> set[str]:
        data = DataConfig(train=[str(folder) for folder in folders])
        out = tmp_path / "out{x}"  # braces are ordinary letters
        main(EmbedConfig(data=data, run=run, out=str(out), device="cpu", teacher="t"))
        return set(json.loads((out / "features.json").read_text()))

    with refused(r"y/2\.tar has features of another two than .*/x/1\.tar; choose"):
        noted(*folders[1:])
    assert noted(*folders[:2]) == {"one", "t"}, "a folder lacks the features of the other"
    assert noted(folders[2]) == {"one", "t"}, "files of an earlier command lack them"
    (folders[2] / "features.json").write_text(json.dumps({"one": note | {"scale": 5.0}}))
    with refused(r"out\{x\} has features of another one than these shards; choose an out=DIR"):
        noted(folders[2])
    (folders[2] / "features.json").unlink()
    assert noted(folders[2]) == {"t"}


def test_two_commands_into_one_folder_keep_each_others_results(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """One ends while another lists its shards. A set with files that are not complete is not taken for a whole one."""
    for name, other in (("a", "0"), ("b", "1")):
        shutil.move(write_shards(tmp_path / name, [3])[0], tmp_path / name / f"{other}.tar")
    list_shards = notes.list_shards

    def slow(data: DataConfig) -> Any:
        monkeypatch.setattr(notes, "list_shards", list_shards)
        embed(run, tmp_path / "b", tmp_path / "out")
        return list_shards(data)

    monkeypatch.setattr(notes, "list_shards", slow)
    out = embed(run, tmp_path / "a", tmp_path / "out")
    embedded = open_embedded_set(out)
    assert (len(embedded), embedded.unfinished) == (6, 0)
    entries = json.loads((out / "shards.json").read_text())
    del entries["1.jsonl"]["samples"]
    (out / "shards.json").write_text(json.dumps(entries))
    open_embedded_set(out).warn_of_unfinished()
    assert "1 shard of 2 left out" in capsys.readouterr().err


def test_a_picture_of_a_changed_shard_is_not_shown_under_another_samples_caption(run: str, tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", [*sample("a", 0), *sample("b", 1)])
    embedded = open_embedded_set(embed(run, tmp_path / "x.tar", tmp_path / "out"))
    assert stored_picture(embedded, embedded.sample(1)) == picture(1)
    write_tar(tmp_path / "x.tar", [*sample("b", 1), *sample("a", 0)])
    with pytest.raises(BrokenSampleError, match="sample 1 is a, not b"):
        stored_picture(embedded, embedded.sample(1))


def share(rank: int, size: int, run: str, source: str, out: str) -> None:
    embed(run, source, Path(out))


@pytest.mark.slow
def test_processes_share_the_shards_and_write_the_same_files(run: str, tmp_path: Path) -> None:
    write_shards(tmp_path / "in", [3, 5, 2])
    alone = contents(embed(run, tmp_path / "in", tmp_path / "1"))
    run_ranks(share, 2, run, str(tmp_path / "in"), str(tmp_path / "2"))
    assert contents(tmp_path / "2") == alone


def test_features_of_another_kind_from_elsewhere_or_with_damaged_records_are_refused(run: str, tmp_path: Path) -> None:
    write_shards(tmp_path / "in", [2])
    write_shards(tmp_path / "b", [3])
    embed(run, tmp_path / "in", tmp_path / "out")
    with refused(r"holds features of another kind \(dtype: float32, not float16\); choose"):
        embed(run, tmp_path / "in", tmp_path / "out", dtype="float16")
    with refused(r"00000\.jsonl is of .*/in/00000\.tar and of .*/b/00000\.tar; choose"):
        embed(run, tmp_path / "b", tmp_path / "out")
    for name, damage in ("features.json", "\0"), ("shards.json", "[]"), ("shards.json", '{"a": 1}'):
        (tmp_path / "out" / name).write_text(damage)
        with refused(f"{name}.*; remove this file"):
            embed(run, tmp_path / "in", tmp_path / "out")
        (tmp_path / "out" / name).unlink()
    embed(run, tmp_path / "in", tmp_path / "out")


def test_the_verb_takes_a_source_as_data(run: str, tmp_path: Path, capsys: Capture) -> None:
    source = write_shards(tmp_path / "in", [3])[0]
    words = [f"run={run}", f"data={source}", f"out={tmp_path / 'out'}", "device=cpu"]
    assert cli(["embed", *words]) == 0
    assert "features of 3 samples" in capsys.readouterr().out
    assert np.load(tmp_path / "out/00000.text.npy").shape == (3, 16)
    with refused("out is not set; give the folder to write"):
        main(EmbedConfig(run=run, data=DataConfig(train=[str(source)])))
