"""Every layout of evaluation sets is read, and unusable sets are refused with the reason."""

import json
import random
from pathlib import Path

import pytest

from clipscale.common.errors import UserError
from clipscale.eval.sets.item import CLASSIFICATION, COMPOSITION, EvalSet, ImageRef, Question
from clipscale.eval.sets.load import load_set, load_sets
from clipscale.eval.sets.prompts import render
from tests.eval.sets import NAMES, classification_set, karpathy_json, picture, retrieval_set, write_shards, write_tar


def test_classification_shards(tmp_path: Path) -> None:
    item = load_set(classification_set(tmp_path / "colours"))
    assert (item.kind, len(item), item.labels) == ("classification", 6, list(range(6)))
    assert item.classnames == NAMES
    assert [render(t, "red") for t in item.templates] == ["a photo of red.", "the colour red {{no braces}}"]
    assert [image.read() for image in item.images] == [picture(name) for name in NAMES]


def test_retrieval_shards_keep_every_caption_with_its_image(tmp_path: Path) -> None:
    root = retrieval_set(tmp_path / "captions", lambda name: [name] * (1 + NAMES.index(name) % 2) + ["", "  "])
    item = load_set(root)
    assert item.kind == "retrieval"
    assert item.captions == ["red", "green", "green", "blue", "yellow", "yellow", "cyan", "white", "white"]
    assert item.owner == [0, 1, 1, 2, 3, 3, 4, 5, 5]


def test_sets_have_different_names(tmp_path: Path) -> None:
    paths = [classification_set(tmp_path / a / b) for a, b in (("x", "wds_colours"), ("y", "wds_colours"))]
    assert [s.name for s in load_sets([str(p) for p in paths])] == ["x/wds_colours", "y/wds_colours"]
    assert load_sets([str(paths[0])])[0].name == "colours"


@pytest.mark.parametrize("limit", [3, 6, 8, 12, 17])
@pytest.mark.parametrize("order", ["sorted", "cycling", "shuffled"])
def test_a_limit_takes_of_each_class_in_proportion(order: str, limit: int) -> None:
    """Of a set whose classes cycle, even distances would hit one class in a whole number of cycles."""
    labels = [c for c in range(6) for _ in range(4)] if order == "sorted" else [c for _ in range(4) for c in range(6)]
    random.Random(0).shuffle(labels) if order == "shuffled" else None
    item = EvalSet("s", Path(), CLASSIFICATION, [ImageRef(Path(str(i))) for i in range(24)], labels, NAMES)
    part = item.limited(limit)
    counts = [part.labels.count(c) for c in range(6)]
    assert sum(counts) == limit and max(counts) - min(counts) <= 1, counts
    numbers = [int(str(image.path)) for image in part.images]
    assert numbers == sorted(numbers) and part.labels == [labels[i] for i in numbers]


def test_a_limit_takes_of_each_group_and_of_each_file_of_questions(tmp_path: Path) -> None:
    images = [ImageRef(Path(str(i))) for i in range(24)]
    item = EvalSet("s", Path(), CLASSIFICATION, images, [0] * 24, ["red"], groups=[i % 4 for i in range(24)])
    assert sorted(item.limited(4).groups) == [0, 1, 2, 3]
    questions = [Question((i,), (2 * i, 2 * i + 1)) for i in range(24)]
    asked = EvalSet("s", Path(), COMPOSITION, images, captions=["x"] * 48, questions=questions, part_of=["a", "b"] * 12)
    assert sorted(asked.limited(4).part_of) == ["a", "a", "b", "b"]


def test_a_limited_set_of_captions_keeps_those_of_its_images(tmp_path: Path) -> None:
    captions = load_set(retrieval_set(tmp_path / "captions")).limited(3)
    assert captions.captions == [f"{how} {n}" for n in ("red", "blue", "cyan") for how in ("all", "nothing but")]
    assert captions.owner == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(("name", "classes"), [("imagenet1k", [3, 998]), ("imagenetv2", range(10))])
def test_imagenet_needs_no_class_names(tmp_path: Path, name: str, classes: range) -> None:
    members = [m for i in classes for m in ((f"{i}.webp", picture("red", "WEBP")), (f"{i}.cls", str(i).encode()))]
    item = load_set(write_shards(tmp_path / name, [members], {}))
    assert len(item.classnames) == 1000 and len(item.templates) == 80
    assert item.classnames[0] == "tench" and item.templates[0] == "a bad photo of a {c}."


@pytest.mark.parametrize("name", ["imagenet-a", "wds_imagenet-r", "imagenet_o"])
def test_subsets_of_imagenet_bring_their_class_names(tmp_path: Path, name: str) -> None:
    members = [("0.png", picture("red")), ("0.cls", b"0")]
    with pytest.raises(UserError, match=r"no classnames\.txt"):
        load_set(write_shards(tmp_path / "without" / name, [members], {}))
    item = load_set(write_shards(tmp_path / "with" / name, [members], {"classnames.txt": "stingray\ngoldfinch\n"}))
    assert item.classnames == ["stingray", "goldfinch"] and len(item.templates) == 80


def folders(root: Path, names: list[str]) -> Path:
    for i, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for j in range(i + 1):
            (root / name / f"{j}.PNG").write_bytes(picture("red"))
        (root / name / "notes.txt").write_text("no image")
    return root


def test_class_folders_by_name(tmp_path: Path) -> None:
    item = load_set(folders(tmp_path / "set", ["red_fox", "cat"]))
    assert item.classnames == ["cat", "red fox"] and item.labels == [0, 0, 1]
    assert item.templates == ["a photo of a {c}."]


def test_class_folders_by_wordnet_id(tmp_path: Path) -> None:
    item = load_set(folders(tmp_path / "set", ["n01498041", "n01443537"]))
    assert item.classnames == ["goldfish", "stingray"] and item.labels == [0, 0, 1] and len(item.templates) == 80
    with pytest.raises(UserError, match="n99999999 is no class of ImageNet-1k"):
        load_set(folders(tmp_path / "other", ["n99999999"]))


def test_an_archive_of_class_folders_is_read_as_it_is(tmp_path: Path) -> None:
    """As imagenet-a.tar, -r and -o are published."""
    members = [(f"imagenet-a/n0{wnid}/{i}.jpg", picture(n)) for i, n in enumerate(NAMES) for wnid in (1498041, 1443537)]
    write_tar(
        tmp_path / "imagenet-a.tar",
        [*members[::-1], ("imagenet-a/README.txt", b"x"), ("imagenet-a/n01498041/._0.jpg", b"x")],
    )
    (item,) = load_sets([str(tmp_path / "imagenet-a.tar")])
    assert (item.name, item.classnames, len(item.templates)) == ("imagenet-a", ["goldfish", "stingray"], 80)
    assert item.labels == [0] * 6 + [1] * 6 and [image.read() for image in item.images] == 2 * [
        picture(n) for n in NAMES
    ]
    (tmp_path / "imagenet-o.tar").write_bytes((tmp_path / "imagenet-a.tar").read_bytes()[:700])
    with pytest.raises(UserError, match=r"cannot read .*imagenet-o\.tar.*; imagenet-o comes from https"):
        load_set(tmp_path / "imagenet-o.tar")
    write_tar(tmp_path / "set.tar", [("a.txt", b"x")])
    with pytest.raises(UserError, match=r"set\.tar holds no image \(jpg"):
        load_set(tmp_path / "set.tar")


def test_a_published_set_that_cannot_be_used_names_its_source(tmp_path: Path) -> None:
    source = "vtab/dtd comes from https://huggingface.co/datasets/clip-benchmark/wds_vtab-dtd"
    shard = [("0.png", PNG), ("0.cls", b"7")]
    for files in ({}, NO_NAMES, {"test/nshards.txt": "none"}):
        with pytest.raises(UserError, match=source):
            load_set(write_shards(tmp_path / str(len(files)) / "wds_vtab-dtd", [shard], files))
            load_set.cache_clear()
    (tmp_path / "wds_vtab-dtd").mkdir()
    with pytest.raises(UserError, match=f"none of the known layouts.*jpg, jpeg, png, webp.*{source}"):
        load_set(tmp_path / "wds_vtab-dtd")


def test_karpathy_and_coco_caption_files(tmp_path: Path) -> None:
    item = load_set(karpathy_json(tmp_path / "flickr"))
    assert item.captions == [f"all {n}" for n in NAMES[:-1]] and item.owner == [0, 1, 2, 3, 4]
    assert [i.read() for i in item.images] == [picture(n) for n in NAMES[:-1]]

    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "7.png").write_bytes(picture("blue"))
    (tmp_path / "captions.json").write_text(
        '{"images": [{"id": 7, "file_name": "7.png"}, {"id": 8, "file_name": "8.png"}],'
        ' "annotations": [{"image_id": 7, "caption": "blue"}, {"image_id": 7, "caption": " all blue\\n"}]}'
    )
    item = load_set(tmp_path / "captions.json")
    assert item.captions == ["blue", "all blue"] and item.owner == [0, 0] and len(item) == 1


def test_clip_benchmarks_list_of_flickr(tmp_path: Path) -> None:
    for name in ("7", "8"):
        (tmp_path / f"{name}.jpg").write_bytes(picture("blue"))
    file = tmp_path / "flickr30k_test_karpathy.txt"
    file.write_text("image,caption\n7.jpg,a dog, black\n8.jpg,a cat\n7.jpg,all .jpg, files\n")
    item = load_set(file)
    assert item.captions == ["a dog, black", "all .jpg, files", "a cat"] and item.owner == [0, 0, 1]
    file.write_text("image,caption\n7.png\n")
    load_set.cache_clear()
    with pytest.raises(UserError, match=r"has the line '7\.png'; it needs lines such as 7\.jpg,a black dog"):
        load_set(file)


PNG = picture("red")
NO_NAMES = {"classnames.txt": "red\n"}


@pytest.mark.parametrize(
    ("shards", "files", "message"),
    [
        ([[("0.png", PNG), ("0.cls", b"1")]], NO_NAMES, r"1 labels outside its 1 classes \(such as 1\)"),
        ([[("0.png", PNG), ("0.cls", b"-1")]], NO_NAMES, "outside its 1 classes"),
        ([[("0.png", PNG), ("0.cls", b"red")]], NO_NAMES, "the label b'red'"),
        ([[("0.png", PNG)]], NO_NAMES, r"no \.cls member"),
        ([[("0.png", PNG), ("0.cls", b"0")]], {}, r"no classnames\.txt"),
        ([[("0.cls", b"0")]], NO_NAMES, r"0 of .*0\.tar has no image"),
        ([[("0.png", PNG), ("0.cls", b"0"), ("1.cls", b"0")]], NO_NAMES, r"1 of .*0\.tar has no image"),
        ([[]], NO_NAMES, "holds no image"),
        ([], NO_NAMES, "holds no image"),
        ([[("0.png", PNG)]], {"dataset_type.txt": "retrieval"}, "no captions"),
        ([[("0.png", PNG), ("0.txt", b" \n")]], {"dataset_type.txt": "retrieval"}, "no captions"),
        ([[("0.png", PNG)]], {"dataset_type.txt": "multilabel"}, "says 'multilabel'"),
        ([[("0.png", PNG), ("0.cls", b"0")]], {"test/nshards.txt": "two"}, "number of shards"),
        ([[("0.png", PNG), ("0.cls", b"0")]], NO_NAMES | {"test/nshards.txt": "2"}, r"1\.tar is missing"),
        ([[("0.png", PNG), ("0.cls", b"0")]], NO_NAMES | {"test/0.tar": "x" * 600}, r"cannot read .*0\.tar"),
        (
            [[("0.png", PNG), ("0.cls", b"0")]],
            NO_NAMES | {"zeroshot_classification_templates.txt": "a photo"},
            "no place for the class",
        ),
    ],
)
def test_shards_that_cannot_be_used(
    tmp_path: Path, shards: list[list[tuple[str, bytes]]], files: dict[str, str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load_set(write_shards(tmp_path / "set", shards, files))


def test_truncated_shard_is_named(tmp_path: Path) -> None:
    root = classification_set(tmp_path / "set")
    shard = root / "test" / "1.tar"
    shard.write_bytes(shard.read_bytes()[:700])
    with pytest.raises(UserError, match=r"cannot read .*1\.tar.*fetch it again"):
        load_set(root)


def test_paths_that_are_no_set(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_sets([str(tmp_path / "nowhere")])
    with pytest.raises(UserError, match="none of the known layouts"):
        load_sets([str(tmp_path)])
    (tmp_path / "set.csv").write_text("x")
    with pytest.raises(UserError, match=r"is neither a caption file \(\.json, \.txt\) nor an archive"):
        load_sets([str(tmp_path / "set.csv")])
    (tmp_path / "set.json").write_text("[1]")
    with pytest.raises(UserError, match="neither COCO's"):
        load_sets([str(tmp_path / "set.json")])
    root = str(classification_set(tmp_path / "set"))
    with pytest.raises(UserError, match="twice"):
        load_sets([root, root + "/"])


def test_missing_images_of_a_caption_file(tmp_path: Path) -> None:
    path = karpathy_json(tmp_path)
    (tmp_path / "images" / "blue.png").unlink()
    with pytest.raises(UserError, match=r"1 of 5 images .* are missing, such as .*blue\.png"):
        load_set(path)


# -- class folders whose names are codes --------------------------------------------------------------------------------------------


def test_the_folders_of_imagenet_v2_are_the_labels(tmp_path: Path) -> None:
    """As published: folders "0" to "999", which alphabetical order would mix up."""
    item = load_set(folders(tmp_path / "imagenetv2-matched-frequency-format-val", ["0", "2", "10", "999"]))
    wanted = ["tench"] + 2 * ["great white shark"] + 3 * ["brambling"] + 4 * ["toilet paper"]
    assert [item.classnames[label] for label in item.labels] == wanted
    assert len(item.classnames) == 1000 and len(item.templates) == 80


@pytest.mark.parametrize("names", [["0", "1"], ["10", "9"], ["c0", "c1"], ["001.Albatross", "002.Auklet"], ["a", "b"]])
def test_folders_whose_names_are_codes_need_class_names(tmp_path: Path, names: list[str]) -> None:
    root = folders(tmp_path / "set", names)
    with pytest.raises(UserError, match=r"say no class; write one class name a line into .*classnames\.txt"):
        load_set(root)
    (root / "classnames.txt").write_text("\n".join(f"name {i}" for i in range(11 if "10" in names else 2)))
    load_set.cache_clear()
    item = load_set(root)
    wanted = sorted(names, key=lambda n: (int(n) if n.isdecimal() else 0, n))
    first = item.labels[0] if wanted[0].isdecimal() else 0
    assert (
        item.labels[0] == (int(wanted[0]) if wanted[0].isdecimal() else 0) and item.classnames[first] == f"name {first}"
    )


def test_a_number_beyond_the_class_names_is_named(tmp_path: Path) -> None:
    root = folders(tmp_path / "set", ["0", "7"])
    (root / "classnames.txt").write_text("red\ngreen\n")
    with pytest.raises(UserError, match="7 is beyond the 2 lines"):
        load_set(root)


@pytest.mark.parametrize("names", [["images"], ["train", "val"], ["pictures"]])
def test_folders_that_are_no_classes_are_refused(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(UserError, match="no class folders but"):
        load_set(folders(tmp_path / "set", names))


def test_a_thousand_labels_alone_are_not_imagenets(tmp_path: Path) -> None:
    members = [m for i in range(1000) for m in ((f"{i}.png", PNG), (f"{i}.cls", str(i).encode()))]
    for name in ("anything", "imagenet21k", "tiny-imagenet", "imagenet100"):
        with pytest.raises(UserError, match=r"no classnames\.txt"):
            load_set(write_shards(tmp_path / name, [members], {}))


def objectnet(root: Path) -> Path:
    """ObjectNet's archive with three classes, two of which ImageNet has, and a red border around each picture."""
    base = root / "objectnet-1.0"
    folders(base / "images", ["air_freshener", "alarm_clock", "backpack"])
    (base / "mappings").mkdir()
    labels = {"air_freshener": "Air freshener", "alarm_clock": "Alarm clock", "backpack": "Backpack"}
    (base / "mappings/folder_to_objectnet_label.json").write_text(json.dumps(labels))
    overlap = {"Alarm clock": "analog clock; digital clock", "Backpack": "backpack, back pack"}
    (base / "mappings/objectnet_to_imagenet_1k.json").write_text(json.dumps(overlap))
    return base


def test_objectnet_is_scored_on_the_classes_of_imagenet_without_its_border(tmp_path: Path) -> None:
    base = objectnet(tmp_path)
    for root in (base, tmp_path, base / "images"):
        item = load_set(root)
        assert item.classnames == ["alarm clock", "backpack"] and item.labels == [0, 0, 1, 1, 1], root
        assert item.border == 2 and len(item.templates) == 80
    (base / "mappings/folder_to_objectnet_label.json").write_text("{")
    load_set.cache_clear()
    with pytest.raises(UserError, match="is ObjectNet, but"):
        load_set(base)
