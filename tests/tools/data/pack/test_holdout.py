"""Which pairs are held out, and which of published splits are packed."""

import csv
import json
from pathlib import Path

import pytest

from clipscale.eval.sets.load import load_set
from tests.conftest import Capture
from tests.eval.sets import picture
from tests.tools.data.pack.packing import (
    pack_to,
    packed,
    paths,
    samples,
)


@pytest.mark.parametrize(
    ("words", "chosen", "left_out"),
    [
        ([], "train restval", {"split_val": 1, "split_test": 2}),
        (["splits=[test,val]"], "test val", {"split_train": 1, "split_restval": 1}),
    ],
)
def test_of_karpathys_splits_those_of_training_are_packed(
    pictures: Path, tmp_path: Path, capsys: Capture, words: list[str], chosen: str, left_out: dict[str, int]
) -> None:
    of = dict(zip(paths(pictures), ["test", "train", "restval", "val", "test"]))
    images = [
        {"filepath": "deep", "filename": path[5:], "split": split, "sentences": [{"raw": split}, {"raw": "again"}]}
        for path, split in of.items()
    ]
    (pictures / "dataset_flickr30k.json").write_text(json.dumps({"images": images, "dataset": "flickr30k"}))
    pairs, reasons = packed(pictures / "dataset_flickr30k.json", tmp_path / "out", *words)
    assert pairs == {path[5:]: split for path, split in of.items() if split in chosen.split()}
    assert reasons == left_out
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == f"read 5 images: {len(pairs)} packed, {5 - len(pairs)} left out"
    assert pack_to(tmp_path / "more", pictures / "dataset_flickr30k.json", "splits=[dev]") == 2
    assert "choose among 'splits=[test,train,restval,val]'" in capsys.readouterr().err


def sides(out: Path) -> tuple[list[dict], list[dict]]:
    """The held-out pairs, and those to train on: the fields of their JSON and the picture's bytes."""
    held_out, rest = (
        [
            json.loads(members["json"]) | {"data": next(members[k] for k in members if k not in ("txt", "json"))}
            for members in samples(folder)
        ]
        for folder in (out / "holdout", out)
    )
    return held_out, rest


def test_a_picture_is_held_out_by_its_bytes(tmp_path: Path) -> None:
    """Its name, caption, order and size do not matter, nor do more pictures beside it."""
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(24):
        data = picture("red", "PNG", (20 + number, 20))
        for name in ("a", "b"):
            (folder / f"{number}{name}.png").write_bytes(data)
    held: dict[int, set[int]] = {}
    for count in (20, 24):
        rows = [{"image": f"{n}{name}.png", "caption": f"{n} {name}"} for name in ("b", "a") for n in range(count)]
        (tmp_path / "in/table.jsonl").write_text("\n".join(map(json.dumps, rows[::-1] if count == 24 else rows)))
        out = tmp_path / f"out{count}"
        resize = ["resize=10"] if count == 24 else []
        assert pack_to(out, folder / "table.jsonl", "holdout=40%", *resize) == 0
        test, train = ({int(pair["source"][:-5]) for pair in side} for side in sides(out))
        assert test and train and not test & train, "copies of a picture are on both sides"
        assert len(samples(out / "holdout")) == 2 * len(test)
        assert load_set(out / "holdout").kind == "pairs"
        held[count] = test
    assert held[20] == {number for number in held[24] if number < 20}


def test_a_part_is_held_out_by_a_column(pictures: Path, tmp_path: Path, capsys: Capture) -> None:
    """Rows of one article are on one side, whatever their pictures are. Those of none go by their pictures."""
    rows = [(path, path, f"{sku}") for sku in range(12) for path in paths(pictures)[:3]]
    rows += [(path, path, "") for path in paths(pictures)] * 2
    with (pictures / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("image", "caption", "sku"), *rows])
    words = ["holdout=40%", "holdout.by=sku"]
    assert pack_to(tmp_path / "out", pictures / "table.csv", *words) == 0
    said = capsys.readouterr().out.splitlines()
    test, train = sides(tmp_path / "out")
    for key in (lambda pair: pair["sku"], lambda pair: not pair["sku"] and pair["data"]):
        both = {key(pair) for pair in test} & {key(pair) for pair in train}
        assert both <= {"", False}, "on both sides"
    assert {pair["sku"] for pair in test} - {""} and {pair["data"] for pair in test} & {pair["data"] for pair in train}
    assert said[-1] == f"read 48 rows: {len(train)} packed, {len(test)} held out, 0 left out"
    assert pack_to(tmp_path / "more", pictures / "table.csv", *words, "columns=[sku,caption]") == 2
    assert pack_to(tmp_path / "more", pictures / "table.csv", words[0], "holdout.by=article") == 2
    assert "no column 'article'; it has image, caption, sku" in capsys.readouterr().err


@pytest.mark.parametrize("zero", [0, 0.0, False])
def test_zero_is_a_group_as_any_other(pictures: Path, tmp_path: Path, zero: float) -> None:
    """null and an empty text or list are none: there the pictures decide."""
    rows = [{"image": path, "caption": path, "id": value} for path in paths(pictures) for value in (zero, None, "", [])]
    (pictures / "table.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert pack_to(tmp_path / "out", pictures / "table.jsonl", "holdout=40%", "holdout.by=id") == 0
    test, train = sides(tmp_path / "out")
    grouped, single = (
        [[pair for pair in side if (pair.get("id") == 0) == is_zero] for side in (test, train)]
        for is_zero in (True, False)
    )
    assert sorted(map(len, grouped)) == [0, len(paths(pictures))], "on both sides"
    assert all(single) and not {pair["data"] for pair in single[0]} & {pair["data"] for pair in single[1]}


def test_a_share_of_too_few_pictures_that_holds_none_out_says_so(
    pictures: Path, tmp_path: Path, capsys: Capture
) -> None:
    (pictures / "table.csv").write_text("image,caption\n" + f"{paths(pictures)[0]},a cat\n" * 9)
    assert pack_to(tmp_path / "out", pictures / "table.csv", "holdout=0.001%") == 0
    assert "warning: holdout=0.001%: no pair is held out; " in capsys.readouterr().err
