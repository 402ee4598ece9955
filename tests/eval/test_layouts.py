"""Evaluation sets in shards are read. Sets have names and limits. What is no set is refused with its reason."""

import gzip
import io
import json
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clipscale.config.sections import EvalConfig
from clipscale.data.eval_transform import EvalTransform
from clipscale.data.picture import Picture
from clipscale.eval.classification import ClassificationSet
from clipscale.eval.sets.item import ImageRef
from clipscale.eval.sets.load import load_set, load_sets
from clipscale.eval.suites import load_chosen_sets
from tests.eval.sets import (
    NAMES,
    TEMPLATES,
    classification_set,
    load_classes,
    members,
    pair_set,
    picture,
    retrieval_set,
    write_shards,
    write_tar,
)
from tests.support.user_errors import refused


def test_classification_shards_are_read(tmp_path: Path) -> None:
    eval_set = load_classes(classification_set(tmp_path / "colours"))
    assert (eval_set.kind, len(eval_set), eval_set.answers) == ("classification", 6, list(range(6)))
    assert eval_set.classnames == NAMES
    assert eval_set.templates == TEMPLATES
    assert [image.read() for image in eval_set.images] == [picture(name) for name in NAMES]


def test_retrieval_shards_keep_every_caption_with_its_image(tmp_path: Path) -> None:
    root = retrieval_set(tmp_path / "captions", lambda name: [name] * (1 + NAMES.index(name) % 2) + ["", "  "])
    eval_set = load_set(root)
    assert eval_set.kind == "retrieval"
    assert eval_set.answers == [["red"], ["green"] * 2, ["blue"], ["yellow"] * 2, ["cyan"], ["white"] * 2]


def test_sets_are_called_as_their_folders(tmp_path: Path) -> None:
    paths = [str(classification_set(tmp_path / name / "wds_colours")) for name in ("x", "y")]
    assert load_sets(paths[:1])[0].name == "colours"
    for twice in (paths, [paths[0], paths[0] + "/"]):
        with refused(r"two sets, .* are called colours; leave one out, or rename its folder"):
            load_chosen_sets(EvalConfig(sets=twice))
    for parent in ("imagenet", "places"):  # one after the other, into the results of one run
        for name in ("val", "holdout"):
            assert load_sets([str(classification_set(tmp_path / parent / name))])[0].name == f"{parent}/{name}"


@pytest.mark.parametrize("limit", [3, 6, 8, 17])
@pytest.mark.parametrize("order", ["sorted", "cycling", "shuffled"])
def test_a_limit_takes_of_each_class_in_proportion(order: str, limit: int) -> None:
    """Even distances would hit one class alone in a set whose classes cycle."""
    labels = [c for c in range(6) for _ in range(4)] if order == "sorted" else [c for _ in range(4) for c in range(6)]
    random.Random(0).shuffle(labels) if order == "shuffled" else None
    images = [ImageRef(Path(str(i))) for i in range(24)]
    eval_set = ClassificationSet(name="s", path=Path(), images=images, answers=labels, classnames=NAMES)
    part = eval_set.limited(limit)
    counts = [part.answers.count(c) for c in range(6)]
    assert sum(counts) == limit and max(counts) - min(counts) <= 1, counts
    numbers = [int(str(image.path)) for image in part.images]
    assert numbers == sorted(numbers) and part.answers == [labels[i] for i in numbers]


def test_a_limited_set_has_its_own_name_and_keeps_the_captions_of_its_images(tmp_path: Path) -> None:
    captions = load_set(retrieval_set(tmp_path / "captions")).limited(3)
    assert captions.answers == [[f"all {name}", f"nothing but {name}"] for name in ("red", "blue", "cyan")]
    assert captions.label == "captions (limit 3)"
    assert captions.limited(3).label == captions.label, "a limit of the whole set limits nothing"


@pytest.mark.parametrize("name", ["imagenet1k", "wds_imagenetv2"])
def test_imagenet_needs_no_class_names(tmp_path: Path, name: str) -> None:
    members = [m for i in (3, 998) for m in ((f"{i}.webp", picture("red", "WEBP")), (f"{i}.cls", str(i).encode()))]
    eval_set = load_classes(write_shards(tmp_path / name, [members], {}))
    assert len(eval_set.classnames) == 1000 and len(eval_set.templates) == 80
    assert eval_set.classnames[0] == "tench" and eval_set.templates[0] == "a bad photo of a {c}."


@pytest.mark.parametrize("name", ["imagenet-a", "wds_imagenet-r", "imagenet21k", "tiny-imagenet"])
def test_labels_of_other_sets_are_not_imagenets(tmp_path: Path, name: str) -> None:
    members = [("0.png", picture("red")), ("0.cls", b"0")]
    with refused(r"no classnames\.txt"):
        load_set(write_shards(tmp_path / "without" / name, [members], {}))
    names = {"classnames.txt": "stingray\ngoldfinch\n"}
    eval_set = load_classes(write_shards(tmp_path / "with" / name, [members], names))
    assert eval_set.classnames == ["stingray", "goldfinch"] and len(eval_set.templates) == 80


def test_paths_that_are_no_set_are_refused(tmp_path: Path) -> None:
    (tmp_path / "set.csv").write_text("x")
    (tmp_path / "set.json").write_text("[1]")
    classification_set(tmp_path / "set")
    (tmp_path / "empty").mkdir()
    for name in ("a.tar.gz", "a.tgz", "a.tar"):  # beside a shard that could be read, too
        pair_set(tmp_path / name).joinpath(name).write_bytes(gzip.compress(b"x"))
    for name, message in {
        "empty": "none of the known layouts",
        **dict.fromkeys(("a.tar.gz", "a.tgz", "a.tar"), "/a.t.* is gzipped.* gunzip it"),
        "set/test": r"nothing to evaluate: 6 no_caption; fetch",
        "set.csv": r"is not a caption file \(\.json\)",
        "set.json": "neither COCO's",
    }.items():
        with refused(message):
            load_set(tmp_path / name)


def test_shards_of_pairs_are_read(tmp_path: Path) -> None:
    """What `data pack` and img2dataset write: a caption is a whole text, or there is a list of them."""
    first = [("a.png", picture("red")), ("a.txt", b"red,\nall of it"), ("b.png", picture("blue")), ("b.txt", b" ")]
    several = json.dumps({"captions": ["green", "as grass"], "url": "x"}).encode()
    second = [("c.png", picture("green")), ("c.txt", b"green"), ("c.json", several)]
    write_tar(tmp_path / "00000.tar", first)
    write_tar(tmp_path / "00001.tar", second)
    eval_set = load_set(tmp_path)
    assert eval_set.kind == "pairs"
    assert eval_set.answers == [["red,\nall of it"], [], ["green", "as grass"]]
    assert [image.read() for image in eval_set.images[::2]] == [picture("red"), picture("green")]
    assert [image.defect for image in eval_set.images] == ["", "empty_caption", ""]


@pytest.mark.parametrize("about", [b"{", b'{"captions": [1]}'], ids=["damaged", "no text in its list"])
def test_a_pair_with_a_good_text_is_evaluated_whatever_its_json_is(tmp_path: Path, about: bytes) -> None:
    """Training on `txt` takes it, too. Without a text the reason is the json's."""
    alone = [("b.png", picture("blue")), ("b.json", about)]
    write_tar(tmp_path / "0.tar", [("a.png", picture("red")), ("a.txt", b"red"), ("a.json", about), *alone])
    eval_set = load_set(tmp_path)
    assert eval_set.answers == [["red"], []]
    assert [image.defect for image in eval_set.images] == ["", "bad_json" if about == b"{" else "no_caption"]


def test_the_camera_orientation_counts_in_held_out_pairs_alone(tmp_path: Path) -> None:
    """Training does the same. Published layouts are measured without it, as open_clip does."""
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = np.repeat(np.repeat(np.random.default_rng(0).integers(0, 256, (2, 4, 3), dtype=np.uint8), 16, 0), 16, 1)
    photo = io.BytesIO()
    Image.fromarray(pixels).save(photo, "JPEG", exif=exif, quality=95)
    shards = [("a.jpg", photo.getvalue()), ("a.txt", b"a phone's"), ("b.png", picture("red")), ("b.txt", b"red")]
    (tmp_path / "pairs").mkdir()
    write_tar(tmp_path / "pairs" / "00000.tar", shards)
    turned, plain = (image.read() for image in load_set(tmp_path / "pairs").images)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(turned))), Picture.read(photo.getvalue()).decode())
    assert Image.open(io.BytesIO(turned)).size == (32, 64) and plain == picture("red")
    assert EvalTransform(8)(turned).shape == (3, 8, 8)
    published = load_set(write_shards(tmp_path / "published", [shards], {"dataset_type.txt": "retrieval"}))
    assert [image.read() for image in published.images] == [photo.getvalue(), picture("red")]


@pytest.mark.parametrize("name", ["objectnet", "wds_objectnet", "objectnet-1.0/images", "others"])
def test_the_red_frame_of_objectnets_pictures_is_cut_off(tmp_path: Path, name: str) -> None:
    """It is two pixels wide, as its authors say. A picture without a frame, and other sets, stay as they are."""
    noise = np.random.default_rng(0).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    framed = np.full((13, 16, 3), (255, 0, 0), np.uint8)
    framed[2:-2, 2:-2] = noise
    files = [io.BytesIO(), io.BytesIO()]
    for pixels, file in zip((framed, noise), files):
        Image.fromarray(pixels).save(file, "PNG")
    samples = members("cls", ["0", "1"], [file.getvalue() for file in files])
    root = write_shards(tmp_path / name, [samples], {"classnames.txt": "red\nblue\n"})
    read = [image.read() for image in load_set(root).images]
    expected = framed if name == "others" else noise
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(read[0]))), expected)
    assert read[1] == files[1].getvalue()
