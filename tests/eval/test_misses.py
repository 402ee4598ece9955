"""What evaluation stores of classes and misses, and how the report shows it."""

import base64
import io
from collections import Counter
from pathlib import Path

import torch
from PIL import Image

from clipscale.config.sections import EvalConfig
from clipscale.eval.examples import misses
from clipscale.eval.run import evaluate
from clipscale.eval.sets.item import CLASSIFICATION, EvalSet, ImageRef
from clipscale.eval.zero_shot import accuracy_counts, target_ranks
from clipscale.report.classes import read_misses, sections
from tests.eval.sets import ALONE, COLOURS, ColourModel, classification_set, picture


def test_misses_are_stored_with_their_pictures(tmp_path: Path) -> None:
    """Picture 0 of red shows green, 3 of green shows blue, as does 4 of green."""
    labels = ["red", "red", "red", "green", "green", "blue"]
    sets = [str(classification_set(tmp_path / "colours", labels, wrong=[0, 3, 4]))]
    evaluate(ColourModel(), EvalConfig(sets=sets, batch=4), ALONE, run_dir=tmp_path / "run", step=8)
    (record,) = read_misses(tmp_path / "run")
    assert record["set"] == "colours" and record["step"] == 8
    assert (record["images"], record["misses"]) == (6, 3)
    assert record["classes"] == [["green", 2, 0, 2], ["red", 3, 2, 3], ["blue", 1, 1, 1]]
    assert record["pairs"] == [["green", "blue", 2], ["red", "green", 1]]
    shown = [(one["right"], one["predicted"]) for one in record["worst"]]
    assert shown == [("green", "blue"), ("green", "blue"), ("red", "green")]
    assert Counter((one["right"], one["predicted"]) for one in record["largest"]) == Counter(shown)
    with Image.open(io.BytesIO(base64.b64decode(record["worst"][0]["jpeg"]))) as image:
        pixel = image.getpixel((50, 50))
    assert max(abs(a - b) for a, b in zip(pixel, COLOURS["blue"])) < 8  # type: ignore[arg-type]
    page = sections(tmp_path / "run")
    assert "3 of 6 missed" in page and "<b>green</b><br><i>blue</i>" in page.replace("\n", "")


def test_the_table_agrees_with_a_plain_count(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    scores, labels = torch.randn(200, 5, generator=generator), torch.randint(0, 5, (200,), generator=generator)
    file = tmp_path / "a.png"
    file.write_bytes(picture("red"))
    item = EvalSet("s", tmp_path, CLASSIFICATION, [ImageRef(file)] * 200, labels.tolist(), list("abcde"))
    best, predicted = scores.max(1)
    margins = best - scores[torch.arange(200), labels]
    margins[7] = torch.nan
    counts = accuracy_counts(target_ranks(scores, labels), labels, 5)
    record = misses(item, counts, predicted, margins).record
    wrong = [i for i in range(200) if predicted[i] != labels[i] and i != 7]
    pairs = Counter((item.classnames[labels[i]], item.classnames[predicted[i]]) for i in wrong)
    assert {(right, other): count for right, other, count in record["pairs"]} == pairs
    assert record["misses"] == int((predicted != labels).sum())
    largest = sorted((float(margins[i]) for i in wrong), reverse=True)[:40]
    assert [one["margin"] for one in record["largest"]] == largest
    table = {item.classnames[c]: [int(counts[row, c]) for row in range(3)] for c in range(5)}
    worst = sorted(table, key=lambda name: (table[name][1] / table[name][0], -table[name][0]))
    assert record["classes"] == [[name, *table[name]] for name in worst]


def test_of_classes_with_equal_accuracy_the_largest_is_first(tmp_path: Path) -> None:
    labels = [0, 1, 1, 2, 3, 3]
    item = EvalSet("s", tmp_path, CLASSIFICATION, [ImageRef(tmp_path / "a.png")] * 6, labels, list("abcd"))
    counts = accuracy_counts(torch.tensor([9] * 6), torch.tensor(labels), 4)
    record = misses(item, counts, torch.tensor([3] * 3 + [0] * 3), torch.ones(6)).record
    assert [row[0] for row in record["classes"]] == ["b", "d", "a", "c"]
