"""The Triton kernels in the ordinary suite: test_backend.py in a process where Triton interprets its kernels on the
CPU.

Triton decides that when it is imported, and other tests have imported it by then.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.device import NO_INTERPRETER

ROOT = Path(__file__).parents[3]


@pytest.mark.long
@pytest.mark.skipif(NO_INTERPRETER, reason="Triton's interpreter of these versions breaks with this numpy")
@pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the CUDA device")
@pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_the_kernels_in_the_interpreter(marked: str) -> None:
    options = ["-o", "addopts=", "-m", marked, "-p", "no:cacheprovider", "tests/loss/triton/test_backend.py"]
    command = [sys.executable, "-m", "pytest", *options]
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-500:]
