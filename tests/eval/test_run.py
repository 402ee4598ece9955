"""evaluate() gives the known results of small sets, in one process and in several, also with damaged images."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from clipscale.common.errors import UserError
from clipscale.config.sections import EvalConfig
from clipscale.distributed.world import World
from clipscale.eval.results import save_results
from clipscale.eval.run import check, evaluate
from clipscale.models.towers import weights_digest
from tests.eval.sets import (
    ALONE,
    NAMES,
    TEMPLATES,
    ColourModel,
    classification_set,
    picture,
    retrieval_set,
    write_shards,
)
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


def test_perfect_model_is_perfect(tmp_path: Path) -> None:
    sets = [classification_set(tmp_path / "classes"), retrieval_set(tmp_path / "captions")]
    results = evaluate(ColourModel(), EvalConfig(sets=[str(s) for s in sets]), ALONE)
    assert results["classes"] == {"top1": 1, "top5": 1, "mean_per_class_recall": 1, "images": 6, "broken": 0}
    shares = {k: v for k, v in results["captions"].items() if "_r" in k}
    assert len(shares) == 10 and set(shares.values()) == {1.0}, "six recalls, and four ranks that count from 1"
    assert (results["captions"]["images"], results["captions"]["captions"]) == (6, 12)


@pytest.mark.parametrize("batch", [1, 4, 5, 256])
def test_batch_size_changes_nothing(tmp_path: Path, batch: int) -> None:
    sets = [str(classification_set(tmp_path / "classes", wrong=[2])), str(retrieval_set(tmp_path / "captions"))]
    config = EvalConfig(sets=sets, batch=batch, workers=2)
    results = evaluate(ColourModel(), config, ALONE)
    assert results["classes"]["top1"] == 5 / 6 and results["captions"]["text_to_image_r1"] == 1


def test_model_is_evaluated_in_evaluation_mode_and_put_back(tmp_path: Path) -> None:
    model = ColourModel().train()
    evaluate(model, EvalConfig(sets=[str(classification_set(tmp_path / "set"))]), ALONE)
    assert model.modes == {False} and model.training


def damaged(colour: str) -> bytes:
    return picture(colour)[:40]


def test_broken_images_are_misses_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    members = [m for i, n in enumerate(NAMES) for m in ((f"{i}.png", picture(n)), (f"{i}.cls", str(i).encode()))]
    members[0] = ("0.png", damaged("red"))
    files = {"classnames.txt": "\n".join(NAMES), "zeroshot_classification_templates.txt": "\n".join(TEMPLATES)}
    classes = write_shards(tmp_path / "classes", [members], files)
    members = [
        m
        for i, n in enumerate(NAMES)
        for m in ((f"{i}.png", picture(n)), (f"{i}.txt", n.encode() + b"\nall " + n.encode()))
    ]
    members[2] = ("1.png", b"")
    captions = write_shards(tmp_path / "captions", [members], {"dataset_type.txt": "retrieval"})

    results = evaluate(ColourModel(), EvalConfig(sets=[str(classes), str(captions)]), ALONE, run_dir=tmp_path / "run")
    assert results["classes"]["top1"] == 5 / 6 and results["classes"]["top5"] == 5 / 6
    assert results["classes"]["images"] == 6 and results["classes"]["broken"] == 1
    assert {v for k, v in results["captions"].items() if "_r" in k and "rank" not in k} == {5 / 6}, results["captions"]
    assert results["captions"]["images"] == 6 and results["captions"]["broken"] == 1
    assert sum("counted as misses: 1" in message for message in caplog.messages) == 2, caplog.messages


def test_a_set_without_one_good_image_is_refused(tmp_path: Path) -> None:
    root = write_shards(tmp_path / "set", [[("0.png", b"x"), ("0.cls", b"0")]], {"classnames.txt": "red"})
    with pytest.raises(UserError, match="none of the 1 images"):
        evaluate(ColourModel(), EvalConfig(sets=[str(root)]), ALONE)


def test_a_collapsed_or_diverged_model_scores_zero(tmp_path: Path) -> None:
    sets = [str(classification_set(tmp_path / "classes")), str(retrieval_set(tmp_path / "captions"))]
    for value in (1.0, float("nan")):

        class Constant(ColourModel):
            def image(self, pixels: Tensor, value: float = value) -> Tensor:
                return torch.full((len(pixels), 3), value)

        results = evaluate(Constant(), EvalConfig(sets=sets), ALONE)
        assert results["classes"]["top1"] <= 1 / 6, f"features all {value}: {results['classes']}"
        assert results["captions"]["text_to_image_r1"] == 0, f"features all {value}: {results['captions']}"


def test_results_and_examples_are_saved(tmp_path: Path) -> None:
    sets = [str(classification_set(tmp_path / "classes")), str(retrieval_set(tmp_path / "captions"))]
    run = tmp_path / "run"
    results = evaluate(ColourModel(), EvalConfig(sets=sets), ALONE, run_dir=run, step=12)
    record = json.loads((run / "eval" / "step_00000012.json").read_text())
    assert record["step"] == 12 and record["results"] == results
    examples = json.loads((run / "eval" / "retrieved" / "captions.json").read_text())
    assert len(examples["rows"]) == 8 and examples["step"] == 12
    assert all(row["hit"] == 0 for row in examples["rows"]), "a perfect model finds the right image first"
    with Image.open(run / "eval" / "retrieved" / "captions.png") as sheet:
        tile = examples["tile"]
        assert sheet.size == (tile * (examples["columns"] + 1), tile * 8)
        assert sheet.getpixel((tile // 2, tile // 2)) == (230, 20, 20), "the first caption is about red"


def test_later_results_join_earlier_ones(tmp_path: Path) -> None:
    save_results(tmp_path, 5, {"a": {"top1": 0.1}, "b": {"top1": 0.2}}, seconds=1)
    path = save_results(tmp_path, 5, {"b": {"top1": 0.3}}, seconds=1)
    assert json.loads(path.read_text())["results"] == {"a": {"top1": 0.1}, "b": {"top1": 0.3}}


def test_a_result_says_what_was_measured_on_which_weights_with_which_prompts(tmp_path: Path) -> None:
    root, run = classification_set(tmp_path / "classes"), tmp_path / "run"
    model = ColourModel()
    model.register_buffer("weight", torch.ones(3))
    config = EvalConfig(sets=[str(root)])
    evaluate(model, config, ALONE, run_dir=run, step=1, about={"precision": "bf16"})
    record = json.loads((run / "eval/step_00000001.json").read_text())["measured"]["classes"]
    assert (record["path"], record["images"], record["limit"]) == (str(root), 6, None)
    assert record["prompts"] == TEMPLATES and record["classes"] == 6 and record["precision"] == "bf16"
    assert record["versions"]["clipscale"] and record["weights"] == weights_digest(model)
    model.weight[0] = 2
    assert record["weights"] != weights_digest(model)


def test_limited_results_have_another_name_and_replace_nothing(tmp_path: Path) -> None:
    root, run = classification_set(tmp_path / "classes", wrong=[1]), tmp_path / "run"
    for limit in (None, 3, 6, 50):
        evaluate(ColourModel(), EvalConfig(sets=[str(root)], limit=limit), ALONE, run_dir=run, step=1)
    record = json.loads((run / "eval/step_00000001.json").read_text())
    assert list(record["results"]) == ["classes", "classes (limit 3)"], "a limit of the whole set limits nothing"
    assert record["results"]["classes"]["top1"] == 5 / 6 and record["results"]["classes (limit 3)"]["images"] == 3
    assert record["measured"]["classes (limit 3)"]["limit"] == 3 and record["measured"]["classes (limit 3)"]["of"] == 6


@pytest.mark.parametrize("content", ['{"step": 5, "results": {', '{"results": {}, "measured": 3}'])
def test_a_damaged_earlier_file_is_put_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str) -> None:
    path = save_results(tmp_path, 5, {"a": {"top1": 0.1}}, seconds=1)
    path.write_text(content)
    save_results(tmp_path, 5, {"b": {"top1": 0.3}}, seconds=1)
    assert json.loads(path.read_text())["results"] == {"b": {"top1": 0.3}}
    assert path.with_name(path.name + ".damaged").exists() and "cannot be read" in caplog.text


def check_on_rank(rank: int, world: int, *paths: list[str]) -> list[str]:
    messages = []
    for choices in paths:
        try:
            check(EvalConfig(sets=[choices[rank]]), World(rank, world, CPU))
        except UserError as error:
            messages.append(str(error))
    return messages


def test_a_mistake_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    good = str(classification_set(tmp_path / "a" / "set"))
    other = str(classification_set(tmp_path / "b" / "set", ["red"]))
    for missing, differing in run_ranks(check_on_rank, 2, [good, str(tmp_path / "nowhere")], [good, other]):
        assert "nowhere does not exist" in missing, missing
        assert "different files" in differing, differing


@pytest.mark.parametrize("name", ["batch", "limit"])
def test_batch_and_limit_must_be_positive(name: str) -> None:
    with pytest.raises(UserError, match=rf"eval\.{name}=0"):
        check(EvalConfig(**{name: 0}), ALONE)


def test_an_interrupted_evaluation_leaves_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = [str(retrieval_set(tmp_path / "captions")), str(classification_set(tmp_path / "classes"))]
    run, batches = tmp_path / "run", iter(range(100))

    def stop_at(number: int) -> None:
        if next(batches) == number:
            raise KeyboardInterrupt

    def evaluation(*only: str, stop: int = 99, limit: int | None = None) -> None:
        config = EvalConfig(sets=list(only), limit=limit)
        evaluate(ColourModel(), config, ALONE, run_dir=run, step=1, before_batch=lambda: stop_at(stop))

    with pytest.raises(KeyboardInterrupt):  # within the first set, after its images
        evaluation(*sets, stop=1)
    assert not list(run.rglob("*")), "no figures, and no pictures of what was found"
    with pytest.raises(KeyboardInterrupt):  # in the second set
        evaluation(*sets, stop=5)
    file = run / "eval/step_00000001.json"
    assert list(json.loads(file.read_text())["results"]) == ["captions"], "what was done is kept"

    before = file.read_bytes()

    def torn(source: object, target: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", torn)
    with pytest.raises(KeyboardInterrupt):  # while the file is written
        evaluation(sets[1], limit=3)
    assert file.read_bytes() == before and {path.name for path in (run / "eval").iterdir()} == {file.name, "retrieved"}
