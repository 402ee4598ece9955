"""The step benchmark: every method computes the same gradient, and records become tables and pictures."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from rich.console import Console
from torch import Tensor

from clipscale import cli
from clipscale.bench.step import METHODS, StepBenchSettings, chosen, jobs, main, plan, rows_of, table
from clipscale.bench.step_draw import draw
from clipscale.bench.step_work import StepJob, StepWork
from clipscale.errors import UserError

JOB = StepJob("tiny", batch=12, chunk=4, precision="fp32", device="cpu")


@pytest.fixture(scope="module")
def work() -> StepWork:
    return StepWork(JOB)


def gradients(work: StepWork, name: str) -> dict[str, Tensor]:
    step = work.step(name)
    for weights in work.weights:
        weights.zero_grad()
    step(*work.inputs(12))
    owner = work.weights[-1] if name == "open_clip" else work.model(frozen=name.startswith("frozen"))
    found = {k: p.grad for k, p in owner.named_parameters() if p.grad is not None}
    # open_clip's model has no wrappers around its encoders
    return {k.replace("image.encoder.", "visual.").replace("text.encoder.", "text."): g for k, g in found.items()}


@pytest.mark.parametrize("name", ["cache", "keep-50", "keep-100", "frozen", "frozen-keep-100"])
def test_every_method_leaves_the_gradient_of_plain(work: StepWork, name: str) -> None:
    wanted = gradients(work, "frozen-plain" if name.startswith("frozen") else "plain")
    found = gradients(work, name)
    assert found.keys() == wanted.keys()
    for key, gradient in wanted.items():
        error = ((found[key] - gradient).norm() / gradient.norm().clamp_min(1e-12)).item()
        assert error < 1e-3, f"{name}, {key}: relative error {error:.1e}"


def test_open_clips_loop_does_the_same_work(work: StepWork) -> None:
    """Equal gradients but for the scale's, which its loop counts once for each chunk."""
    wanted, found = gradients(work, "plain"), gradients(work, "open_clip")
    assert found.keys() == wanted.keys()
    norms = [sum(g.square().sum() for k, g in grads.items() if k != "logit_scale").sqrt() for grads in (wanted, found)]
    assert float(norms[1]) == pytest.approx(float(norms[0]), rel=1e-3)
    assert found["logit_scale"].item() == pytest.approx(3 * wanted["logit_scale"].item(), rel=1e-3)


def test_kept_graphs_save_second_passes(work: StepWork) -> None:
    calls: list[int] = []
    hook = work.model().image.register_forward_hook(lambda *_: calls.append(1))
    counts = []
    for name in ("cache", "keep-50", "keep-100"):
        work.step(name)(*work.inputs(12))  # a first step measures
        calls.clear()
        work.step(name)(*work.inputs(12))
        counts.append(len(calls))
    hook.remove()
    assert counts[0] == 6 and counts[0] > counts[1] > counts[2] == 3, counts


def test_time_is_recorded_and_a_failure_is_its_methods_own() -> None:
    work = StepWork(replace(JOB, batch=4, timed=["cache"], repeats=2))

    def fail(_: str) -> None:
        raise RuntimeError("no such thing")

    work.attempt("keep-50", fail)
    found = work.do()["methods"]
    assert found["cache"]["status"] == "ok" and len(found["cache"]["seconds"]) == 2
    assert (found["keep-50"]["status"], found["keep-50"]["reason"]) == ("failed", "RuntimeError: no such thing")


def by_hand() -> dict[str, Any]:
    settings = StepBenchSettings(methods="cache,frozen", batch="8", chunk="4", memory="4,8", device="cpu")
    found = plan(settings)
    assert found.methods == ["plain", "frozen-plain", "cache", "frozen"]
    ok = {"status": "ok", "seconds": [], "memory": {"4": 1 << 20, "8": 3 << 20}}
    answers = [{"methods": {name: dict(ok)}} for name in found.methods]
    answers[3]["methods"]["frozen"] |= {"status": "out of memory", "reason": "no room", "traceback": ""}
    times = {"plain": [1.0, 2.0, 1.0], "frozen-plain": [0.5, 0.5, 0.5], "cache": [1.3, 2.8, 1.2], "frozen": []}
    answers.append({"methods": {name: ok | {"seconds": seconds} for name, seconds in times.items()}})
    facts = {"gpus": [], "cpu": "a processor", "versions": {"torch": "2"}}
    shown = {"batch": "8", "chunk": "4", "model": "tiny", "precision": "fp32", "memory": "4,8"}
    return {
        "device": "cpu",
        "settings": shown,
        "machine": facts,
        "threads": 2,
        "rows": rows_of(found, answers),
        "methods": METHODS,
    }


def test_ratios_are_taken_within_a_round() -> None:
    rows = {row["method"]: row for row in by_hand()["rows"]}
    assert rows["cache"]["ratio"]["median"] == pytest.approx(1.3)  # of 1.3, 1.4 and 1.2
    assert rows["cache"]["samples_per_s"] == pytest.approx(8 / 1.3)
    assert rows["frozen-plain"]["ratio"]["median"] == 1.0, "compared with itself"
    assert rows["frozen"]["status"] == "out of memory"
    assert rows["cache"]["peak_bytes"] == 3 << 20


def test_the_table_and_the_picture_show_every_method(tmp_path: Path) -> None:
    record, printed = by_hand(), io.StringIO()
    Console(file=printed, width=120).print(table(record))
    for word in ("plain", "cache", "frozen", "out of memory", "1.30"):
        assert word in printed.getvalue(), f"no {word} in\n{printed.getvalue()}"
    figure = draw(record, tmp_path / "x.png")
    assert imread(tmp_path / "x.png").shape[1] > 1000
    assert len(figure.axes[1].get_lines()) == 4, "one curve of memory for each method with several batches"


def test_memory_is_measured_in_processes_apart_and_time_in_one() -> None:
    settings = StepBenchSettings(methods="cache,keep-30", batch="8", chunk="4", memory="4,16", device="cpu")
    *apart, last = jobs(plan(settings))
    assert [job.probed for job in apart] == [
        [("plain", 4), ("plain", 8), ("plain", 16)],
        [("cache", 4), ("cache", 8), ("cache", 16)],
        [("keep-30", 8)],
    ]
    assert last.timed == ["plain", "cache", "keep-30"] and not last.probed


def test_auto_leaves_open_clip_out_where_its_chunks_would_be_ragged() -> None:
    assert "open_clip" in chosen("auto", 8, 4)
    assert "open_clip" not in chosen("auto", 9, 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "vit-b61"}, "model=vit-b61: no such preset; did you mean 'vit-b16'"),
        ({"chunk": "1k"}, "chunk=1024: a batch=512 has no chunk that large"),
        ({"batch": "1,2"}, "batch=1,2: give one count"),
        ({"memory": "0"}, "memory=0: must be at least 1"),
        ({"methods": "keep-0"}, "methods=keep-0: unknown"),
        ({"methods": ""}, "methods is empty"),
        ({"methods": "open_clip", "chunk": "100"}, "wants equal chunks"),
        ({"precision": "fp16"}, "precision=fp16: give fp32 or bf16"),
        ({"malloc": "mine"}, "malloc=mine: give keep or system"),
        ({"repeats": 0}, "repeats=0: must be at least 1"),
    ],
)
def test_mistakes_are_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        plan(StepBenchSettings(**{"device": "cpu"} | settings))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_the_whole_verb(tmp_path: Path) -> None:
    """Memory of plain grows with the batch, that of the cache does not; the record says what it ran on."""
    words = ["batch=256", "chunk=32", "memory=64,256", "methods=cache,open_clip", "repeats=2", "device=cpu"]
    assert cli.main(["bench", "step", *words, f"out={tmp_path}"]) == 0
    record = json.loads((tmp_path / "step-cpu.json").read_text())
    assert record["machine"]["command"].startswith("clipscale bench step batch=256")
    rows = {row["method"]: row for row in record["rows"]}
    assert all(row["status"] == "ok" for row in rows.values())
    assert rows["plain"]["memory"]["256"] > 2 * rows["plain"]["memory"]["64"]
    assert rows["cache"]["memory"]["256"] < 0.5 * rows["plain"]["memory"]["256"]
    assert (tmp_path / "step-cpu.png").stat().st_size > 10_000


def test_main_is_the_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("clipscale.bench.step.main", lambda settings: seen.append(settings) or [])
    assert cli.main(["bench", "step", "batch=1k", "repeats=3"]) == 0
    assert seen == [StepBenchSettings(batch="1k", repeats=3)]
    assert callable(main)
