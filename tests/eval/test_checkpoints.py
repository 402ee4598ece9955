"""`checkpoint=all` gives every checkpoint's results once, in the report and the sinks; evaluations do not disturb training."""

import gc
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from clipscale import checkpoint
from clipscale.common.errors import UserError
from clipscale.config.sections import EvalConfig, SinkConfig
from clipscale.config.tools import EvalRunConfig
from clipscale.distributed.world import World
from clipscale.eval import run as evaluation
from clipscale.eval import verb
from clipscale.eval.verb import main
from clipscale.models.towers import build_model
from clipscale.report.evaluations import read_evaluations
from clipscale.train import Run, train
from tests.eval.sets import ALONE, classification_set, retrieval_set
from tests.eval.test_verb import TINY, save
from tests.support.runs import curve, small


@pytest.fixture
def config(tmp_path: Path) -> EvalRunConfig:
    """A run of three checkpoints, and two sets."""
    sets = [str(classification_set(tmp_path / "classes", wrong=[1])), str(retrieval_set(tmp_path / "captions"))]
    for step in (5, 10, 15):
        torch.manual_seed(step)
        save(tmp_path / "run", build_model(TINY), step)
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 15, "loss": 1.0}\n')
    return EvalRunConfig(str(tmp_path / "run"), "all", device="cpu", eval=EvalConfig(sets=sets))


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sets that are computed, in order; the entry `stop` ends the process there."""
    found: list[str] = []
    for name in ("_classification", "_retrieval"):
        original = getattr(evaluation, name)

        def count(encoder: Any, item: Any, *rest: Any, original: Any = original) -> Any:
            if "stop" in found and len(found) == 4:
                raise KeyboardInterrupt
            found.append(item.name)
            return original(encoder, item, *rest)

        monkeypatch.setattr(evaluation, name, count)
    return found


def test_all_checkpoints_are_evaluated_once_and_drawn_as_curves(
    config: EvalRunConfig, computed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, drawn = Path(config.run), []
    monkeypatch.setattr("clipscale.eval.verb.write_report", lambda folder: drawn.append(folder) or folder)
    newest = main(replace(config, log=SinkConfig(tensorboard=True)))
    assert computed == ["classes", "captions"] * 3
    records = {record["step"]: record["results"] for record in read_evaluations(run)}
    assert records[15] == newest and list(records) == [5, 10, 15]
    assert main(replace(config, checkpoint="10")) == records[10], "as evaluated alone"
    assert "run, step 10" in capsys.readouterr().out and drawn == [run]
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    points = [(event.step, event.value) for event in events.Scalars("eval/classes/top5")]
    assert points == [(step, pytest.approx(results["classes"]["top5"])) for step, results in records.items()]

    computed.clear()
    torch.manual_seed(0)
    save(run, build_model(TINY), 10)
    assert main(config) == newest
    assert computed == ["classes", "captions"], "only of the checkpoint whose weights have changed"


def test_an_interrupted_evaluation_goes_on(config: EvalRunConfig, computed: list[str]) -> None:
    (Path(config.run) / "metrics.jsonl").unlink()  # no report
    computed.append("stop")
    with pytest.raises(KeyboardInterrupt):
        main(config)
    assert computed == ["stop", "classes", "captions", "classes"]
    computed.clear()
    main(config)
    assert computed == ["captions", "classes", "captions"]
    assert [set(record["results"]) for record in read_evaluations(Path(config.run))] == [{"classes", "captions"}] * 3


@pytest.mark.parametrize("damaged", [10, 15])
def test_a_damaged_checkpoint_is_left_out(
    config: EvalRunConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, damaged: int
) -> None:
    run, reported = Path(config.run), []
    monkeypatch.setattr("clipscale.eval.verb.write_report", lambda folder: reported.append(folder) or folder)
    config.eval.sets = config.eval.sets[:1]

    def damage(step: int) -> None:
        for file in checkpoint.path_of(run, step).iterdir():
            file.write_bytes(b"")

    damage(damaged)
    results = main(config)
    records = read_evaluations(run)
    assert [record["step"] for record in records] == [step for step in (5, 10, 15) if step != damaged]
    assert results == records[-1]["results"] and reported == [run]
    (warning,) = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert f"step_{damaged:08d} is left out: " in warning
    for step in (5, 10, 15):
        damage(step)
    with pytest.raises(UserError, match="step_00000015"):
        main(config)
    with pytest.raises(UserError, match=r"run=.*empty: no checkpoint in"):
        (run.parent / "empty").mkdir()
        main(replace(config, run=str(run.parent / "empty")))


def test_a_checkpoint_that_another_rank_cannot_read_is_left_out(
    config: EvalRunConfig, computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run may delete a checkpoint when one rank has read it. The ranks must go on with the same one."""
    config.eval.sets = config.eval.sets[:1]
    gather, load, loads = World.gather, verb.load_any, []

    def with_another_rank(self: World, value: Any) -> list[Any]:
        return [*gather(self, value), *["it is gone"] * (value == "" and len(loads) == 2)]

    monkeypatch.setattr(verb, "load_any", lambda *given, **named: (loads.append(given), load(*given, **named))[1])
    monkeypatch.setattr(World, "gather", with_another_rank)
    main(config)
    assert len(loads) == 3 and computed == ["classes"] * 2
    assert [record["step"] for record in read_evaluations(Path(config.run))] == [5, 15]


def test_evaluations_change_no_bit_of_the_curve(shards: str, tmp_path: Path) -> None:
    """Patch dropout draws random numbers in every step, and the average of the weights takes their place meanwhile."""
    sets = [str(classification_set(tmp_path / "classes")), str(retrieval_set(tmp_path / "captions"))]
    plain = small(shards, tmp_path / "plain", ema=0.9)
    plain = replace(plain, model=replace(plain.model, patch_dropout=0.5))
    train(plain)
    train(replace(plain, run=str(tmp_path / "evaluated"), eval=EvalConfig(every=1, sets=sets, weights="ema")))
    assert len(list((tmp_path / "evaluated/eval").glob("step_*.json"))) > 2
    assert curve(tmp_path / "evaluated") == curve(tmp_path / "plain")
    ours, theirs = (checkpoint.load(checkpoint.locate(tmp_path / name, "latest")) for name in ("evaluated", "plain"))
    assert all(torch.equal(ours["model"][name], value) for name, value in theirs["model"].items())


def test_an_evaluation_leaves_modes_random_state_and_memory_as_they_were(shards: str, tmp_path: Path) -> None:
    sets = [str(classification_set(tmp_path / "classes")), str(retrieval_set(tmp_path / "captions"))]
    run = Run(small(shards, tmp_path / "run", ema=0.9, eval=EvalConfig(sets=sets, weights="ema")), ALONE)
    run.optimizer_step()
    run.evaluate()  # the sets' lists stay in memory

    def held() -> tuple[int, list[bool], list[int]]:
        gc.collect()
        storages = {
            one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
            for one in gc.get_objects()
            if type(one) in (torch.Tensor, torch.nn.Parameter)
        }
        return sum(storages.values()), [m.training for m in run.state.model.modules()], torch.get_rng_state().tolist()

    before = held()
    run.evaluate()
    after = held()
    run.stream.close()
    assert after[0] <= before[0] and after[1:] == before[1:]
    assert json.loads((tmp_path / "run/eval/step_00000000.json").read_text())["results"]
