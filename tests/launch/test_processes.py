"""A rank ends with the process that has started it, and no process that only looks like it is taken for it."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from clipscale.checkpoint import found
from clipscale.config.presets import PACKAGE
from clipscale.launch import processes
from tests.conftest import TINY
from tests.launch.test_local import Start, gone, start, wait_until

__all__ = ["start"]
RANK = """
import time
from clipscale.launch import processes
processes.end_with_launcher()
print("ready", flush=True)
time.sleep(60)
"""
LAUNCHER = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {RANK!r}])
"""


@pytest.mark.parametrize("agent", ["ours", "torchrun", "srun"])
def test_a_rank_ends_with_the_process_that_started_it(environment: dict[str, str], agent: str) -> None:
    """slurmstepd ends its tasks by itself."""
    variables = {"ours": {}, "torchrun": {"TORCHELASTIC_RUN_ID": "a"}, "srun": {"RANK": "0"}}
    script = "import os; from clipscale.launch import processes\n" * (agent == "ours")
    script += "os.environ.update(processes.as_launcher())\n" * (agent == "ours") + LAUNCHER
    words = [sys.executable, "-c", script]
    launcher = subprocess.Popen(words, env=environment | variables[agent], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout and launcher.stdout.readline() == "ready\n"
    (rank,) = psutil.Process(launcher.pid).children()
    launcher.kill()
    launcher.wait()
    begun, deadline = processes.started(rank.pid), time.monotonic() + (0.2 if agent == "srun" else 10)
    while processes.state(rank.pid, begun) != processes.DEAD and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        assert (processes.state(rank.pid, begun) == processes.DEAD) == (agent != "srun")
    finally:
        with suppress(psutil.Error):
            rank.kill()


def test_a_rank_whose_launcher_is_gone_already_does_not_start(environment: dict[str, str]) -> None:
    """It died before the rank could ask for its end. Another process has its number now."""
    other = f"{os.getpid()} {processes.started(os.getpid()) - 1}"
    done = subprocess.run([sys.executable, "-c", RANK], env=environment | {processes.LAUNCHER: other}, timeout=30)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_do_not_outlive_torchruns_killed_agent_and_the_run_goes_on(
    start: Start, shards: str, tmp_path: Path
) -> None:
    """test_faults.py kills a launcher of ours."""
    words = [*(word for word in TINY if not word.startswith("samples")), f"data.train={shards}", "run=a"]
    words += ["checkpoint.every=1", "data.workers=1"]
    script = str(PACKAGE.parent / "launch/torchrun-single.sh")
    process = start(script, *words, "samples=1M", PROCS="2")
    wait_until(lambda: bool(found(tmp_path / "runs/a")), process)
    everyone = psutil.Process(process.pid).children(recursive=True)
    assert len(everyone) >= 4, "two ranks, each with a loader"
    process.kill()
    assert gone(everyone, 30), [left.cmdline() for left in everyone if left.is_running()]
    again = start(script, *words, "samples=96", PROCS="2")
    out, errors = again.communicate(timeout=240)
    assert again.returncode == 0, errors
    assert "done: runs/a (step" in out
