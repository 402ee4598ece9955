"""The variables that the command line sets before torch is loaded."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("UNUSED", "passive 0 expandable_segments:True"),
        ("OMP_PROC_BIND", "None None expandable_segments:True"),
        ("PYTORCH_CUDA_ALLOC_CONF", "passive 0 None"),
    ],
)
def test_threads_sleep_and_segments_grow_unless_the_user_has_set_them(setting: str, values: str) -> None:
    """The command line sets this before torch is loaded, for itself and for the processes it starts."""
    code = "import os, sys, clipscale.cli.main as cli; cli.main(['--version']); "
    code += "print('torch' in sys.modules, *map(os.environ.get, sys.argv[1:]))"
    command = [sys.executable, "-c", code, "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "PYTORCH_ALLOC_CONF"]
    variables = {"PYTHONPATH": os.pathsep.join(sys.path), setting: ""}
    printed = subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[-1] == f"False {values}"
