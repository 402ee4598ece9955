"""Runs beside their predictions, and the search for the largest batch: records, tables and pictures, from figures made up."""

import json
from pathlib import Path
from typing import Any

import pytest

import clipscale
from clipscale.bench import fit, present
from clipscale.bench.fit import judged, predicted, search
from clipscale.data.demo import render_demo
from clipscale.data.loader.host_batch import Layout
from clipscale.data.loader.memory import fitted
from clipscale.errors import UserError

Row = dict[str, Any]

SMALL = ["device=cpu", "model=tiny", "precision=fp32", "eval.sets=[]", "cache.chunk=64", "data.workers=0"]
MIB = 2**20
RATIOS = {"encode": 1.0, "loss": 0.95, "replay": 1.09, "optim": 1.2, "peak": 1.01, "host": 0.8}


# ---- the largest batch ----


def searched(limit: int, first: int, grain: int, rows: list[Row], seconds: float = 1e9) -> str:
    """Search on a machine on which `limit` samples fit, a second for a thousand."""

    def attempt(batch: int, left: float) -> Row:
        assert batch % grain == 0 and batch not in [row["batch"] for row in rows], "nothing is tried twice"
        return {"status": "ok" if batch <= limit else "out of memory", "reason": "", "seconds": batch / 1000}

    return search(rows, first, grain, seconds, attempt)


@pytest.mark.parametrize("first", [1, 1000, 90_000, 100_000, 101_000, 130_000, 3_000_000])
@pytest.mark.parametrize("grain", [16, 4096])
def test_the_largest_is_found_from_any_start(first: int, grain: int) -> None:
    rows: list[Row] = []
    assert searched(100_000, first, grain, rows) == "found"
    good = max(row["batch"] for row in rows if row["status"] == "ok")
    bad = min(row["batch"] for row in rows if row["status"] != "ok")
    assert good <= 100_000 < bad and bad - good <= max(grain, fit.CLOSE * bad), (good, bad)


def test_a_good_prediction_costs_few_whole_steps() -> None:
    rows: list[Row] = []
    searched(100_000, 96_000, 1000, rows)
    assert sum(row["status"] == "ok" for row in rows) <= 3 and len(rows) <= 6, rows


def test_a_try_that_time_does_not_suffice_for_ends_the_search() -> None:
    late = {"status": "no time", "reason": "not done within 9 s", "seconds": 9.0}
    assert search([], 64, 16, 100.0, lambda *_: dict(late)) == "no time: not done within 9 s"


def test_a_search_goes_on_from_its_record() -> None:
    rows: list[Row] = []
    searched(100_000, 50_000, 1000, rows)
    fewer = rows[:2]
    assert searched(100_000, 50_000, 1000, fewer) == "found" and fewer == rows


def test_a_failure_for_another_reason_ends_the_search() -> None:
    failed = {"status": "failed", "reason": "a slip", "seconds": 1.0}
    assert search([], 64, 16, 100.0, lambda *_: dict(failed)) == "failed: a slip"
    assert searched(10, 4096, 64, []) == "not even 64 samples fit"


def test_the_search_begins_with_what_plan_predicts_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the host's memory bounds the batch: with twice the memory, twice the batch."""
    words = [*SMALL[:4], "cache.chunk=64", "data.train=x.tar"]
    found = []
    for size in (8, 16):
        monkeypatch.setattr(fit, "free_memory", lambda size=size: size << 30)
        found.append(predicted(words, 128))
    small, large = (one["batch"] for one in found)
    assert small >= 2**15 and large in (2 * small, 4 * small), found
    assert [one["bound"] for one in found] == ["host memory"] * 2 and found[0]["host_free_bytes"] == 8 << 30


def test_the_programs_refusals_are_known_as_lack_of_memory() -> None:
    sources = "".join(
        path.read_text() for path in Path(clipscale.__file__).parent.rglob("*.py") if path.parent.name != "bench"
    )
    assert [sign for sign in fit.REFUSALS if sign.removesuffix("SIGKILL") not in sources] == [], "no message says so"
    layout = Layout(slots=1, samples=2**30, row=(3, 224, 224), context_length=77)
    with pytest.raises(UserError) as refusal:
        fitted(layout, free=2**30)
    assert judged(refusal.value)[0] == "refused", refusal.value
    assert judged(UserError("model.name=x: unknown"))[0] == "failed"
    assert judged(OSError(12, "Cannot allocate memory"))[0] == "out of memory"
    assert judged(ValueError("x")) == ("failed", "ValueError: x")


@pytest.mark.slow
def test_a_whole_search_on_a_cpu(tmp_path: Path) -> None:
    """A step is run in a process of its own and recorded beside its prediction; time ends the search."""
    render_demo(tmp_path / "demo", train_samples=128)
    words = [*SMALL, f"data.train={tmp_path}/demo/train/{{00000..00015}}.tar"]
    path = tmp_path / "largest.json"
    command = ["--record", str(path), "--run", str(tmp_path / "run"), "--search", "128", "--first", "128"]
    assert fit.main([*command, "--seconds", "60", *words]) == 0
    found = json.loads(path.read_text())
    first = found["rows"][0]
    assert first["status"] == "ok" and found["largest"] >= 128, found
    assert first["steps"][-1]["batch"] == 128 and first["predicted"]["compared"]["host"]["measured_bytes"]
    assert first["command"].startswith("clipscale train") and first["code"] == found["machine"]["code"]["clipscale"]


# ---- runs beside their predictions ----


def compared(ratios: dict[str, float | None]) -> Row:
    """Phases predicted at 100 MiB, and measured as the ratios say; None: not measured."""
    found = {}
    for name, ratio in ratios.items():
        measured = None if ratio is None else 100 * MIB / ratio
        found[name] = {"predicted_bytes": 100 * MIB, "measured_bytes": measured, "ratio": ratio}
    return {"steps": [{"batch": 8}], "predicted": {"compared": found}}


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of three runs, one after the other, as `make gpu-memory` does it; the second fails the first time."""
    home = tmp_path_factory.mktemp("records")
    path = home / "more" / "runs.json"
    outcomes = [("ok", ""), ("failed", "a slip"), ("ok", ""), ("ok", "")]

    def trained(run: Path, words: list[str], seconds: float) -> Row:
        status, reason = outcomes.pop(0)
        row = {"run": run.name, "settings": words, "status": status, "reason": reason, "seconds": 1.0}
        return row | {"command": f"clipscale train run={run} {words[0]}"} | compared(dict(RATIOS))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "trained", trained)
        ask = ["--record", str(path), "--run"]
        assert [fit.main([*ask, f"{home}/{name}", f"model={name}"]) for name in "abab"] == [0, 1, 0, 0]
        assert fit.main([*ask, f"{home}/c", "model=c"]) == 0
    assert not outcomes, "what is recorded already is not run again"
    return path


def test_every_run_is_a_row_with_its_command_and_its_commit(record: Path) -> None:
    found = json.loads(record.read_text())
    assert [(r["run"], r["status"]) for r in found["rows"]] == [("a", "ok"), ("b", "ok"), ("c", "ok")]
    assert all(r["command"].endswith(f"/{r['run']} model={r['run']}") for r in found["rows"]), found["rows"]
    assert all(r["commit"] == found["machine"]["commit"] and r["code"] for r in found["rows"])
    assert found["targets"][0].endswith("a (optim) 20.0%, b (optim) 20.0%, c (optim) 20.0%")


def test_the_table_has_a_line_for_each_phase_and_the_target(record: Path) -> None:
    lines = record.with_suffix(".md").read_text().splitlines()
    assert "| a | replay | 100.0 | 91.7 | 1.090 |" in lines and "| c | optim | 100.0 | 83.3 | 1.200 |" in lines
    assert lines[-1].startswith("- missed: memory predicted within 10% of measured")
    record.with_suffix(".md").unlink()
    present.main([str(record)])
    assert record.with_suffix(".md").read_text().splitlines() == lines, "from the record alone"


def test_what_was_evaluated_is_a_note(record: Path) -> None:
    found = json.loads(record.read_text())
    results = {"objects": {"top1": 0.525, "images": 800}, "pairs": {"text_to_image_r1": 0.25}}
    found["rows"][0]["evaluated"] = {"step": 1600, "results": results}
    lines = fit.notes(found)
    assert "a: objects at step 1,600: top1 52.5%" in lines and "a: pairs at step 1,600: text_to_image_r1 25.0%" in lines


def test_what_was_not_measured_is_not_drawn_as_if_it_were(record: Path, tmp_path: Path) -> None:
    found = json.loads(record.read_text())
    cpu = {"run": "cpu", "settings": [], "status": "ok"} | compared(dict.fromkeys(RATIOS) | {"host": 0.8})
    late = {"run": "late", "settings": [], "status": "no time", "reason": "not done within 60 s"}
    path = tmp_path / "x.json"
    present.show(found | {"rows": [cpu, late]}, path)
    lines = path.with_suffix(".md").read_text().splitlines()
    assert "| cpu | encode | 100.0 | - | - |" in lines and "| late | no time |  |  |  |" in lines
    assert "- late: no time: not done within 60 s" in lines
    (bars,) = present.draw(found | {"rows": [cpu, late]}, tmp_path / "x.png").axes
    assert [text.get_text() for text in bars.texts] == ["100"] * 6 + [""] * 5 + ["125"]
