"""The search for the largest batch, and runs in processes of their own."""

import json
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from clipscale.bench import largest
from clipscale.bench.largest import Prediction, Try, search
from clipscale.bench.processes import Ended
from clipscale.bench.runs import Attempt
from clipscale.bench.runs_work import judged
from clipscale.data.demo import render_demo
from clipscale.data.loader.host_batch import Layout
from clipscale.data.loader.memory import fitted
from clipscale.errors import UserError

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
    limit: int, first: int, grain: int, tried: Sequence[Try] = (), seconds: float = 1e9
) -> tuple[list[Try], str]:
    """Tries of a machine on which `limit` samples fit, a second for a thousand."""
    made: list[Try] = []

    def attempted(batch: int, left: float) -> Attempt:
        assert batch % grain == 0 and batch not in [t.batch for t in [*tried, *made]], "nothing is tried twice"
        return Attempt("ok", "", batch / 1000) if batch <= limit else Attempt("out of memory", "no room", 1.0)

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


def test_what_is_no_want_of_memory_ends_the_search() -> None:
    ended = search([], 64, 16, 100.0, lambda *_: Attempt("failed", "a slip", 1.0), lambda _: None)
    assert ended == "failed: a slip"
    assert searched(10, 4096, 64)[1] == "not even 64 samples fit"


def test_the_programs_refusals_are_known_as_want_of_memory() -> None:
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
    made.room, made.starts, made.slopes = 1000, [100.0, 50.0], [9.0, 10.0]
    assert made.largest(1e9) == (100, "device memory") and made.largest(550) == (50, "host memory")
    assert made.of(10) == (190.0, 150.0)
