"""Records that are resumed, those of something else that are moved aside, and the ones in the documents."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clipscale.bench import present
from clipscale.bench.harness import Job
from clipscale.bench.record import earlier, final, write
from clipscale.bench.step import StepPart

RECORDS = sorted((Path(__file__).parents[2] / "docs" / "benchmarks").rglob("*.json"))
MACHINE = {
    "cpu": "a processor",
    "gpus": [],
    "versions": {"torch": "2"},
    "driver": None,
    "code": {"clipscale": "a"},
    "commit": "1",
}
ROWS = [
    {"case": "plain@8", "status": "ok"},
    {"case": "cache@8", "status": "out of memory"},
    {"case": "x", "status": "not run"},
]


def record(**changes: Any) -> dict[str, Any]:
    facts = MACHINE | {"command": "clipscale bench step"}
    return {
        "benchmark": "step",
        "machine": facts,
        "settings": {"model": "tiny", "chunk": "4", "repeats": 5},
        "rows": [],
    } | changes


def test_an_interrupted_run_is_resumed_with_all_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    assert earlier(path, record()) == {}
    write(path, record(rows=[dict(row) for row in ROWS]))
    facts = MACHINE | {"time": "later", "commit": "2", "command": "clipscale bench step repeats=6"}
    again = record(machine=facts, settings=record()["settings"] | {"repeats": 6})
    kept = earlier(path, again)["rows"]
    assert [{"case": row["case"], "status": row["status"]} for row in kept] == ROWS
    assert [final(row) for row in kept] == [True, True, False], "what had no time is tried again"
    done = {(row["case"],) for row in kept}
    part = StepPart(Job({}, "cpu"), ["plain@8", "cache@8"], [])
    assert part.without(done).cases == []
    again_part = replace(part, cases=[*part.cases, "cache@16"])
    assert again_part.without(done).cases == ["plain@8", "cache@16"], "with its baseline"
    write(path, again | {"rows": [*kept, {"case": "cache@16", "status": "ok"}]})
    rows = json.loads(path.read_text())["rows"]
    commands = ["clipscale bench step"] * 3 + ["clipscale bench step repeats=6"]
    assert [row["command"] for row in rows] == commands, "each row its own"
    assert [row["commit"] for row in rows] == ["1", "1", "1", "2"] and {row["code"] for row in rows} == {"a"}


@pytest.mark.parametrize(
    "other", [{"settings": {"chunk": "8"}}, {"machine": MACHINE | {"code": {"clipscale": "b"}, "command": "x"}}]
)
def test_a_record_of_something_else_is_moved_aside(tmp_path: Path, other: dict[str, Any]) -> None:
    path = tmp_path / "x.json"
    for number in range(3):
        write(path, record(rows=[{"case": str(number), "status": "ok"}]))
        path.with_suffix(".md").write_text(str(number))
        assert earlier(path, record(**other)) == {}
        assert not path.exists()
    tables, kept = (sorted(tmp_path.glob(f"*.{suffix}")) for suffix in ("md", "json"))
    assert [p.stem for p in tables] == [p.stem for p in kept] and len({p.read_text() for p in tables}) == 3
    assert sorted(json.loads(file.read_text())["rows"][0]["case"] for file in kept) == ["0", "1", "2"]
    assert all(file.name.startswith("x-20") and file.suffix == ".json" for file in kept), kept


@pytest.mark.parametrize("path", RECORDS, ids=lambda p: p.name)
def test_what_the_documents_quote_says_how_it_was_measured(path: Path) -> None:
    found = json.loads(path.read_text())
    assert found["machine"]["cpu"] and found["machine"]["versions"]["torch"]
    assert found["rows"] and all(row["command"] and row["commit"] for row in found["rows"])
    assert path.with_suffix(".md").read_text().count("|") > 20, "no table beside it"


@pytest.mark.parametrize(
    "path", [path for path in RECORDS if "benchmark" in json.loads(path.read_text())], ids=lambda p: p.name
)
def test_the_documents_tables_are_those_of_their_records(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / path.name
    copy.write_text(path.read_text())
    present.main([str(copy)])
    assert copy.with_suffix(".md").read_text() == path.with_suffix(".md").read_text()
    assert copy.with_suffix(".png").stat().st_size > 10_000
