"""Compositional sets: their published layouts, and scores against a direct computation."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from clipscale.common.errors import UserError
from clipscale.config.sections import EvalConfig
from clipscale.eval.run import evaluate
from clipscale.eval.sets.compositional import SUGAR_CREPE, associations, matches
from clipscale.eval.sets.item import Question
from clipscale.eval.sets.load import load_set
from tests.eval.sets import ALONE, NAMES, ColourModel, picture


def colour(index: int) -> bytes:
    return picture(NAMES[index % 6])


def sugar_crepe(root: Path, image: Callable[[int], bytes]) -> Path:
    """SugarCrepe's seven files with 2, 3, ... entries, whose keys have gaps, and the pictures in val2017/."""
    (root / "val2017").mkdir(parents=True)
    for part, name in enumerate(SUGAR_CREPE):
        entries = {}
        for i in range(2 + part):
            (root / "val2017" / f"{i:012}.png").write_bytes(image(i))
            right, wrong = NAMES[i % 6], NAMES[(i + 1) % 6]
            captions = [f"all {right} {part}", f"all {wrong} {part}"]
            first, second = captions if (i + part) % 3 else captions[::-1]
            entries[str(2 * i)] = {"filename": f"{i:012}.png", "caption": first, "negative_caption": second}
        (root / f"{name}.json").write_text(json.dumps(entries))
    return root


def winoground(root: Path, image: Callable[[int], bytes], questions: int = 12) -> Path:
    """Winoground's examples.jsonl, with the pictures in images/."""
    (root / "images").mkdir(parents=True)
    lines = []
    for q in range(questions):
        entry = {"id": q, "image_0": f"ex_{q}_img_0", "image_1": f"ex_{q}_img_1", "tag": "x"}
        for i in (0, 1):
            (root / "images" / f"ex_{q}_img_{i}.png").write_bytes(image(2 * q + i))
        lines.append(json.dumps(entry | {"caption_0": f"a {q} dog sees a cat", "caption_1": f"a {q} cat sees a dog"}))
    (root / "examples.jsonl").write_text("\n".join(lines) + "\n")
    return root


def test_sugar_crepe_has_a_result_for_each_file_and_their_mean(tmp_path: Path) -> None:
    root = sugar_crepe(tmp_path / "sugar_crepe", colour)
    results = evaluate(ColourModel(), EvalConfig(sets=[str(root)]), ALONE, run_dir=tmp_path / "run", step=1)
    wanted = {
        name: sum((i + part) % 3 > 0 for i in range(2 + part)) / (2 + part) for part, name in enumerate(SUGAR_CREPE)
    }
    assert {name: results[f"sugar_crepe/{name}"]["accuracy"] for name in SUGAR_CREPE} == pytest.approx(wanted)
    assert results["sugar_crepe"]["accuracy"] == pytest.approx(sum(wanted.values()) / 7)
    assert results["sugar_crepe"]["questions"] == sum(range(2, 9)) and len(results) == 8


def test_limits_count_questions_and_keep_their_images(tmp_path: Path) -> None:
    item = load_set(winoground(tmp_path / "wino", colour)).limited(5)
    assert item.label() == "wino (limit 5)" and len(item.questions) == 5 and len(item) == 10 and item.whole == 12
    assert item.captions[item.questions[1].captions[0]] == "a 2 dog sees a cat"
    assert item.images[item.questions[1].images[1]].path.name == "ex_2_img_1.png"


def test_scores_are_those_of_the_definition() -> None:
    similarities = torch.randint(0, 4, (60, 2, 2), generator=torch.Generator().manual_seed(0)).float()
    usable = torch.arange(60) % 7 > 0
    text = image = group = 0
    for s, good in zip(similarities.tolist(), usable.tolist()):
        of_texts = good and s[0][0] > s[0][1] and s[1][1] > s[1][0]
        of_images = good and s[0][0] > s[1][0] and s[1][1] > s[0][1]
        text, image, group = text + of_texts, image + of_images, group + (of_texts and of_images)
    wanted = {"text_score": text / 60, "image_score": image / 60, "group_score": group / 60}
    assert matches(similarities, usable) == pytest.approx(wanted) and group
    collapsed = torch.ones(3, 1, 2)
    assert matches(collapsed, torch.ones(3, dtype=torch.bool)) == {"accuracy": 0.0}


def winogavil(root: Path) -> Path:
    """A table of cues, and pictures that are named after their colours."""
    (root / "winogavil_images").mkdir(parents=True)
    for name in [*NAMES, "tea party"]:
        (root / "winogavil_images" / f"{name}.jpg").write_bytes(picture(name if name in NAMES else "red"))
    rows = [
        (["blue", "red", "green", "tea party", "white"], "Red", ["red", "tea party"]),
        (NAMES, "blue", ["blue", "green"]),
    ]
    with (root / "winogavil_dataset.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["", "candidates", "cue", "associations", "num_associations"])
        table.writerows([i, json.dumps(c), cue, json.dumps(a), len(a)] for i, (c, cue, a) in enumerate(rows))
    return root


def test_winogavil_is_the_jaccard_index_of_the_nearest_images(tmp_path: Path) -> None:
    root = winogavil(tmp_path / "winogavil")
    item = load_set(root)
    assert item.captions == ["A red", "A blue"] and [q.right for q in item.questions] == [2, 2]
    metrics = evaluate(ColourModel(), EvalConfig(sets=[str(root)]), ALONE)["winogavil"]
    assert metrics["jaccard"] == metrics["jaccard_5_6"] == pytest.approx((1 + 1 / 3) / 2), (
        "cyan is nearer to blue than green"
    )
    with pytest.raises(UserError, match="is not WinoGAViL's"):
        (root / "winogavil_dataset.csv").write_text("candidates,cue,associations\n[],x,[]\n")
        load_set.cache_clear()
        load_set(root)


def test_associations_are_those_of_a_direct_computation() -> None:
    generator = torch.Generator().manual_seed(0)
    images, captions = torch.randn(40, 6, generator=generator), torch.randn(9, 6, generator=generator)
    questions, wanted = [], {"jaccard_5_6": [], "jaccard_10_12": []}
    for q in range(9):
        chosen = torch.randperm(40, generator=generator)[: 5 if q % 2 else 11].tolist()
        right = 2 + q % 3
        questions.append(Question(tuple(chosen), (q,), right))
        nearest = sorted(chosen, key=lambda i, q=q: -float(images[i] @ captions[q]))[:right]
        both, either = set(nearest) & set(chosen[:right]), set(nearest) | set(chosen[:right])
        wanted["jaccard_5_6" if q % 2 else "jaccard_10_12"].append(len(both) / len(either))
    found = associations(questions, images, captions, torch.ones(40, dtype=torch.bool))
    assert {name: found[name] for name in wanted} == pytest.approx({n: sum(v) / len(v) for n, v in wanted.items()})
    assert found["jaccard"] == pytest.approx(sum(map(sum, wanted.values())) / 9)


@pytest.mark.parametrize("value", [1.0, torch.nan])
def test_equal_scores_and_nans_count_against_the_model(value: float) -> None:
    """The right images come first among a question's candidates. A collapsed model must not gain from that."""
    questions = [Question(tuple(range(5)), (0,), 2), Question(tuple(range(12)), (0,), 6)]
    images, captions = torch.full((12, 4), value), torch.full((1, 4), value)
    found = associations(questions, images, captions, torch.ones(12, dtype=torch.bool))
    assert found == {"jaccard": 0.0, "jaccard_5_6": 0.0, "jaccard_10_12": 0.0}
    images = torch.eye(5)[:, :4]
    images[1] = torch.nan
    usable = torch.ones(5, dtype=torch.bool)
    one_of_two = associations([Question(tuple(range(5)), (0,), 2)], images, torch.eye(4)[:1], usable)
    assert one_of_two["jaccard"] == pytest.approx(1 / 3), "the image with a score is found, that without is not"


def test_sets_that_cannot_be_used(tmp_path: Path) -> None:
    crepe = sugar_crepe(tmp_path / "sugar_crepe", colour)
    (crepe / "swap_obj.json").unlink()
    with pytest.raises(UserError, match=r"lacks swap_obj\.json of SugarCrepe; fetch them from https"):
        load_set(crepe)
    (crepe / "swap_obj.json").write_text("[1]")
    with pytest.raises(UserError, match=r"swap_obj\.json is not SugarCrepe's"):
        load_set(crepe)
    wino = winoground(tmp_path / "wino", colour)
    (wino / "images" / "ex_3_img_1.png").unlink()
    with pytest.raises(UserError, match=r"1 of 24 images .* are missing, such as ex_3_img_1\.png"):
        load_set(wino)
    (wino / "examples.jsonl").write_text('{"image_0": "a"}\n')
    with pytest.raises(UserError, match="is not Winoground's"):
        load_set(wino)
