"""The eval verb on a real checkpoint, and class embeddings against open_clip's own on a real (untrained) model."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from clipscale import checkpoint
from clipscale.common.errors import UserError
from clipscale.config.sections import EvalConfig, LaunchConfig, ModelConfig
from clipscale.config.tools import EvalRunConfig
from clipscale.distributed.world import World
from clipscale.eval.run import evaluate
from clipscale.eval.verb import main
from clipscale.models.towers import ClipModel, build_model, load_model
from tests.eval.sets import classification_set, retrieval_set

TINY = ModelConfig(
    name="tiny",
    architecture={
        "embed_dim": 16,
        "vision_cfg": {"image_size": 16, "patch_size": 8, "width": 32, "layers": 1, "head_width": 16},
        "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
    },
)


@pytest.fixture
def model() -> ClipModel:
    torch.manual_seed(0)
    return build_model(TINY)


def save(run: Path, model: ClipModel, step: int) -> None:
    checkpoint.save(run, step, {"model": model.state_dict(), "model_config": asdict(TINY)}, keep=0)


def test_the_verb_evaluates_the_checkpoint_it_is_asked_for(
    tmp_path: Path, model: ClipModel, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = [str(classification_set(tmp_path / "classes")), str(retrieval_set(tmp_path / "captions"))]
    run = tmp_path / "run"
    save(run, model, 7)
    wanted = evaluate(model, EvalConfig(sets=sets), World(0, 1, torch.device("cpu")))
    torch.manual_seed(1)
    save(run, build_model(TINY), 9)

    assert main(EvalRunConfig(run=str(run), checkpoint="7", device="cpu", eval=EvalConfig(sets=sets))) == wanted
    out = capsys.readouterr().out
    assert "run, step 7" in out and "classes" in out and "captions" in out
    # The sets may come from the run's own settings, and the newest checkpoint is the default.
    (run / "config.yaml").write_text(f"eval:\n  sets: ['{sets[0]}']\n")
    assert list(main(EvalRunConfig(run=str(run), device="cpu"))) == ["classes"]
    assert sorted(file.name for file in (run / "eval").glob("*.json")) == ["step_00000007.json", "step_00000009.json"]


def test_mistakes_are_named(tmp_path: Path, model: ClipModel) -> None:
    with pytest.raises(UserError, match="eval needs run="):
        main(EvalRunConfig())
    with pytest.raises(UserError, match="there is no folder"):
        main(EvalRunConfig(run=str(tmp_path / "nowhere")))
    with pytest.raises(UserError, match=r"eval\.sets is empty"):
        main(EvalRunConfig(run=str(tmp_path)))
    sets = [str(classification_set(tmp_path / "classes"))]
    with pytest.raises(UserError, match="no checkpoint"):
        main(EvalRunConfig(run=str(tmp_path), device="cpu", eval=EvalConfig(sets=sets)))


def test_any_weights_are_evaluated_without_a_run(
    tmp_path: Path, model: ClipModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = [str(classification_set(tmp_path / "classes"))]
    save(tmp_path / "run", model, 7)
    wanted = main(EvalRunConfig(run=str(tmp_path / "run"), device="cpu", eval=EvalConfig(sets=sets)))
    monkeypatch.chdir(tmp_path)
    weights = "run/checkpoints/step_00000007"
    for made in (ModelConfig(name="", weights=weights), replace(TINY, weights=weights)):
        assert main(EvalRunConfig(device="cpu", model=made, eval=EvalConfig(sets=sets))) == wanted
    name = "eval-run-checkpoints-step_00000007"
    record = json.loads((tmp_path / "runs" / name / "eval/final.json").read_text())
    theirs = json.loads((tmp_path / "run/eval/step_00000007.json").read_text())
    assert record["results"] == wanted and name in capsys.readouterr().out
    assert record["measured"]["classes"]["source"] == weights
    assert record["measured"]["classes"]["weights"] == theirs["measured"]["classes"]["weights"]
    with pytest.raises(UserError, match="two models; give one"):
        main(EvalRunConfig(run="run", model=ModelConfig(weights=weights)))


def test_a_file_that_is_no_checkpoint_is_refused_in_one_line(tmp_path: Path, model: ClipModel) -> None:
    save(tmp_path, model, 7)
    file = tmp_path / "config.yaml"
    file.write_text("batch: 4\n")
    for text in ("batch: 4\n", "", "PK\x03\x04", "\x80\x02}q\x00."):
        file.write_text(text)
        with pytest.raises(UserError, match=r"config\.yaml is (damaged or not a checkpoint|not in this)"):
            load_model(tmp_path, str(file))


def test_a_model_that_cannot_be_built_is_no_fault_of_its_checkpoint(
    tmp_path: Path, model: ClipModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, model, 7)
    monkeypatch.setattr("clipscale.models.towers.build_model", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load_model(tmp_path)


@pytest.mark.slow
def test_the_verb_starts_processes_of_its_own(tmp_path: Path, model: ClipModel) -> None:
    sets = [str(classification_set(tmp_path / "classes")), str(retrieval_set(tmp_path / "captions"))]
    save(tmp_path / "run", model, 7)
    results = [
        main(EvalRunConfig(str(tmp_path / "run"), device="cpu", eval=EvalConfig(sets=sets, batch=2), launch=launch))
        for launch in (LaunchConfig(procs=1, threads=1), LaunchConfig(procs=2), LaunchConfig(procs=4))
    ]
    assert results[0] == results[1] == results[2]
