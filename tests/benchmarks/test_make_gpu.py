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
SMALLER = {
    "SMALLER_LOSS": "device=cpu n=32 d=32 repeats=1",
    "SMALLER_STEP": "device=cpu model=tiny batch=16 chunk=8 repeats=1 methods=plain@16,cache,keep-80G,frozen,open_clip",
    "SMALLER_DATA": "repeats=1 batch=32 sizes=64 stream=64 image_size=32 pictures=4",
    "SMALLER_RUN": "device=cpu model=tiny batch=32 samples=32 cache.chunk=8",
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", TARGETS)
def test_no_command_of_a_gpu_target_fails_on_the_cpu(target: str, tmp_path: Path) -> None:
    values = SMALLER | {"RUN": sys.executable, "RESULTS": tmp_path, "RUNS": tmp_path, "CORES": 1, "JOBS": 1}
    make = ["make", target, "INSTALLED=", *(f"{name}={value}" for name, value in values.items())]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True)
    printed = f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
    assert done.returncode == 0 and "Error" not in done.stderr, printed  # make goes on after some commands
    for record in tmp_path.rglob("*.json"):
        for row in json.loads(record.read_text()).get("rows", []):
            assert row["status"] in ("ok", "not supported", "not installed"), row
