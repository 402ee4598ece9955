"""The page's answers are the model's own: pictures of a text, captions, pictures and classes of a picture, by one model or two."""

import io
import json
import resource
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from clipscale.common.errors import UserError
from clipscale.config.data import DataConfig
from clipscale.explore import verb
from clipscale.explore.convert import as_arrays
from clipscale.explore.embedded import EmbeddedSet, nearest
from clipscale.models.towers import ClipModel
from tests.data.files import picture, write_tar
from tests.embed.test_embed import embed
from tests.explore.pages import client, config, names

pytest.importorskip("starlette.testclient", reason="starlette is not installed (clipscale[explore])")


@pytest.fixture(scope="module")
def model(place: Path) -> ClipModel:
    from clipscale.models.towers import load_model

    return load_model(place / "a")[0]


def expected(place: Path, query: torch.Tensor, kind: str) -> list[tuple[str, int]]:
    """Parts and rows by falling similarity, by a plain product."""
    named, rows = [], []
    for part in ("00000", "00001"):
        array = np.load(place / f"embedded/{part}.{kind}.npy")
        named += [(part, n) for n in range(len(array))]
        rows.append(array)
    scores = torch.from_numpy(np.concatenate(rows)).float() @ query
    return [named[n] for n in scores.argsort(descending=True, stable=True).tolist()]


def test_a_text_finds_the_pictures_that_the_model_puts_nearest(place: Path, page: Any, model: ClipModel) -> None:
    found = page.post("/search", json={"text": "two cats", "count": 5}).json()["answers"]
    with torch.no_grad():
        query = model.text(model.tokenizer(["two cats"]))[0]
    assert len(found) == 1 and names(found[0]["pictures"]) == expected(place, query, "image")[:5]
    best = found[0]["pictures"][0]
    assert best["caption"] == f"<b>{best['key']}</b> & a ring", "texts come as they are; the page shows them as text"


def test_the_page_begins_with_samples_from_everywhere(page: Any) -> None:
    assert names(page.post("/some", json={"count": 4}).json()["samples"]) == [
        ("00000", 0), ("00000", 3), ("00000", 6), ("00001", 2)
    ]  # fmt: skip
    assert len(page.post("/some", json={"count": 100}).json()["samples"]) == 12


def test_a_picture_finds_itself_its_captions_and_its_classes(place: Path, page: Any, model: ClipModel) -> None:
    data = picture(12, (40, 30))  # the third of the second shard
    found = page.post("/picture?count=12", content=data).json()
    with torch.no_grad():
        query = model.image(torch.from_numpy(model.eval_transform()(data))[None])[0]
        prompts = model.text(model.tokenizer(["a drawing of a cat.", "a drawing of a dog."]))
    (one,) = found["answers"]
    assert names(one["images"]) == expected(place, query, "image") and names(one["images"])[0] == ("00001", 2)
    assert one["images"][0]["score"] == pytest.approx(1, abs=1e-5)
    assert names(one["texts"]) == expected(place, query, "text")
    asked = {"picture": found["picture"], "labels": ["cat", "dog"], "template": "a drawing of a {}."}
    (classes,) = page.post("/classes", json=asked).json()["answers"]
    wanted = F.softmax(model.logit_scale.exp() * (prompts @ query), 0).tolist()
    assert [row["label"] for row in classes] == ["cat", "dog"]
    assert [row["share"] for row in classes] == pytest.approx(wanted, abs=1e-5)
    same = page.post("/sample", json={"part": "00001", "row": 2, "count": 12}).json()
    assert same == found, "a picture of the set is the same query"


def test_pictures_are_shown_small_and_by_their_place_alone(page: Any) -> None:
    answer = page.get("/small/00001/2")
    shown = Image.open(io.BytesIO(answer.content))
    assert answer.headers["content-type"] == "image/jpeg" and shown.size == (40, 30)
    wanted = np.asarray(Image.open(io.BytesIO(picture(12, (40, 30)))), np.float32)
    assert np.abs(np.asarray(shown, np.float32) - wanted).mean() < 6
    for name in ("00001/5", "00002/0", "..%2f00000/0", "00000/99999999999"):
        assert page.get(f"/small/{name}").status_code in (404, 422), name


def test_two_models_answer_side_by_side_and_the_second_embeds_the_set_itself(place: Path) -> None:
    settings = config(place, "embedded", "shards", against=str(place / "b"))
    page = client(settings)
    about = page.get("/about").json()
    assert [one["title"] for one in about] == ["a, step 7", "b, step 7"] and {one["samples"] for one in about} == {12}
    first, second = page.post("/search", json={"text": "two cats", "count": 12}).json()["answers"]
    assert sorted(names(first["pictures"])) == sorted(names(second["pictures"]))
    assert [row["score"] for row in first["pictures"]] != [row["score"] for row in second["pictures"]]
    found = page.post("/picture", content=picture(3, (40, 30))).json()
    assert [names(one["images"])[0] for one in found["answers"]] == [("00000", 3)] * 2
    (made,) = (place / "b/explore").iterdir()
    before = {path.name: path.stat().st_mtime_ns for path in made.glob("*.npy")}
    verb.prepared(settings)
    assert before and {path.name: path.stat().st_mtime_ns for path in made.glob("*.npy")} == before, (
        "it is embedded once"
    )
    assert not (place / "a/explore").exists(), "the first model has its embedded set"


@pytest.mark.parametrize("format", ["parquet", "webdataset"])
def test_every_format_gives_the_arrays_of_npy(place: Path, tmp_path: Path, format: str) -> None:
    """Also a picture that cannot be used, whose feature is missing, and its row."""
    shutil.copytree(place / "shards", tmp_path / "shards")
    write_tar(tmp_path / "shards/00002.tar", [("a.png", b"no picture"), ("a.txt", b"a caption"), ("b.png", picture(5))])
    source, kinds = tmp_path / "shards", ("image", "text")
    arrays = EmbeddedSet(embed(str(place / "a"), source, tmp_path / "npy", dtype="float16"))
    other = embed(str(place / "a"), source, tmp_path / format, dtype="float16", format=format)
    with pytest.raises(UserError, match="of another format"):
        EmbeddedSet(other)
    for _ in range(2):
        found = EmbeddedSet(as_arrays(other, tmp_path / "explore", DataConfig()))
        assert [found.sample(n) for n in range(len(found))] == [arrays.sample(n) for n in range(len(arrays))]
        assert [part.source for part in found.parts] == [part.source for part in arrays.parts]
        for kind in kinds:
            for one, two in zip(found.features(kind), arrays.features(kind), strict=True):
                assert one.dtype == two.dtype and np.array_equal(one, two, equal_nan=True)
    assert len(list((tmp_path / "explore").iterdir())) == 1
    answers = [
        client(config(place, *data, out=str(tmp_path / "out")))
        .post("/search", json={"text": "a ring", "count": 4})
        .json()
        for data in ([str(other)], [str(tmp_path / "npy")])
    ]
    assert answers[0] == answers[1] and answers[0]


def test_a_shard_in_two_formats_is_refused(place: Path, tmp_path: Path) -> None:
    for format in ("parquet", "webdataset"):
        folder = embed(str(place / "a"), place / "shards", tmp_path / "both", format=format)
    with pytest.raises(UserError, match="in two formats; embed each into a folder of its own"):
        as_arrays(folder, tmp_path / "out", DataConfig())


def test_damaged_features_of_every_format_are_one_line(place: Path, tmp_path: Path) -> None:
    for format, name in (("parquet", "00000.parquet"), ("webdataset", "00000.tar")):
        folder = embed(str(place / "a"), place / "shards", tmp_path / format, format=format)
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(UserError, match=r"^data: .*shards\.json .*; embed the set again$"):
            as_arrays(folder, tmp_path / "explore", DataConfig())
    entries = json.loads((folder / "shards.json").read_text())
    (folder / "shards.json").write_text(json.dumps({"../../other.tar": {"samples": 1}} | entries))
    with pytest.raises(UserError, match=r"No such file"):
        as_arrays(folder, tmp_path / "explore", DataConfig())


def test_pictures_of_a_table_are_found(place: Path, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    for number in range(3):
        (tmp_path / f"pictures/{number}.png").write_bytes(picture(number, (40, 30)))
    (tmp_path / "pictures/t.csv").write_text("image,caption\n" + "".join(f"{n}.png,caption {n}\n" for n in range(3)))
    page = client(config(place, str(tmp_path / "pictures/t.csv"), out=str(tmp_path / "out")))
    (one,) = page.post("/picture", content=picture(1, (40, 30))).json()["answers"]
    best = one["images"][0]
    assert best["caption"] == "caption 1" and best["score"] > 0.999
    assert Image.open(io.BytesIO(page.get(f"/small/{best['part']}/{best['row']}").content)).size == (40, 30)


# -- mistakes and damage ----------------------------------------------------------------------------------------------------


def test_features_of_other_weights_are_refused(place: Path) -> None:
    message = r"its features are of other weights of tiny \(digest \w{8}\) than those of b, step 7 \(\w{8}\); embed the set with that model"
    with pytest.raises(UserError, match=message):
        verb.prepared(config(place, "embedded", run=str(place / "b")))
    with pytest.raises(UserError, match=message):
        verb.prepared(config(place, "embedded", against=str(place / "b")))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("transform", "train"),
        ("image_size", 3),
        ("mean", [0.5, 0.5, 0.5]),
        ("std", [0.5, 0.5, 0.5]),
        ("model.resize", "squash"),
        ("model.interpolation", "bilinear"),
    ],
)
def test_features_of_other_pixels_than_those_of_queries_are_refused(
    place: Path, tmp_path: Path, name: str, value: Any
) -> None:
    shutil.copytree(place / "embedded", tmp_path / "set")
    note = json.loads((tmp_path / "set/features.json").read_text())
    (note["features"]["inputs"] if name.startswith("model.") else note["features"])[name] = value
    (tmp_path / "set/features.json").write_text(json.dumps(note))
    with pytest.raises(UserError, match=rf"its features are with {name}=.*, and a, step 7 takes {name}="):
        verb.prepared(config(place, str(tmp_path / "set")))


def test_parts_of_one_name_from_two_sources_are_refused(place: Path, tmp_path: Path) -> None:
    """The pictures of one would be shown for the other."""
    (tmp_path / "other").mkdir()
    shutil.copy(place / "shards/00001.tar", tmp_path / "other/00000.tar")
    embed(str(place / "b"), tmp_path / "other", tmp_path / "set")
    message = rf"the part 00000 is of {place}/shards/00000\.tar in .*, and of {tmp_path}/other/00000\.tar in "
    with pytest.raises(UserError, match=message):
        verb.prepared(config(place, "embedded", str(tmp_path / "set"), against=str(place / "b")))
    (tmp_path / "link").symlink_to(place / "shards")
    embed(str(place / "b"), tmp_path / "link", tmp_path / "same")
    verb.prepared(config(place, "embedded", str(tmp_path / "same"), against=str(place / "b")))


def test_a_set_of_an_older_version_is_searched(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "embedded", tmp_path / "set")
    note = json.loads((tmp_path / "set/features.json").read_text())
    del note["features"]["inputs"]
    (tmp_path / "set/features.json").write_text(json.dumps(note))
    assert verb.prepared(config(place, str(tmp_path / "set")))


def test_other_texts_of_the_same_shards_are_embedded_again(place: Path, tmp_path: Path) -> None:
    settings = config(place, "shards/00001.tar", out=str(tmp_path / "out"))
    for key in ("txt", "json:caption"):
        verb.prepared(replace(settings, data=replace(settings.data, caption_key=key)))
    assert len(list((tmp_path / "out").iterdir())) == 2


def damaged(folder: Path, kind: str) -> None:
    match kind:
        case "no list":
            (folder / "shards.json").unlink()
        case "another format":
            (folder / "shards.json").write_text('{"00000.tar": {"source": "x", "samples": 1}}')
        case "no entries":
            (folder / "shards.json").write_text('{"00000.jsonl": 3}')
        case "nothing":
            (folder / "shards.json").write_text("{}")
        case "fewer lines":
            (folder / "00000.jsonl").write_text("{}\n")
        case "torn":
            data = (folder / "00000.image.npy").read_bytes()
            (folder / "00000.image.npy").write_bytes(data[:-9])
        case "objects":
            np.save(folder / "00000.text.npy", np.array([{}] * 7), allow_pickle=True)
        case "another width":
            np.save(folder / "00000.text.npy", np.zeros((7, 3), np.float32))


@pytest.mark.parametrize(
    "kind", ["no list", "another format", "no entries", "nothing", "fewer lines", "torn", "objects", "another width"]
)
def test_a_damaged_set_is_one_line(place: Path, tmp_path: Path, kind: str) -> None:
    shutil.copytree(place / "embedded", tmp_path / "set")
    damaged(tmp_path / "set", kind)
    with pytest.raises(UserError, match=f"data.*{tmp_path / 'set'}"):
        EmbeddedSet(tmp_path / "set")


def test_a_set_that_changes_under_the_page_and_lost_pictures_are_said(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "embedded", tmp_path / "set")
    listed = json.loads((tmp_path / "set/shards.json").read_text())
    listed["00000.jsonl"]["source"] = str(tmp_path / "gone.tar")
    (tmp_path / "set/shards.json").write_text(json.dumps(listed))
    page = client(config(place, str(tmp_path / "set")))
    assert page.get("/small/00000/0").status_code == 422 and page.get("/small/00001/0").status_code == 200
    (tmp_path / "set/00001.jsonl").write_text("{" * 2000)
    answer = page.post("/search", json={"text": "a"})
    assert answer.status_code == 500 and "row" in answer.json()["error"]


def test_a_set_of_more_files_than_a_process_may_open_is_searched(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((40, 4)).astype(np.float16)
    for number, row in enumerate(rows):
        np.save(tmp_path / f"{number:05d}.image.npy", row[None])
        (tmp_path / f"{number:05d}.jsonl").write_text(json.dumps({"key": str(number)}) + "\n")
    listed = {f"{number:05d}.jsonl": {"source": "x.tar", "samples": 1} for number in range(len(rows))}
    (tmp_path / "shards.json").write_text(json.dumps(listed))
    (tmp_path / "features.json").write_text(json.dumps({"features": {"width": 4}}))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = {int(path.name) for path in Path("/dev/fd").iterdir()}
    free = [number for number in range(len(taken) + 8) if number not in taken]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[7] + 1, hard))
    try:
        embedded = EmbeddedSet(tmp_path)
        found = nearest(embedded.features("image"), torch.from_numpy(rows[7]).float(), 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    wanted = int((rows.astype(np.float32) @ rows[7].astype(np.float32)).argmax())
    assert [row for row, _ in found] == [wanted]
