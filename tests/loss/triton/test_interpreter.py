"""The Triton kernels in the ordinary suite: these files in a process where Triton interprets its kernels on the CPU.

Triton decides that when it is imported, and other tests have imported it by then.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
FILES = [f"tests/loss/triton/test_{name}.py" for name in ("backend", "launches", "api", "gluon", "peers")]
PEERS = ("memeff", "siglip_kernel")


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the CUDA device")
@pytest.mark.parametrize("chosen", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_the_kernels_in_the_interpreter(chosen: str) -> None:
    pytest_options = ["-o", "addopts=", "-p", "no:cacheprovider", "-m", chosen]
    command = [sys.executable, "-m", "pytest", *pytest_options, *FILES]
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout[-500:]
    assert "skipped" not in done.stdout or not all(map(find_spec, PEERS)), done.stdout[-500:]
