"""Runs beside their predictions: the record, its table, and its picture, from figures made up."""

import json
from pathlib import Path
from typing import Any

import pytest

from clipscale.bench import largest_draw, runs, runs_draw, show
from clipscale.bench.runs import Attempt
from clipscale.bench.runs_table import legend, table

Row = dict[str, Any]

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
        patch.setattr(runs, "attempt", lambda *_: outcomes.pop(0))
        patch.setattr(runs, "row_of", lambda run, words: row(run.name) | {"settings": words})
        ask = ["--record", str(path), "--run"]
        assert [runs.main([*ask, f"{home}/{name}", f"model={name}"]) for name in "abab"] == [0, 1, 0, 0]
        assert runs.main([*ask, f"{home}/c", "model=c"]) == 0
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
    assert found["verdicts"][0].endswith("a (optim) 20.0%, b (optim) 20.0%, c (optim) 20.0%")


def test_the_table_has_a_line_for_each_phase_and_the_bar(record: Path) -> None:
    lines = record.with_suffix(".md").read_text().splitlines()
    assert (
        "| a | replay | 100.0 | 91.7 | 1.090 | yes |" in lines and "| c | optim | 100.0 | 83.3 | 1.200 | no |" in lines
    )
    assert lines[-1].startswith("- missed: memory predicted within 10% of measured")
    assert record.with_suffix(".png").stat().st_size > 10_000
    record.with_suffix(".md").unlink()
    show.main([str(record)])
    assert record.with_suffix(".md").read_text().splitlines() == lines, "from the record alone"


def test_what_was_evaluated_is_said(record: Path) -> None:
    found = json.loads(record.read_text())
    results = {"objects": {"top1": 0.525, "images": 800}, "pairs": {"text_to_image_r1": 0.25}}
    found["rows"][0]["evaluated"] = {"step": 560, "seconds": 1.0, "results": results}
    assert legend(found)[3:5] == ["a: objects at step 560: top1 52.5%", "a: pairs at step 560: text_to_image_r1 25.0%"]


def test_what_was_not_measured_is_not_drawn_as_if_it_were(record: Path, tmp_path: Path) -> None:
    found = json.loads(record.read_text())
    found["rows"] = [
        row("cpu", **dict.fromkeys(RATIOS.keys() - {"host"})) | {"status": "ok"},
        {"run": "late", "settings": [], "status": "no time", "reason": "not done within 60 s"},
    ]
    cells = [cells for group in table(found).groups for cells in group]
    assert cells[0] == ["cpu", "encode", "100.0", "-", "-", "-"] and cells[-1] == ["late", "no time"]
    bars, ratios = runs_draw.draw(found, tmp_path / "x.png").axes
    assert bars.get_title(loc="left") == "cpu, MiB"
    assert [text.get_text() for text in bars.texts] == ["not measured"] * 5 + ["0.80"]
    (marks,) = [line for line in ratios.get_lines() if line.get_label() == "cpu"]
    assert list(marks.get_ydata()) == [0.8]


def test_the_search_for_the_largest_batch_is_drawn_with_the_step_that_fitted(record: Path, tmp_path: Path) -> None:
    found = json.loads(record.read_text()) | {"predicted": {"batch": 640 * 1024}, "fits": row("a")}
    statuses = [("refused", 704), ("ok", 640), ("ok", 672)]
    found["rows"] = [{"batch": n * 1024, "status": status, "reason": "", "seconds": 60.0} for status, n in statuses]
    tries, memory = largest_draw.draw(found, tmp_path / "x.png").axes
    assert [text.get_text() for text in tries.get_legend().get_texts()] == ["refused", "ok", "foreseen"]
    assert memory.get_title(loc="left") == "memory at 8 pairs, MiB"
