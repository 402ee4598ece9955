"""Linear probes against scikit-learn's logistic regression, and the choice of their strength against a search over all of CLIP's 96."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from clipscale.common.errors import UserError
from clipscale.config.sections import EvalConfig
from clipscale.distributed.world import World
from clipscale.eval import probe, run
from clipscale.eval.probe import DRAWS, LabelledFeatures, choose, evaluate, fit, held_out
from clipscale.eval.sets.load import load_set, train_split
from tests.eval.sets import ALONE, NAMES, ColourModel, classification_set, picture, retrieval_set
from tests.support.ranks import run_ranks


def clusters(count: int, classes: int = 4, width: int = 6, seed: int = 0, spread: float = 0.9) -> LabelledFeatures:
    """Unit features around one centre a class."""
    generator = torch.Generator().manual_seed(9)
    centres = torch.randn(classes, width, generator=generator, dtype=torch.float64)
    generator.manual_seed(seed)
    labels = torch.arange(count) % classes
    noise = torch.randn(count, width, generator=generator, dtype=torch.float64)
    return LabelledFeatures(torch.nn.functional.normalize(centres[labels] + spread * noise, dim=-1), labels)


def theirs(train: LabelledFeatures, strength: float) -> LogisticRegression:
    return LogisticRegression(C=1 / strength, tol=1e-10, max_iter=20_000).fit(train.features, train.labels)


def accuracy_of(model: LogisticRegression, test: LabelledFeatures) -> float:
    return float((model.predict(test.features) == test.labels.numpy()).mean())


@pytest.mark.parametrize("strength", [1e-3, 1.0, 30.0, 1e4])
def test_the_fit_is_scikit_learns(strength: float) -> None:
    train, test = clusters(150), clusters(80, seed=1)
    weights, model = fit(train, 4, strength), theirs(train, strength)
    found = probe.scores(weights, test.features).softmax(1).numpy()
    worst = np.abs(found - model.predict_proba(test.features)).max()
    assert worst < 1e-5, f"largest difference of a probability: {worst:.1e}"


def test_the_strength_is_found_by_clips_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second power of ten first, then halfway to the neighbours of the best, down to an eighth."""
    tried: list[float] = []

    def peak(at: float) -> float:
        tried.clear()
        monkeypatch.setattr(probe, "fit", lambda train, classes, strength: strength)
        monkeypatch.setattr(
            probe, "accuracy", lambda strength, rest: tried.append(strength) or -abs(np.log10(strength) - at)
        )
        return float(np.log10(choose(some, some, 4, ALONE)))

    some = clusters(8)
    for at in (1.375, -5.875, 6.0, -6.0, 0.0):
        assert peak(at) == pytest.approx(at)
        assert np.log10(tried[:7]).tolist() == pytest.approx([-6, -4, -2, 0, 2, 4, 6]) and len(tried) <= 7 + 2 * 4
    monkeypatch.setattr(probe, "accuracy", lambda strength, rest: 0.5)
    assert choose(some, some, 4, ALONE) == 1e6, "of equal ones the largest"
    assert choose(some, some[torch.arange(0)], 4, ALONE) == 1, "nothing is held out"


def test_the_figures_are_those_of_an_independent_probe() -> None:
    train, test = clusters(150, spread=1.2), clusters(90, seed=1, spread=1.2)
    metrics, (strength,) = evaluate(train, test, 4, None, ALONE)
    assert metrics["top1"] == pytest.approx(accuracy_of(theirs(train, strength), test), abs=1e-12)
    few, many = clusters(40, spread=1.2), clusters(400, seed=1, spread=1.2)
    metrics, (strength,) = evaluate(few, many, 4, None, ALONE)
    trains, _ = held_out(few.labels, 4, None, 0)
    without = LabelledFeatures(few.features[trains], few.labels[trains])
    assert metrics["top1"] == pytest.approx(accuracy_of(theirs(few, strength), many), abs=1e-12)
    assert metrics["top1"] != accuracy_of(theirs(without, strength), many), "the held-out pictures train too"
    metrics, strengths = evaluate(train, test, 4, 2, ALONE)
    wanted = []
    for draw, strength in enumerate(strengths):
        chosen, _ = held_out(train.labels, 4, 2, draw)
        shown = LabelledFeatures(train.features[chosen], train.labels[chosen])
        wanted.append(accuracy_of(theirs(shown, strength), test))
    assert metrics["top1"] == pytest.approx(np.mean(wanted), abs=1e-12) and len(strengths) == DRAWS
    assert metrics["top1_std"] == pytest.approx(np.std(wanted), abs=1e-12)


def test_chunks_of_rows_give_the_figures_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of the scores does not grow with the set, and parts of a set are no copies of its features."""
    train, test = clusters(75, spread=1.2), clusters(50, seed=1, spread=1.2)
    some = train[torch.arange(0, 75, 2)][torch.arange(30)]
    assert some.features is train.features and len(some.labels) == 30
    monkeypatch.setattr(probe, "choose", lambda *_: 1.0)
    whole, of_some = evaluate(train, test, 4, None, ALONE), fit(some, 4, 1.0)
    original, rows = probe.scores, []
    monkeypatch.setattr(probe, "scores", lambda weights, x: rows.append(len(x)) or original(weights, x))
    monkeypatch.setattr(probe, "CHUNK", 14 * 6)
    assert evaluate(train, test, 4, None, ALONE) == whole
    worst = float((fit(some, 4, 1.0) - of_some).abs().max())
    assert worst < 1e-5, f"largest difference of a weight: {worst:.1e}"
    assert max(rows) == 14, "the width is 6, the classes are 4"


def test_a_broken_picture_of_the_test_is_a_miss() -> None:
    train, test = clusters(60, spread=0.1), clusters(40, seed=1, spread=0.1)
    test.features[:10] = torch.nan
    assert evaluate(train, test, 4, None, ALONE)[0]["top1"] == 30 / 40


def test_pictures_are_held_out_of_every_class() -> None:
    labels = torch.tensor([0] * 10 + [1] * 4 + [2])
    trains, rest = held_out(labels, 4, None, 0)
    assert sorted([*trains.tolist(), *rest.tolist()]) == list(range(15))
    assert torch.bincount(labels[rest], minlength=4).tolist() == [2, 1, 0, 0]
    trains, rest = held_out(labels, 4, 3, 0)
    assert torch.bincount(labels[trains]).tolist() == [3, 3, 1] and torch.bincount(labels[rest]).tolist() == [3, 1]
    assert not {*trains.tolist()} & {*rest.tolist()}
    draws = [held_out(labels, 4, 3, draw)[0].tolist() for draw in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


def with_train_split(root: Path, wrong: list[int] | None = None) -> Path:
    """Six pictures a colour to train on beside the test; `wrong` pictures of the test show another colour."""
    classification_set(root, wrong=wrong or [])
    classification_set(root.parent / "other", NAMES * 6)
    (root.parent / "other/test").rename(root / "train")
    return root


def test_probes_are_evaluated_beside_zero_shot_and_say_what_they_are(tmp_path: Path) -> None:
    sets = [str(with_train_split(tmp_path / "colours", wrong=[1])), str(retrieval_set(tmp_path / "captions"))]
    config = EvalConfig(sets=sets, probe=["linear", "2"], batch=4)
    results = run.evaluate(ColourModel(), config, ALONE, run_dir=tmp_path / "run", step=3)
    assert list(results) == ["colours", "captions", "colours (linear probe)", "colours (2-shot)"]
    assert [results[name]["top1"] for name in results if "colours" in name] == [5 / 6] * 3
    assert results["colours (2-shot)"]["top1_std"] == 0
    record = json.loads((tmp_path / "run/eval/step_00000003.json").read_text())
    probe_of = record["measured"]["colours (2-shot)"]["probe"]
    assert probe_of == {"path": str(tmp_path / "colours"), "images": 36, "shots": 2}
    assert "prompts" not in record["measured"]["colours (2-shot)"]


def test_a_folder_train_beside_val_is_its_training_split(tmp_path: Path) -> None:
    for split, size in (("train", 5), ("val", 2)):
        for colour in ("red", "blue"):
            (tmp_path / split / colour).mkdir(parents=True)
            for number in range(size):
                (tmp_path / split / colour / f"{number}.png").write_bytes(picture(colour))
    found = train_split(load_set(tmp_path / "val"))
    assert found is not None and len(found) == 10 and list(found.labels) == [0] * 5 + [1] * 5
    (tmp_path / "train/blue").rename(tmp_path / "train/violet")
    (tmp_path / "val").rename(tmp_path / "test")
    with pytest.raises(UserError, match=r"eval\.probe: the training split .*train of .*test has other classes"):
        train_split(load_set(tmp_path / "test"))


def test_mistakes_are_named(tmp_path: Path) -> None:
    sets = [str(classification_set(tmp_path / "set"))]
    for texts, message in (
        (["linear"], r"eval\.probe: none of the sets has a training split; a probe needs PATH/train/nshards\.txt"),
        (["lin"], r"eval\.probe=lin: give linear, or how many pictures of each class"),
        (["0"], r"eval\.probe=0: give linear"),
    ):
        with pytest.raises(UserError, match=message):
            run.check(EvalConfig(sets=sets, probe=texts), ALONE)


def on_a_rank(rank: int, size: int) -> tuple[dict[str, float], list[float]]:
    world = World(rank, size, torch.device("cpu"))
    return evaluate(clusters(60, spread=1.3), clusters(60, seed=2, spread=1.3), 4, None, world)


@pytest.mark.slow
def test_ranks_share_the_search_and_agree() -> None:
    for size in (2, 4):
        assert run_ranks(on_a_rank, size) == [on_a_rank(0, 1)] * size
