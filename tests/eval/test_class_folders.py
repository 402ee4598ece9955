"""Class folders are read, and their names are class names only where they say a class."""

import logging
from pathlib import Path

import pytest

from clipscale.data.shards.listing import expand
from clipscale.eval.sets.load import load_set, load_sets
from tests.eval.sets import (
    NAMES,
    classification_set,
    folders,
    load_classes,
    pair_set,
)
from tests.support.user_errors import refused


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
    """A number before each name is dropped, and a line says so. It stays where names would be equal without it."""
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


def test_of_a_folder_with_parts_the_held_out_one_is_evaluated(tmp_path: Path) -> None:
    for name in ("train", "val", "test"):
        folders(tmp_path / "imagenet" / name, ["n01498041", "n01443537"])
    (eval_set,) = load_sets([str(tmp_path / "imagenet")])
    assert (eval_set.name, eval_set.path.name) == ("imagenet/val", "val")
