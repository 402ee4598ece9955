"""Runs beside their predictions, and the search for the largest batch: records, tables and pictures, from figures made up."""

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import clipscale
from clipscale.bench import fit, largest, present
from clipscale.bench.fit import Attempt, judged, run_notes
from clipscale.bench.harness import Ended
from clipscale.bench.largest import Prediction, search
from clipscale.data.demo import render_demo
from clipscale.data.loader.host_batch import Layout
from clipscale.data.loader.memory import fitted
from clipscale.errors import UserError

Row = dict[str, Any]

SMALL = [
    "device=cpu",
    "model=tiny",
    "precision=fp32",
    "eval.sets=[]",
    "cache.chunk=64",
    "data.workers=0",
    "log.progress=false",
]


def searched(
    limit: int, first: int, grain: int, tried: Sequence[Attempt] = (), seconds: float = 1e9
) -> tuple[list[Attempt], str]:
    """Tries of a machine on which `limit` samples fit, a second for a thousand."""
    made: list[Attempt] = []

    def attempted(batch: int, left: float) -> Attempt:
        assert batch % grain == 0 and batch not in [t.batch for t in [*tried, *made]], "nothing is tried twice"
        return Attempt("ok", "", batch / 1000) if batch <= limit else Attempt("out of memory", "no memory", 1.0)

    ended = search(tried, first, grain, seconds, attempted, made.append)
    return made, ended


@pytest.mark.parametrize("first", [1, 1000, 90_000, 100_000, 101_000, 130_000, 3_000_000])
@pytest.mark.parametrize("grain", [16, 4096])
def test_the_largest_is_found_from_any_start(first: int, grain: int) -> None:
    made, ended = searched(100_000, first, grain)
    good = max(t.batch for t in made if t.status == "ok")
    bad = min(t.batch for t in made if t.too_large)
    assert ended == "found" and good <= 100_000 < bad, (good, bad)
    assert bad - good <= max(grain, largest.CLOSE * bad), (good, bad)


def test_a_good_prediction_costs_few_whole_steps() -> None:
    made, _ = searched(100_000, 96_000, 1000)
    assert sum(t.status == "ok" for t in made) <= 3 and len(made) <= 6, made


def test_time_ends_the_search_before_a_try_that_it_does_not_suffice_for() -> None:
    made, ended = searched(100_000, 50_000, 1000, seconds=70.0)
    assert [t.batch for t in made] == [50_000] and ended.startswith("time: 62000 samples would take about 74 s"), ended


def test_a_search_goes_on_from_its_record() -> None:
    made, _ = searched(100_000, 50_000, 1000)
    again, ended = searched(100_000, 50_000, 1000, tried=made)
    assert again == [] and ended == "found"
    fewer, _ = searched(100_000, 50_000, 1000, tried=made[:2])
    assert fewer == made[2:]


def test_a_failure_for_another_reason_ends_the_search() -> None:
    ended = search([], 64, 16, 100.0, lambda *_: Attempt("failed", "a slip", 1.0), lambda _: None)
    assert ended == "failed: a slip"
    assert searched(10, 4096, 64)[1] == "not even 64 samples fit"


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
    assert Ended(None, -signal.SIGKILL, "").cause[0] == "out of memory"
    assert Ended(None, 1, "one\nlast\n").cause == ("failed", "the process ended with status 1: last")


@pytest.mark.slow
def test_a_whole_search_on_a_cpu_with_bounded_memory(tmp_path: Path) -> None:
    """Three processes: a batch that cannot be mapped, one that is refused, and one whose step is run and kept beside its prediction."""
    render_demo(tmp_path / "demo", train_samples=128)
    words = [*SMALL, f"data.train={tmp_path}/demo/train/{{00000..00015}}.tar"]
    record, run = tmp_path / "largest.json", tmp_path / "run"
    command = ["--record", str(record), "--run", str(run), "--grain", "128"]
    assert largest.main([*command, "--first", "1G", "--seconds", "40", "--memory", "2G", *words]) == 1
    found = json.loads(record.read_text())
    assert {one["status"] for one in found["rows"]} <= {"refused", "out of memory", "no time"}, found["rows"]
    record.unlink()
    largest.main([*command, "--first", "128", "--seconds", "45", "--memory", "4G", *words])
    found = json.loads(record.read_text())
    assert found["rows"][0]["status"] == "ok" and found["largest"] >= 128, found
    assert found["fits"]["steps"][-1]["batch"] == found["largest"] and found["fits"]["predicted"]["compared"]["host"]
    assert found["fits"]["code"] == found["machine"]["code"]["clipscale"] == found["rows"][0]["code"]
    assert found["machine"]["code"]["clipscale"] and found["machine"]["command"].startswith(
        "python -m clipscale.bench.largest"
    )


def test_prediction_is_a_line_and_says_what_bounds() -> None:
    made = object.__new__(Prediction)
    made.device_bytes, made.starts, made.slopes = 1000, [100.0, 50.0], [9.0, 10.0]
    assert made.largest(1e9) == (100, "device memory") and made.largest(550) == (50, "host memory")
    assert made.of(10) == (190.0, 150.0)


# ---- runs beside their predictions ----

MIB = 2**20
RATIOS = {"encode": 1.0, "loss": 0.95, "replay": 1.09, "optim": 1.2, "peak": 1.01, "host": 0.8}


def row(run: str, **ratios: float | None) -> Row:
    """A run whose phases were predicted at 100 MiB, and measured as the ratios say; None: not measured."""
    compared = {}
    for name, ratio in (RATIOS | ratios).items():
        measured = None if ratio is None else 100 * MIB / ratio
        compared[name] = {"predicted_bytes": 100 * MIB, "measured_bytes": measured, "ratio": ratio}
    return {"run": run, "settings": ["batch=8"], "steps": [{"batch": 8}], "predicted": {"compared": compared}}


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of three runs, one after the other, as `make gpu-memory` does it; the second fails the first time."""
    home = tmp_path_factory.mktemp("records")
    path = home / "more" / "runs.json"
    outcomes = [Attempt("ok", "", 1), Attempt("failed", "a slip", 2), Attempt("ok", "", 3), Attempt("ok", "", 4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "attempt", lambda *_: outcomes.pop(0))
        patch.setattr(fit, "row_of", lambda run, words: row(run.name) | {"settings": words})
        ask = ["--record", str(path), "--run"]
        assert [fit.main([*ask, f"{home}/{name}", f"model={name}"]) for name in "abab"] == [0, 1, 0, 0]
        assert fit.main([*ask, f"{home}/c", "model=c"]) == 0
    assert not outcomes, "what is recorded already is not run again"
    return path


def test_every_run_is_a_row_with_its_command_and_its_commit(record: Path) -> None:
    found = json.loads(record.read_text())
    assert [(r["run"], r["status"], r["seconds"]) for r in found["rows"]] == [
        ("a", "ok", 1),
        ("b", "ok", 3),
        ("c", "ok", 4),
    ]
    assert all(r["command"].endswith(f"/{r['run']} model={r['run']}") for r in found["rows"]), found["rows"]
    assert all(r["commit"] == found["machine"]["commit"] and r["code"] for r in found["rows"])
    assert found["targets"][0].endswith("a (optim) 20.0%, b (optim) 20.0%, c (optim) 20.0%")


def test_the_table_has_a_line_for_each_phase_and_the_bar(record: Path) -> None:
    lines = record.with_suffix(".md").read_text().splitlines()
    assert (
        "| a | replay | 100.0 | 91.7 | 1.090 | yes |" in lines and "| c | optim | 100.0 | 83.3 | 1.200 | no |" in lines
    )
    assert lines[-1].startswith("- missed: memory predicted within 10% of measured")
    assert record.with_suffix(".png").stat().st_size > 10_000
    record.with_suffix(".md").unlink()
    present.main([str(record)])
    assert record.with_suffix(".md").read_text().splitlines() == lines, "from the record alone"


def test_what_was_evaluated_is_a_note(record: Path) -> None:
    found = json.loads(record.read_text())
    results = {"objects": {"top1": 0.525, "images": 800}, "pairs": {"text_to_image_r1": 0.25}}
    found["rows"][0]["evaluated"] = {"step": 560, "seconds": 1.0, "results": results}
    assert run_notes(found)[3:5] == [
        "a: objects at step 560: top1 52.5%",
        "a: pairs at step 560: text_to_image_r1 25.0%",
    ]


def test_what_was_not_measured_is_not_drawn_as_if_it_were(record: Path, tmp_path: Path) -> None:
    found = json.loads(record.read_text())
    found["rows"] = [
        row("cpu", **dict.fromkeys(RATIOS.keys() - {"host"})) | {"status": "ok"},
        {"run": "late", "settings": [], "status": "no time", "reason": "not done within 60 s"},
    ]
    path = tmp_path / "x.json"
    present.show(found, path)
    lines = path.with_suffix(".md").read_text().splitlines()
    assert "| cpu | encode | 100.0 | - | - | - |" in lines and "| late | no time |  |  |  |  |" in lines
    bars, ratios = present.draw(found, tmp_path / "x.png").axes
    assert bars.get_title(loc="left") == "cpu, MiB"
    assert [text.get_text() for text in bars.texts] == ["not measured"] * 5 + ["0.80"]
    assert [bar.get_width() for bar in ratios.patches] == [0.8]


def test_the_search_for_the_largest_batch_is_drawn_with_the_step_that_fitted(record: Path, tmp_path: Path) -> None:
    found = json.loads(record.read_text()) | {
        "benchmark": "largest",
        "predicted": {"batch": 640 * 1024},
        "fits": row("a"),
    }
    statuses = [("refused", 704), ("ok", 640), ("ok", 672)]
    found["rows"] = [{"batch": n * 1024, "status": status, "reason": "", "seconds": 60.0} for status, n in statuses]
    tries, memory = present.draw(found, tmp_path / "x.png").axes
    assert [text.get_text() for text in tries.get_legend().get_texts()] == ["refused", "ok", "predicted"]
    assert memory.get_title(loc="left") == "memory at 8 pairs, MiB"
