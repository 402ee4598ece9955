"""Every command of `make gpu` and `make gpu-more` runs, on the CPU at the smallest sizes.

So none fails on a borrowed GPU for a reason that needs no GPU.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = re.findall(r"[\w-]+", " ".join(re.findall(r"^(?:GPU|MORE) := (.*)$", (ROOT / "Makefile").read_text(), re.M)))
SMALL = {
    r"timeout --signal=INT --kill-after=20 \d+ ": "",
    r"pytest -n \d+": "pytest -n 1",
    r"device=cuda": "device=cpu",
    r"model=vit-\w+": "model=tiny",
    r"\bchunk=\w+": "chunk=8",  # of the cache, too
    r",compiled[\w@-]*": "",  # compiling takes minutes on a CPU
    r"@\w+": "@16",
    r"\b(n|batch|samples|pictures)=[\w,]+": r"\1=32",
    r"\bd=[\w,]+": "d=32",
    r"repeats=\d+": "repeats=1",
    r"runs/gpu-\S+?(?=[ ;])": "OUT/run",
    r"out=\S+": "out=OUT",
    r"(data\.py .*)": r"\1 sizes=64 stream=64 image_size=32 pictures=4",
}
"""Patterns in the commands, and what stands there instead. Commands that are then the same run once."""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", TARGETS)
def test_no_command_of_a_gpu_target_fails_on_the_cpu(target: str, tmp_path: Path) -> None:
    make = ["make", "--dry-run", target, "INSTALLED=", f"RUN={sys.executable}", "RESULTS=OUT", "CORES=1"]
    lines = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for pattern, small in SMALL.items():
        lines = re.sub(pattern, small, lines)
    for line in dict.fromkeys(lines.replace("OUT", str(tmp_path)).splitlines()):
        done = subprocess.run(["bash", "-o", "pipefail", "-c", line], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    for record in tmp_path.glob("*.json"):
        for row in json.loads(record.read_text())["rows"]:
            assert row["status"] in ("ok", "not supported", "not installed"), row
