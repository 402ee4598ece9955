"""What `make demo` trains: it is as fast on a processor without bfloat16."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clipscale.tools.data.demo_folder import train_shards
from tests.support.runs import records


@pytest.mark.slow
def test_steps_take_as_long_without_bfloat16(demo: Path, tmp_path: Path) -> None:
    """A variable of oneDNN hides later instructions than AVX2 from torch's products in bfloat16."""
    shortest = {}
    for name, variables in {"as it is": {}, "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2"}}.items():
        words = ["experiment=demo", f"data.train={train_shards(demo)}", "samples=1k", "eval.sets=[]"]
        command = [sys.executable, "-m", "clipscale", "train", *words, f"run={tmp_path / name}"]
        subprocess.run(command, env=os.environ | variables, check=True, capture_output=True)
        steps = records(tmp_path / name)[2:]
        shortest[name] = min(record["step_s"] for record in steps)
        share = min(record["optim_s"] / record["step_s"] for record in steps)
        assert share < 0.4, f"{name}: the optimizer takes {share:.0%} of a step"
    assert shortest["AVX2"] < 1.3 * shortest["as it is"], shortest
