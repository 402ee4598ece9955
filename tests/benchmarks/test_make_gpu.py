"""Every command of `make gpu` and `make gpu-more` runs, on the CPU at the smallest sizes.

So none fails on a borrowed GPU for a reason that needs no GPU.
"""

import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = re.findall(r"[\w-]+", " ".join(re.findall(r"^(?:GPU|MORE) := (.*)$", (ROOT / "Makefile").read_text(), re.M)))
TARGETS.append("gpu-eight")
SMALLER = {
    "SMALLER_LOSS": "device=cpu dtype=fp32 n=32 d=32 repeats=1",
    "SMALLER_STEP": "device=cpu model=tiny batch=16 chunk=8 repeats=1 methods=plain@16,keep-50G,open_clip",
    "SMALLER_DATA": "repeats=1 batch=32 sizes=64 stream=64 image_size=32 pictures=4",
    "SMALLER_TRAIN": "device=cpu precision=fp32 model=small batch=8 side=32 steps=6 methods=clipscale,open_clip",
    "SMALLER_RUN": "device=cpu precision=fp32 model=tiny data=demo eval.sets=[] batch=32 samples=32 cache.chunk=8",
    "SMALLER_RANKS": "gpus=2 device=cpu model=tiny batch=64 local=64 steps=4",
    "SMALLER_CHANGES": "device=cpu precision=fp32 model=tiny batch=8 repeats=1",
    "WITHIN": "",
}
# A call on a borrowed machine lasts so long.
CALL_S = 600
MAX_FILES = 8


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", TARGETS)
def test_a_gpu_target_leaves_whole_records(target: str, tmp_path: Path) -> None:
    results = tmp_path / "results"
    values = SMALLER | {"RUN": sys.executable, "RESULTS": results, "RUNS": tmp_path / "runs", "CORES": 1, "JOBS": 1}
    make = ["make", target, "INSTALLED=", *(f"{name}={value}" for name, value in values.items())]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr[-3000:]  # make goes on after some commands
    files = [path for pattern in ("*", "*/*") for path in results.glob(pattern) if path.is_file()]
    assert 1 <= len(files) <= MAX_FILES  # folders two down do not come back
    for record in results.glob("*/*.json"):
        for row in json.loads(record.read_text()).get("rows", []):
            assert row["status"] in ("ok", "not supported", "not installed"), row
            assert row.get("passed", True), row


@pytest.mark.parametrize("target", TARGETS)
def test_a_targets_commands_are_ones_that_their_scripts_take_and_end_within_a_call(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = subprocess.run(["make", "-n", target, "INSTALLED="], cwd=ROOT, capture_output=True, text=True).stdout
    assert 0 < sum(map(int, re.findall(r"--kill-after=20 (\d+)", printed))) <= CALL_S
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    for name, words in re.findall(r"benchmarks/(\w+)\.py (.*)", printed):
        script = importlib.import_module(name)
        assert script.plan(importlib.import_module("measure").settings_of(script.DEFAULTS, shlex.split(words)))[1]


@pytest.mark.slow
def test_a_record_is_whole_after_every_measurement(tmp_path: Path) -> None:
    """A target whose time ends in its middle leaves the rows that it has measured."""
    words = ["device=cpu", "n=16,24", "d=16", "repeats=1", "methods=open_clip", f"out={tmp_path}"]
    program = subprocess.Popen([sys.executable, ROOT / "benchmarks/loss.py", *words], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    program.stdout.readline()  # of the first row
    program.kill()
    program.wait()
    record = json.loads((tmp_path / "loss-cpu.json").read_text())
    assert [row["n"] for row in record["rows"]][:1] == [16]
