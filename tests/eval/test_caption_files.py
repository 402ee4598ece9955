"""COCO's and Karpathy's caption files are read with the images that they name."""

import json
import shutil
from pathlib import Path

import pytest

from clipscale.eval.sets.load import load_set, load_sets
from tests.eval.sets import (
    NAMES,
    folders,
    karpathy_json,
    picture,
)
from tests.support.user_errors import refused


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
