"""Every layout of evaluation sets is read, and unusable sets are refused with their reason."""

import gzip
import io
import json
import logging
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clipscale.config.sections import EvalConfig
from clipscale.data.eval_transform import EvalTransform
from clipscale.data.picture import Picture
from clipscale.data.shards.listing import expand
from clipscale.eval.classification import ClassificationSet
from clipscale.eval.sets.item import ImageRef
from clipscale.eval.sets.load import load_set, load_sets
from clipscale.eval.suites import load_chosen_sets
from tests.eval.sets import (
    NAMES,
    TEMPLATES,
    classification_set,
    folders,
    karpathy_json,
    load_classes,
    members,
    pair_set,
    picture,
    retrieval_set,
    write_shards,
    write_tar,
)
from tests.support.user_errors import refused


@pytest.fixture(autouse=True)
def nothing_cached() -> None:
    load_set.cache_clear()


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


# ---- class folders ----


def test_class_folders_by_name_and_by_wordnet_id(tmp_path: Path) -> None:
    eval_set = load_classes(folders(tmp_path / "set", ["red_fox", "AnnualCrop", "b", "\u72ac"]))  # a dog, in Japanese
    assert eval_set.classnames == ["AnnualCrop", "b", "red fox", "\u72ac"] and eval_set.answers.count(0) == 2
    assert eval_set.templates == ["a photo of a {c}."]
    eval_set = load_classes(folders(tmp_path / "ids", ["n01498041", "n01443537"]))
    assert eval_set.classnames == ["goldfish", "stingray"] and len(eval_set.templates) == 80


def test_class_folders_may_have_names_that_are_not_utf8(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)  # pytest-xdist cannot pass on a warning with such a name
    one, other = (load_classes(folders(tmp_path / name, ["ring", name])) for name in ("caf\udce9", "caf\udce8"))
    assert one.classnames == ["caf\udce9", "ring"] and one.facts()["classnames"] != other.facts()["classnames"]


def test_the_folders_of_imagenet_v2_are_the_labels(tmp_path: Path) -> None:
    """The folders are published as "0" to "999", which alphabetical order would mix up."""
    eval_set = load_classes(folders(tmp_path / "imagenetv2-matched-frequency-format-val", ["0", "2", "10", "999"]))
    expected = ["tench"] + 2 * ["great white shark"] + 3 * ["brambling"] + 4 * ["toilet paper"]
    assert [eval_set.classnames[label] for label in eval_set.answers] == expected
    assert len(eval_set.classnames) == 1000 and len(eval_set.templates) == 80


@pytest.mark.parametrize(
    ("folder_names", "expected"),
    [
        (["Acura RL Sedan 2012", "BMW X5 SUV 2007"], ["Acura RL Sedan 2012", "BMW X5 SUV 2007"]),
        (["707-320", "A320", "C-130", "Cessna 172"], ["707-320", "A320", "C-130", "Cessna 172"]),
        (["001.Black_footed_Albatross", "002.Laysan_Albatross"], ["Black footed Albatross", "Laysan Albatross"]),
        (["00 - cat", "01 - dog", "02 - t-shirt"], ["cat", "dog", "t-shirt"]),
        (["n02085620-Chihuahua", "n02085782-Japanese_spaniel"], ["Chihuahua", "Japanese spaniel"]),
        (["0_cat", "red"], ["0 cat", "red"]),
        (["2_door_car", "4_door_car", "6_pack"], ["2 door car", "4 door car", "6 pack"]),
        (["100% cotton", "7up", "red"], ["100% cotton", "7up", "red"]),
        (["4x4 truck", "C130", "iphone 14"], ["4x4 truck", "C130", "iphone 14"]),
        (["rock 'n' roll (50s)", "{curly}"], ["rock 'n' roll (50s)", "{curly}"]),
        (["c#", "c++"], ["c#", "c++"]),
    ],
    ids=lambda names: names[0],
)
def test_class_folders_as_usual_sets_have_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, folder_names: list[str], expected: list[str]
) -> None:
    """A number before each name goes, and a line says so. Equal names would remain of the cars: theirs stays."""
    root = folders(tmp_path / "set", folder_names)
    numbered = expected != [name.replace("_", " ") for name in folder_names]
    assert load_classes(root).classnames == expected
    lines = [line for line in caplog.messages if "without the numbers" in line]
    assert len(lines) == numbered and all(folder_names[0] in line for line in lines)


def test_a_command_that_a_line_gives_can_be_pasted(tmp_path: Path) -> None:
    root = folders(tmp_path / "my set", ["red"])
    with refused(f"clipscale data pack '{root}' out=DIR"):
        load_set(root)
    (tmp_path / "a b.csv").touch()
    with refused(f"clipscale data pack '{tmp_path}/a b.csv' out=DIR"):
        expand(f"{tmp_path}/a b.csv")


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["0", "1"], "'0', which say no class"),
        (["c0", "c1"], "'c0', which say no class"),
        (["A320", "A330"], "'A320', which say no class"),
        (["17", "red"], "'17', which say no class"),
        (["001.1a", "002.2a"], "'001.1a', which say no class"),
        (["d41d8cd98f00b204e9800998ecf8427e", "red"], "'d41d8.*', which say no class"),
        (["class_01", "class_02"], "'class_01', which differ in their numbers alone and say no class"),
        (["1_class_1", "2_class_2"], "'class_1', which differ in their numbers alone"),
    ],
    ids=str,
)
def test_folders_whose_names_are_codes_need_class_names(tmp_path: Path, names: list[str], reason: str) -> None:
    root = folders(tmp_path / "set", names)
    with refused(rf"{reason}.*; write one class name a line into .*classnames\.txt"):
        load_set(root)
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):  # editors of Windows begin a text with a byte order mark
        (root / "classnames.txt").write_text("a\nsecond\n", encoding)
        (root / "zeroshot_classification_templates.txt").write_text("{}, a photo\n", encoding)
        load_set.cache_clear()
        eval_set = load_classes(root)
        assert [eval_set.classnames[label] for label in eval_set.answers] == ["a", "second", "second"]
        assert eval_set.templates == ["{c}, a photo"]
    (root / "classnames.txt").write_bytes(b"caf\xe9\nsecond\n")
    load_set.cache_clear()
    with refused(r"classnames\.txt is not in UTF-8 .* save it so"):
        load_set(root)


@pytest.mark.parametrize("file", ["classnames.txt", "zeroshot_classification_templates.txt"])
@pytest.mark.parametrize(
    "line",
    [
        "lambda c: f'a photo of a {c}.',",
        "'a photo of a {}.',",
        '    "{c}",',
        'f"the {c}"',
        "templates = [",
        "]",
        "['{c}', 'a {c}']",
        "0: '{c}',",
        '"0": ["n01440764", "{c}"],',
    ],
)
def test_lines_of_a_program_are_no_names_and_no_prompts(tmp_path: Path, file: str, line: str) -> None:
    root = classification_set(tmp_path / "set")
    (root / file).write_text("\n".join(["{c} 's day", "{c} (rock 'n' roll)", "{c} = red: 'n' all", *["{c}"] * 3]))
    assert len(load_classes(root).classnames) == len(NAMES)
    (root / file).write_text(f"a {{c}}\n{line}\n")
    load_set.cache_clear()
    with refused(rf"{file} has lines of a program, such as .*; write the texts alone, one a line"):
        load_set(root)


def test_what_systems_and_notebooks_leave_is_of_no_set(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line counts what else lies in class folders. Pictures are the files that training takes, too."""
    root = folders(tmp_path / "set", ["red", "green"])
    for path in (".ipynb_checkpoints", "__MACOSX/red", "red/.thumbs"):
        folders(root / path, ["x"])
    for name in (".DS_Store", "._0.PNG", "Thumbs.db", "5.bmp", "6.gif", "7.JFIF", "scan.tif", "plan.tif", "README"):
        (root / "red" / name).write_bytes(b"x")
    assert load_classes(root).classnames == ["green", "red"]
    again = load_set.__wrapped__(root)
    assert [image.path.name for image in again.images] == ["0.PNG", "1.PNG", "0.PNG", "5.bmp", "6.gif", "7.JFIF"]
    assert caplog.messages == [
        f"eval.sets: {root}: not read in the class folders: 2 .txt, 2 .tif, 1 without a suffix"
    ], caplog.messages
    pair_set(tmp_path / "pairs").joinpath("._00000.tar").write_bytes(b"Mac OS X")
    assert len(load_set(tmp_path / "pairs")) == len(NAMES)


def test_a_class_without_a_picture_counts_and_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = folders(tmp_path / "set", ["red", "green"])
    (root / "blue").mkdir()
    assert load_classes(root).classnames == ["blue", "green", "red"]
    assert [line for line in caplog.messages if "'blue'" in line and "without a picture" in line]


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


def test_of_a_folder_with_parts_the_held_out_one_is_evaluated(tmp_path: Path) -> None:
    for name in ("train", "val", "test"):
        folders(tmp_path / "imagenet" / name, ["n01498041", "n01443537"])
    (eval_set,) = load_sets([str(tmp_path / "imagenet")])
    assert (eval_set.name, eval_set.path.name) == ("imagenet/val", "val")


# ---- caption files ----


def test_karpathy_and_coco_caption_files(tmp_path: Path) -> None:
    eval_set = load_set(karpathy_json(tmp_path / "flickr"))
    assert eval_set.answers == [[f"all {n}"] for n in NAMES[:-1]]
    assert [i.read() for i in eval_set.images] == [picture(n) for n in NAMES[:-1]]

    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "7.png").write_bytes(picture("blue"))
    (tmp_path / "captions.json").write_text(
        '{"images": [{"id": 7, "file_name": "7.png"}, {"id": 8, "file_name": "8.png"}],'
        ' "annotations": [{"image_id": 7, "caption": "blue"}, {"image_id": 7, "caption": " all blue\\n"}]}'
    )
    eval_set = load_set(tmp_path / "captions.json")
    assert eval_set.answers == [["blue", "all blue"], []]
    assert [image.defect for image in eval_set.images] == ["", "no_caption"]


def test_a_caption_file_decides_over_class_folders(tmp_path: Path) -> None:
    """Where two folders have its images, one line asks for one of them."""
    file = karpathy_json(tmp_path / "set")
    images = tmp_path / "set" / "images"
    masks = tmp_path / "set" / "masks"
    folders(tmp_path / "set", ["Annual"])
    (tmp_path / "set" / "class_index.json").write_text('{"0": ["n01440764", "tench"]}')
    assert load_set(tmp_path / "set").kind == "retrieval"
    shutil.copytree(images, masks)
    load_set.cache_clear()
    for path in (tmp_path / "set", file):
        with refused(f"are in {images} and in {masks}; .* eval.sets={images}"):
            load_set(path)
    assert {image.path.parent for image in load_set(masks).images} == {masks}
    assert load_sets([str(images)])[0].name == "set/images"
    (images / "red.png").unlink()
    assert {image.path.parent for image in load_set(file).images} == {masks}, "the one that has most of them"
    shutil.copy(file, tmp_path / "set" / "captions_train.json")
    with refused(r"captions_train\.json and dataset_colours\.json; give one, as eval\.sets="):
        load_set(tmp_path / "set")


@pytest.mark.parametrize("thumbnail", [False, True])
def test_a_folder_with_cocos_caption_files_below_is_no_set_of_classes(tmp_path: Path, thumbnail: bool) -> None:
    """COCO unpacks to `annotations` beside the folders of pictures. Its instances are no captions."""
    root = folders(tmp_path / "coco", ["train2017", "val2017"])
    notes = root / "annotations"
    notes.mkdir()
    (notes / "instances_val2017.json").write_text('{"images": [{"id": 1}], "annotations": [{"image_id": 1}]}')
    (notes / "dataset_infos.json").write_text('{"default": {}}')
    if thumbnail:
        (notes / "0.jpg").write_bytes(picture("red", "JPEG"))
    coco = {"images": [{"id": 1, "file_name": "1.PNG"}], "annotations": [{"image_id": 1, "caption": "red"}]}
    (notes / "captions_val2017.json").write_text(json.dumps(coco))
    only = load_set(root)
    assert (only.kind, only.answers, only.images[0].path) == ("retrieval", [["red"]], root / "val2017/1.PNG")
    assert load_sets([str(root)])[0].name == "coco"
    (notes / "captions_train2017.json").write_text(json.dumps(coco))
    load_set.cache_clear()
    one = "annotations/captions_train2017.json and annotations/captions_val2017.json; give one, as "
    with refused(f"has the captions {one}eval.sets={notes}/captions_val2017.json"):
        load_set(root)
    load_set.cache_clear()
    for file in notes.glob("captions_*"):
        file.unlink()
    assert load_set(root).kind == "classification"


@pytest.mark.parametrize(
    "damaged", ['{"images": [{"id": 1, "file_na', '{"info": {}}', ""], ids=["cut", "other", "empty"]
)
@pytest.mark.parametrize("place", ["annotations", ""], ids=["below", "inside"])
def test_a_damaged_caption_file_of_cocos_is_named(tmp_path: Path, place: str, damaged: str) -> None:
    """The pictures of its folder would be taken for classes, or the other file for the one that is meant."""
    root = folders(tmp_path / "coco", ["train2017", "val2017"])
    notes = root / place
    notes.mkdir(exist_ok=True)
    file = notes / "captions_val2017.json"
    coco = {"images": [{"id": 1, "file_name": "1.PNG"}], "annotations": [{"image_id": 1, "caption": "red"}]}
    for other in ((), ("captions_train2017.json",)):
        file.write_text(damaged)
        for name in other:
            (notes / name).write_text(json.dumps(coco))
        load_set.cache_clear()
        with refused(f"{file} is neither COCO's caption JSON nor Karpathy's .*; fetch it again, or remove it"):
            load_set(root)


def test_a_line_counts_cocos_captions_of_images_that_are_not_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = folders(tmp_path / "coco", ["images"])
    texts = [{"image_id": number, "caption": text} for number, text in ((10, "lost"), (1, "red"), (10, "too"))]
    (root / "captions.json").write_text(json.dumps({"images": [{"id": 1, "file_name": "0.PNG"}], "annotations": texts}))
    assert load_set(root).answers == [["red"]]
    assert caplog.messages == [
        f"eval.sets: {root}/captions.json: 2 captions left out, whose image is not in `images` (such as image_id 10)"
    ]


def test_a_caption_file_names_images_of_its_set_alone(tmp_path: Path) -> None:
    path = karpathy_json(tmp_path / "set")
    (tmp_path / "set" / "images" / "blue.png").unlink()
    assert [image.path.exists() for image in load_set(path).images] == [True, True, False, True, True]
    shutil.rmtree(tmp_path / "set" / "images")
    load_set.cache_clear()
    with refused(r"none of the 5 images .* such as .*red\.png"):
        load_set(path)
    for name in ("../../blue.png", "/etc/blue.png"):
        path.write_text(path.read_text().replace('"blue.png"', f'"{name}"', 1).replace('"../../blue.png"', f'"{name}"'))
        load_set.cache_clear()
        with refused("which lies outside the set"):
            load_set(path)


# ---- sets that cannot be used ----


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
