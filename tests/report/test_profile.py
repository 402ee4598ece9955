"""The timeline of a run's steps."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from clipscale.cli.main import main
from clipscale.report.metrics import read_metrics
from tests.conftest import TINY


def test_a_run_records_its_steps_by_phase_and_learns_the_same(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for run, steps in (("plain", 0), ("recorded", 2)):
        words = (*TINY, f"data.train={shards}", "samples=80", f"run={run}", f"log.profile={steps}", "eval.sets=[]")
        assert main(["train", *words]) == 0
    plain, recorded = (
        [r["loss"] for r in read_metrics(Path("runs", run, "metrics.jsonl"))] for run in ("plain", "recorded")
    )
    assert plain == recorded and len(plain) == 5
    assert not Path("runs/plain/profile").exists()
    (trace,) = Path("runs/recorded/profile").iterdir()
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
    assert names["encode"] == names["loss"] == names["replay"] == names["optim"] == 2
    assert any("mm" in event["name"] for event in events if event.get("cat") == "cpu_op")
