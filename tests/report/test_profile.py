"""The timeline of a run's steps."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from clipscale.cli.main import main
from tests.conftest import TINY


def events(trace: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return found


def test_a_run_records_its_steps_by_phase_and_learns_the_same(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for run, steps in (("plain", 0), ("recorded", 2)):
        words = (*TINY, f"data.train={shards}", "samples=80", f"run={run}", f"log.profile={steps}", "eval.sets=[]")
        assert main(["train", *words]) == 0
    plain, recorded = (
        [json.loads(line)["loss"] for line in (tmp_path / "runs" / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("plain", "recorded")
    )
    assert plain == recorded and len(plain) == 5
    assert not (tmp_path / "runs/plain/profile").exists()
    (trace,) = (tmp_path / "runs/recorded/profile").iterdir()
    assert trace.name == "rank0-to-step4.json.gz"
    names = Counter(e["name"] for e in events(trace) if e.get("cat") == "user_annotation")
    assert names["step 3"] == names["step 4"] == 1 and "step 2" not in names and "step 5" not in names
    assert names["encode"] == names["loss"] == names["replay"] == names["optim"] == 2
    assert any("mm" in e["name"] for e in events(trace) if e.get("cat") == "cpu_op")
