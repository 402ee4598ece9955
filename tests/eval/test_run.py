"""evaluate() gives the known results of small sets, in one process and in several, also with damaged images."""

import json
import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from clipscale import checkpoint
from clipscale.common.errors import UserError
from clipscale.config.sections import EvalConfig
from clipscale.distributed.world import World
from clipscale.eval import retrieval
from clipscale.eval.encode import EvalEncoder, gather_batches
from clipscale.eval.run import ResultsFile, evaluate
from clipscale.eval.sets.load import load_set
from clipscale.models.towers import build_model
from clipscale.run_folder.chosen_checkpoint import find_checkpoint
from clipscale.train import train
from tests.data.files import write_tar
from tests.eval.sets import (
    COLOURS,
    NAMES,
    TEMPLATES,
    ColourModel,
    classification_set,
    evaluation,
    folders,
    load_classes,
    members,
    pair_set,
    picture,
    retrieval_set,
    write_shards,
)
from tests.support.checkpoints import ONE_RANK, steps
from tests.support.ranks import run_ranks
from tests.support.runs import curve, four_step_config, train_on_rank
from tests.tools.eval.test_verb import TINY

CPU = torch.device("cpu")


def two_sets(root: Path, wrong: tuple[int, ...] = ()) -> list[str]:
    return [str(classification_set(root / "classes", wrong=wrong)), str(retrieval_set(root / "captions"))]


def test_perfect_model_is_perfect_and_is_put_back_into_training_mode(tmp_path: Path) -> None:
    model = ColourModel().train()
    results = evaluate(model, evaluation(EvalConfig(sets=two_sets(tmp_path))), ONE_RANK)
    assert results["classes"] == {"top1": 1, "top5": 1, "mean_per_class_recall": 1, "images": 6, "broken": 0}
    recalls = {f"{way}_r{k}": 1 for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)}
    assert results["captions"] == recalls | {"images": 6, "captions": 12, "broken": 0}
    assert model.modes == {False} and model.training


def test_a_disk_that_takes_no_results_costs_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The disk of rank 0 alone is full. The other ranks would wait for rank 0."""
    sets = two_sets(tmp_path)
    (tmp_path / "run").touch()
    assert evaluate(ColourModel(), evaluation(EvalConfig(sets=sets)), ONE_RANK, file=ResultsFile(tmp_path / "run", 1))
    assert "step_00000001.json cannot be written" in "".join(capsys.readouterr())


def test_images_that_cannot_be_used_are_left_out_and_counted_by_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are not misses, and their captions are not candidates. Two classes are answered wrongly; the only picture of
    one of them is broken, so it does not count."""
    classes = classification_set(tmp_path / "classes", broken=0, wrong=[0, 1])
    captions = retrieval_set(tmp_path / "captions", broken=1)
    pairs = pair_set(tmp_path / "pairs")
    texts = ["red", " ", "caf\xe9", "blue"]
    members = [(f"{i}.txt", text.encode("latin-1")) for i, text in enumerate(texts)]
    write_tar(pairs / "00001.tar", sorted(members + [(f"{i}.png", picture(NAMES[i])) for i in range(3)]))
    colours = folders(tmp_path / "colours", ["red", "green"])
    (colours / "red" / "9.webp").write_bytes(b"half a pict")
    (colours / "red" / "8.png").symlink_to("nowhere")
    sets = [str(path) for path in (classes, captions, pairs, colours)]
    for _ in range(2):
        results = evaluate(
            ColourModel(), evaluation(EvalConfig(sets=sets)), ONE_RANK, file=ResultsFile(tmp_path / "run")
        )
    assert results["classes"]["top1"] == 4 / 5
    assert results["classes"]["mean_per_class_recall"] == 4 / 5, "a class without pictures has no recall"
    assert {value for metric, value in results["captions"].items() if "_r" in metric} == {1}, results["captions"]
    counts = {name: (of["images"], of.get("captions"), of["broken"]) for name, of in results.items()}
    assert counts == {"classes": (5, None, 1), "captions": (5, 10, 1), "pairs": (7, 13, 3), "colours": (3, None, 2)}
    measured = json.loads((tmp_path / "run/eval/final.json").read_text())["measured"]
    assert measured["pairs"]["broken"] == {"empty_caption": 1, "caption_not_utf8": 1, "no_image": 1}
    assert measured["colours"]["broken"] == {"unreadable_image": 1, "unreadable_file": 1}
    assert sum("left out" in message for message in caplog.messages) == 4, "once for each set"


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [("0.png", b"red", "unreadable_image"), ("0.png", b" ", "empty_caption"), ("0.tif", b"red", "no_image")],
)
def test_a_set_in_which_nothing_can_be_used_is_refused_with_what_it_holds(
    tmp_path: Path, name: str, text: bytes, reason: str
) -> None:
    write_tar(tmp_path / "0.tar", [("0.txt", text), (name, b"x")])
    with pytest.raises(UserError, match=f"1 {reason}.*fetch"):
        evaluate(ColourModel(), evaluation(EvalConfig(sets=[str(tmp_path)])), ONE_RANK)


def softmax(x: torch.Tensor, _: float) -> torch.Tensor:
    own = torch.arange(len(x))
    return (F.cross_entropy(x, own) + F.cross_entropy(x.T, own)) / 2


def sigmoid(x: torch.Tensor, bias: float) -> torch.Tensor:
    return -F.logsigmoid((x + bias) * (2 * torch.eye(len(x)) - 1)).sum() / len(x)


@pytest.mark.parametrize(
    ("objective", "bias", "formula"),
    [("softmax", None, softmax), ("softmax", -2.0, softmax), ("sigmoid", -2.0, sigmoid), (None, -2.0, None)],
)
def test_held_out_pairs_have_the_loss_of_the_runs_objective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objective: str | None, bias: float | None, formula: Any
) -> None:
    """The loss has all negatives of each batch. A broken picture is in no batch, and a part of a batch is left out."""
    root = pair_set(tmp_path / "pairs", broken=1)
    model = ColourModel()
    model.logit_scale = torch.tensor(0.7)
    model.logit_bias = torch.tensor(bias) if bias else None
    monkeypatch.setattr(retrieval, "LOSS_BATCH", 2)
    results = evaluate(model, evaluation(EvalConfig(sets=[str(root)]), objective or ""), ONE_RANK)["pairs"]
    colours = torch.tensor([COLOURS[name] for name in NAMES if name != NAMES[1]], dtype=torch.float64) - 125
    losses = [formula(math.exp(0.7) * part @ part.T, bias) for part in F.normalize(colours)[:4].split(2) if formula]
    assert ("loss" in results) == bool(losses)
    assert not losses or results["loss"] == pytest.approx(float(sum(losses)) / 2, rel=1e-5)
    assert (results["images"], results["captions"], results["broken"]) == (5, 10, 1)
    assert {value for metric, value in results.items() if "_r" in metric} == {1}


class Untrained(ColourModel):
    """A model whose features of pictures say nothing of the colour."""

    def image(self, pixels: torch.Tensor) -> torch.Tensor:
        return -super().image(pixels)


def test_equal_captions_and_pictures_of_held_out_pairs_are_right_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For published captions they are wrong answers, as in clip-benchmark; a line says how many differ."""
    titles = ["{} Shirt", "{}  shirt", " {} SHIRT", "{}\tshirt"]  # of four pictures each; two more come twice
    samples = [(titles[i // 4].format(NAMES[i % 4]), picture(NAMES[i % 4], size=(8, 8 + i))) for i in range(16)]
    samples += [(title.format(name), picture(name)) for name in NAMES[4:] for title in ("{}", "all {}")]
    (tmp_path / "pairs").mkdir()
    captioned = members("txt", *zip(*samples))
    write_tar(tmp_path / "pairs/0.tar", captioned)
    sets = EvalConfig(sets=[str(tmp_path / "pairs")])
    shares = [f"{way}_r{k}" for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)]
    (perfect,) = evaluate(ColourModel(), evaluation(sets), ONE_RANK).values()
    assert [perfect[name] for name in shares] == [1] * 6, perfect
    (untrained,) = evaluate(Untrained(), evaluation(sets), ONE_RANK).values()
    assert untrained["image_to_text_r1"] == untrained["text_to_image_r1"] == 0
    assert (perfect["captions"], perfect["distinct"]) == (20, 8)
    line = "20 captions, 8 distinct; 20 pictures, 18 distinct; equal ones are right answers"
    assert caplog.messages == [f"eval.sets: {tmp_path}/pairs: {line}"], "once"

    published = write_shards(tmp_path / "published", [captioned], {"dataset_type.txt": "retrieval"})
    (strict,) = evaluate(ColourModel(), evaluation(EvalConfig(sets=[str(published)])), ONE_RANK).values()
    assert strict["image_to_text_r1"] == 0 and "distinct" not in strict
    assert "an equal caption of another picture is wrong, as in clip-benchmark" in caplog.messages[-1]


class ShortModel(ColourModel):
    """A model that gives only the first numbers of the features."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def image(self, pixels: torch.Tensor) -> torch.Tensor:
        return super().image(pixels)[:, : self.size]

    def text(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().text(tokens)[:, : self.size]


def test_sizes_measure_the_first_numbers_of_features(tmp_path: Path) -> None:
    """They equal the results of a model that gives only these numbers. The results of whole features stay."""
    sets = EvalConfig(sets=[*two_sets(tmp_path, wrong=(2,)), str(pair_set(tmp_path / "pairs"))])
    results = evaluate(ColourModel(), evaluation(sets, "softmax", [2, 1]), ONE_RANK)
    for size in (1, 2, 3):
        for name, metrics in evaluate(ShortModel(size), evaluation(sets, "softmax"), ONE_RANK).items():
            assert results[name if size == 3 else f"{name} (size {size})"] == pytest.approx(metrics, abs=1e-6)
    tops = [results[f"classes{mark}"]["top1"] for mark in (" (size 1)", "")]
    assert tops[0] < tops[1], "one number of a colour does not tell all"


# ---- files ----


def test_results_are_saved_with_what_they_belong_to(tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = EvalConfig(sets=two_sets(tmp_path))
    results = evaluate(ColourModel(), evaluation(config), ONE_RANK, file=ResultsFile(run, 12, {"precision": "bf16"}))
    record = json.loads((run / "eval" / "step_00000012.json").read_text())
    assert record["step"] == 12 and record["results"] == results
    facts = record["measured"]["classes"]
    assert (facts["path"], facts["images"], facts["classes"]) == (config.sets[0], 6, 6)
    assert facts["prompts"] == TEMPLATES and facts["precision"] == "bf16" and facts["versions"]["clipscale"]


def test_later_results_join_earlier_ones(tmp_path: Path) -> None:
    file = ResultsFile(tmp_path, 5)
    file.path.parent.mkdir()
    file.path.write_text('{"results": {}, "measured": []}')  # damaged
    for name, accuracy in (("a", 0.1), ("b", 0.2), ("b", 0.3)):
        file.add(name, {"top1": accuracy}, {})
    assert json.loads(file.path.read_text())["results"] == {"a": {"top1": 0.1}, "b": {"top1": 0.3}}


# ---- several ranks ----


def features_and_results(
    rank: int, size: int, run: str, classes: str, captions: str, pairs: str
) -> tuple[list[torch.Tensor], dict, int]:
    torch.manual_seed(0)
    model = build_model(TINY).eval()
    world = World(rank, size, CPU)
    encoder = EvalEncoder(model, world, nullcontext, batch_size=4, threads=1)
    eval_set = load_classes(Path(classes))
    captioned = load_set(Path(captions))
    assert isinstance(captioned, retrieval.RetrievalSet)
    with torch.no_grad():
        images = gather_batches(
            [features for _, features, _ in eval_set.encode_pictures(encoder, Counter())], len(eval_set), 4, world
        )
        of_classes, _ = encoder.encode_classes(eval_set.classnames, eval_set.templates, eval_set.label)
        features = [images, of_classes, encoder.encode_texts([text for texts in captioned.answers for text in texts])]
    passes = []
    for tower in (model.image, model.text):
        tower.register_forward_pre_hook(lambda *_: passes.append(1))
    config = EvalConfig(sets=[classes, captions, pairs], batch=4)
    return features, evaluate(model, evaluation(config), world, file=ResultsFile(Path(run), 1)), len(passes)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_features_and_results_on_ranks_are_those_of_one(tmp_path: Path, size: int) -> None:
    classes = str(classification_set(tmp_path / "classes", [*NAMES, "red", "green", "red"], wrong=[1, 4]))
    captions = str(retrieval_set(tmp_path / "captions"))
    sets = classes, captions, str(pair_set(tmp_path / "pairs"))
    expected, results, _ = features_and_results(0, 1, str(tmp_path / "1"), *sets)
    answers = run_ranks(features_and_results, size, str(tmp_path / "ranks"), *sets)
    assert len({passes for *_, passes in answers}) == 1, "towers that communicate need equally many on every rank"
    for features, reference, _ in answers:
        assert all(torch.equal(ours, alone) for ours, alone in zip(features, expected, strict=True)), f"{size} ranks"
        assert reference == results
    assert json.loads((tmp_path / "ranks/eval/step_00000001.json").read_text())["results"] == results


def test_ranks_save_before_an_evaluation_that_cannot_be_done_ends_their_run(shards: str, tmp_path: Path) -> None:
    sets = [str(classification_set(tmp_path / "set", ["red"], broken=0))]
    with pytest.raises(AssertionError, match="fetch the set again"):
        run_ranks(train_on_rank, 2, four_step_config(shards, tmp_path / "run", eval=EvalConfig(every=1, sets=sets)))
    assert steps(tmp_path / "run") == [1]


# ---- during training ----


def test_evaluations_change_no_bit_of_the_curve(shards: str, tmp_path: Path) -> None:
    """Patch dropout draws random numbers in every step, and the average of the weights takes their place."""
    plain = four_step_config(shards, tmp_path / "plain", ema=0.9)
    plain = replace(plain, model=replace(plain.model, patch_dropout=0.5))
    train(plain)
    evaluated = EvalConfig(every=1, sets=two_sets(tmp_path), weights="ema")
    train(replace(plain, run=str(tmp_path / "evaluated"), eval=evaluated))
    assert len(list((tmp_path / "evaluated/eval").glob("step_*.json"))) > 2
    assert curve(tmp_path / "evaluated") == curve(tmp_path / "plain")
    ours, reference = (checkpoint.load(find_checkpoint(tmp_path / name, "latest")) for name in ("evaluated", "plain"))
    assert all(torch.equal(ours.model[name], value) for name, value in reference.model.items())
