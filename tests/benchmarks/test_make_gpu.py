"""Every command of `make gpu` and `make gpu-more` runs, on the CPU at the smallest sizes.

So none fails on a borrowed GPU for a reason that needs no GPU.
"""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = re.findall(r"[\w-]+", " ".join(re.findall(r"^(?:GPU|MORE) := (.*)$", (ROOT / "Makefile").read_text(), re.M)))
TARGETS.append("gpu-eight")
SMALLER = {
    "SMALLER_LOSS": "device=cpu dtype=fp32 n=32 d=32 repeats=1",
    "SMALLER_STEP": "device=cpu model=tiny batch=16 chunk=8 repeats=1 methods=plain@16,cache,keep-50G,frozen,open_clip",
    "SMALLER_DATA": "repeats=1 batch=32 sizes=64 stream=64 image_size=32 pictures=4",
    "SMALLER_TRAIN": "device=cpu precision=fp32 model=small batch=8 side=32 steps=6 methods=clipscale,open_clip",
    "SMALLER_RUN": "device=cpu precision=fp32 model=tiny data=demo eval.sets=[] batch=32 samples=32 cache.chunk=8",
    "SMALLER_RANKS": "gpus=2 device=cpu model=tiny local=64 steps=4",
}
CALL_S = 600
"""A call on a borrowed machine lasts so long."""
MOST_FILES = 6


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", TARGETS)
def test_a_gpu_target_leaves_whole_records_in_the_time_of_a_call(target: str, tmp_path: Path) -> None:
    results = tmp_path / "results"
    values = SMALLER | {"RUN": sys.executable, "RESULTS": results, "RUNS": tmp_path / "runs", "CORES": 1, "JOBS": 1}
    make = ["make", target, "INSTALLED=", *(f"{name}={value}" for name, value in values.items())]
    begun = time.monotonic()
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True)
    printed = f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
    assert done.returncode == 0 and "Error" not in done.stderr, printed  # make goes on after some commands
    assert time.monotonic() - begun < CALL_S
    files = [path for path in results.rglob("*") if path.is_file()]
    assert 1 <= len(files) <= MOST_FILES
    assert all(len(path.relative_to(results).parts) <= 2 for path in files), "folders two down do not come back"
    for record in results.rglob("*.json"):
        for row in json.loads(record.read_text()).get("rows", []):
            assert row["status"] in ("ok", "not supported", "not installed"), row
            assert row.get("distance", 0) < 1e-5, row


@pytest.mark.slow
def test_a_record_is_whole_after_every_measurement(tmp_path: Path) -> None:
    """Also when the time ends in the middle of a target."""
    words = ["device=cpu", "n=16,24", "d=16", "repeats=1", "methods=open_clip", f"out={tmp_path}"]
    program = subprocess.Popen([sys.executable, ROOT / "benchmarks/loss.py", *words], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    program.stdout.readline()  # of the first row
    program.kill()
    program.wait()
    record = json.loads((tmp_path / "loss-cpu.json").read_text())
    assert [row["n"] for row in record["rows"]][:1] == [16]
