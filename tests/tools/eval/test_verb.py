"""The eval verb on real checkpoints: of a run, of all its steps, and of any other weights."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from clipscale.cli.main import main as command
from clipscale.common import files
from clipscale.common.record import Results
from clipscale.config.model import ModelConfig, TowerConfig
from clipscale.config.sections import EvalConfig, LaunchConfig, SinkConfig
from clipscale.distributed.agreement import run_on_rank0
from clipscale.distributed.world import World
from clipscale.eval.run import evaluate
from clipscale.log.sinks import Sinks, open_sinks
from clipscale.models.towers import ClipModel, build_model
from clipscale.models.weights.load_weights import completed_by_weights
from clipscale.run_folder.paths import checkpoint_path, checkpoints_of
from clipscale.run_folder.records import read_evaluations
from clipscale.tools.eval.settings import EvalRunConfig, check_eval, completed_by_run
from clipscale.tools.eval.verb import main
from clipscale.tools.trained_model import load_run_or_weights
from clipscale.train import train
from tests.conftest import Capture
from tests.eval.sets import classification_set, evaluation, pair_set, retrieval_set
from tests.support.checkpoints import ONE_RANK, save_model
from tests.support.ranks import run_ranks
from tests.support.runs import ARCHITECTURE, four_step_config
from tests.support.towers import architecture
from tests.support.user_errors import refused

TINY = ModelConfig(name="tiny", architecture=architecture(16, 8, 16, layers=1))


@pytest.fixture
def model() -> ClipModel:
    torch.manual_seed(0)
    return build_model(TINY)


@pytest.fixture
def sets(tmp_path: Path) -> list[str]:
    return [str(classification_set(tmp_path / "classes", wrong=[1])), str(retrieval_set(tmp_path / "captions"))]


def evaluated(run: Path, checkpoint: str = "latest", **changes: Any) -> Results:
    """What the verb returns of a run."""
    return main(EvalRunConfig(str(run), checkpoint, device="cpu", **changes))


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    """The points of a curve in TensorBoard's files: step and value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_checkpoints_are_evaluated_and_sent_as_curves(tmp_path: Path, sets: list[str], capsys: Capture) -> None:
    run = tmp_path / "run"
    config = EvalConfig(sets=sets)
    sent = []
    for step in (5, 10):
        torch.manual_seed(step)
        model = build_model(TINY)
        save_model(run, model, TINY, step)
        sent.append(evaluated(run, eval=config, log=SinkConfig(tensorboard=True)))
        assert sent[-1] == evaluate(model, evaluation(config), ONE_RANK)
    records = {record["step"]: record["results"] for record in read_evaluations(run)}
    assert records == {5: sent[0], 10: sent[1]} and evaluated(run, "5", eval=config) == sent[0]
    out = capsys.readouterr().out
    assert all(words in out for words in ("run, step 5", "run, step 10", "classes", "captions")), out
    points = scalars(run, "eval/classes/top5")
    assert points == [(step, pytest.approx(results["classes"]["top5"])) for step, results in records.items()]
    (run / "config.yaml").write_text(f"eval:\n  sets: ['{sets[0]}']\n")
    assert list(evaluated(run)) == ["classes"], "the sets of the run's own settings"
    assert sets[0] in capsys.readouterr().out


def test_verbs_and_weights_take_the_best_checkpoint(tmp_path: Path, sets: list[str], capsys: Capture) -> None:
    run = tmp_path / "run"
    (run / "eval").mkdir(parents=True)
    models = {}
    for step, score in ((2, 0.9), (4, 0.1)):
        torch.manual_seed(step)
        models[step] = build_model(TINY)
        save_model(run, models[step], TINY, step)
        files.write_json(run / f"eval/step_{step:08d}.json", {"results": {"birds": {"top1": score}}})
    (run / "config.yaml").write_text("checkpoint: {best: birds/top1}")
    best = [f"run={run}", "step=best"]
    assert command(["eval", *best, f"eval.sets=[{sets[0]}]", "device=cpu"]) == 0
    assert "run, step 2" in capsys.readouterr().out
    assert command(["export", *best, f"out={tmp_path / 'out'}"]) == 0
    assert "out: step 2" in capsys.readouterr().out
    rows = models[2].text.encoder.token_embedding.weight
    for weights in (tmp_path / "out", f"{run}::best"):
        started = build_model(completed_by_weights(ModelConfig(name="", weights=str(weights))))
        assert torch.equal(started.text.encoder.token_embedding.weight, rows)


def test_a_checkpoint_of_another_run_or_set_aside_leaves_the_runs_results(tmp_path: Path, sets: list[str]) -> None:
    for name in ("mine", "other"):
        torch.manual_seed(len(name))
        save_model(tmp_path / name, build_model(TINY), TINY)
    mine = checkpoint_path(tmp_path / "mine", 7)
    config = EvalConfig(sets=sets)
    evaluated(tmp_path / "mine", str(mine), eval=config)
    before = read_evaluations(tmp_path / "mine")
    aside = shutil.copytree(mine, mine.with_name(f"{mine.name}.aside"))
    for path in (checkpoint_path(tmp_path / "other", 7), aside):
        with refused(f"checkpoint={path}: no checkpoint of {tmp_path / 'mine'}; give .*run=NAME"):
            evaluated(tmp_path / "mine", str(path), eval=config)
    assert read_evaluations(tmp_path / "mine") == before


def loaded(rank: int, world_size: int, run: Path) -> list[str]:
    """The image towers of a run, and of weights that name it. Only rank 0 sees the newest checkpoint, as if the run had
    just saved."""
    world = World(rank, world_size, torch.device("cpu"))
    seen = patch("clipscale.run_folder.chosen_checkpoint.checkpoints_of", lambda run: checkpoints_of(run)[: 2 - rank])
    weights = ModelConfig(name="", weights=str(run), image=TowerConfig(weights=str(run)))
    with seen:
        models = [
            load_run_or_weights(place, "latest", "trained", config, partial(run_on_rank0, world))[0]
            for place, config in ((run, TINY), (None, weights))
        ]
    return [model.image.digest() for model in models]


def test_all_ranks_evaluate_the_checkpoint_that_rank_0_finds(tmp_path: Path) -> None:
    """The run may save another one meanwhile."""
    for step in (2, 4):
        torch.manual_seed(step)
        newest = build_model(TINY)
        save_model(tmp_path / "run", newest, TINY, step)
    assert run_ranks(loaded, 2, tmp_path / "run") == [[newest.image.digest()] * 2] * 2


def test_sets_that_are_given_need_no_root_of_the_run(tmp_path: Path, model: ClipModel) -> None:
    save_model(tmp_path / "run", model, TINY)
    (tmp_path / "run/config.yaml").write_text(f"eval:\n  suite: imagenet\n  root: '{tmp_path / 'gone'}'\n")
    chosen = EvalRunConfig(run=str(tmp_path / "run"), eval=EvalConfig(sets=[str(tmp_path)]))
    check_eval(chosen)
    assert completed_by_run(chosen).eval == chosen.eval
    with refused("eval.root=.*/gone: there is no such folder"):
        check_eval(EvalRunConfig(run=str(tmp_path / "run")))


def test_a_suite_has_its_table_and_takes_the_root_of_the_run(tmp_path: Path, model: ClipModel, capsys: Capture) -> None:
    classification_set(tmp_path / "sets" / "wds_imagenet1k")
    save_model(tmp_path / "run", model, TINY)
    (tmp_path / "run/config.yaml").write_text(f"eval:\n  root: '{tmp_path / 'sets'}'\n")
    evaluated(tmp_path / "run", eval=EvalConfig(suite="infcl-table3"))
    lines = capsys.readouterr().out.splitlines()
    heads = next(line for line in lines if "infcl-table3" in line)
    assert heads.rstrip().endswith("T→I")
    row = lines[lines.index(heads) + 2].split()
    assert row[:3] == ["run,", "step", "7"] and row[4:] == ["-"] * 5, row


def test_any_weights_are_evaluated_without_a_run(
    tmp_path: Path, model: ClipModel, sets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path / "run", model, TINY)
    expected = evaluated(tmp_path / "run", eval=EvalConfig(sets=sets))
    monkeypatch.chdir(tmp_path)
    weights = "run:run/checkpoints/step_00000007"
    for described in (ModelConfig(name="", weights=weights), replace(TINY, weights=weights)):
        assert main(EvalRunConfig(device="cpu", model=described, eval=EvalConfig(sets=sets))) == expected
    assert len(list(tmp_path.glob("runs/eval-*/eval/final.json"))) == 1, "by the name of the weights"


def test_any_weights_have_their_points_and_settings_in_the_sinks(
    tmp_path: Path, model: ClipModel, sets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def opened(folder: Path, mode: str, tensorboard: bool, settings: dict[str, Any]) -> Sinks:
        given.append(settings)
        return open_sinks(folder, mode, tensorboard, settings)

    monkeypatch.setattr("clipscale.tools.eval.verb.open_sinks", opened)
    save_model(tmp_path / "run", model, TINY)
    chosen = ModelConfig(name="", weights=str(tmp_path / "run"))
    places = EvalRunConfig(device="cpu", model=chosen, out=str(tmp_path / "out"), log=SinkConfig(tensorboard=True))
    results = main(replace(places, eval=EvalConfig(sets=sets[:1])))
    assert scalars(tmp_path / "out", "eval/classes/top1") == [(0, pytest.approx(results["classes"]["top1"]))]
    assert [settings["model"]["weights"] for settings in given] == [str(checkpoint_path(tmp_path / "run", 7))]


def test_results_of_other_towers_and_sizes_lie_in_another_folder(
    tmp_path: Path, model: ClipModel, sets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    weights = "run:run/checkpoints/step_00000007"
    save_model(tmp_path / "run", model, TINY)
    own_text = TowerConfig(weights=weights)
    models = [
        replace(TINY, image=TowerConfig(weights=weights), text=own_text),
        replace(TINY, text=own_text),
        replace(TINY, name="other", text=own_text),
        replace(TINY, weights=weights),
        replace(TINY, weights=weights, image_size=24),
        replace(TINY, weights=weights, preprocess={"interpolation": "bilinear"}),
        replace(TINY, weights=weights, correct_cls_mask=True),
    ]
    for each in models:
        main(EvalRunConfig(device="cpu", model=each, eval=EvalConfig(sets=sets[:1])))
    noted = [
        json.loads(path.read_text())["measured"]["classes"] for path in tmp_path.glob("runs/eval*/eval/final.json")
    ]
    keys = ("model", "source", "image.weights", "text.weights", "image_size")
    path = weights.removeprefix("run:")
    assert sorted([str(facts.get(key)) for key in keys] for facts in noted) == sorted(
        [
            str(path if value == weights else value)
            for value in (each.name, each.weights, each.image.weights, each.text.weights, each.image_size)
        ]
        for each in models
    )


def test_results_of_weights_of_a_run_are_of_the_checkpoint_that_is_its_newest(
    tmp_path: Path, model: ClipModel, sets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run may train on between two evaluations."""
    monkeypatch.chdir(tmp_path)
    for step in (7, 9):
        save_model(tmp_path / "runs/b", model, TINY, step)
        main(EvalRunConfig(device="cpu", model=replace(TINY, weights="b"), eval=EvalConfig(sets=sets[:1])))
    noted = sorted(
        json.loads(path.read_text())["measured"]["classes"]["source"]
        for path in tmp_path.glob("runs/eval*/eval/final.json")
    )
    assert noted == [f"runs/b/checkpoints/step_0000000{step}" for step in (7, 9)]


def test_a_run_is_evaluated_in_its_own_precision(shards: str, tmp_path: Path, capsys: Capture) -> None:
    """The figures are those of the evaluation in training. With a logit bias the loss is still the softmax."""
    pairs = EvalConfig(sets=[str(pair_set(tmp_path / "pairs"))])
    model = ModelConfig(name="test", architecture=ARCHITECTURE, init_bias=-10)
    run = tmp_path / "run"
    results = train(four_step_config(shards, run, precision="bf16", eval=pairs, model=model))["eval"]
    assert evaluated(run, precision="fp32") != results
    assert evaluated(run) == results
    assert results["pairs"]["loss"] < 3, "that of 6 pairs; of the sigmoid it is near 10"
    assert read_evaluations(run)[0]["measured"]["pairs"]["precision"] == "bf16"
    assert capsys.readouterr().out.count("step 4, bf16") == 2, "in the run's last lines, and in the verb's"


@pytest.mark.slow
def test_the_verb_starts_processes_of_its_own(tmp_path: Path, model: ClipModel, sets: list[str]) -> None:
    save_model(tmp_path / "run", model, TINY)
    config = EvalConfig(sets=sets, batch=2)
    one, two, four = (evaluated(tmp_path / "run", eval=config, launch=LaunchConfig(procs)) for procs in (1, 2, 4))
    assert one == two == four
