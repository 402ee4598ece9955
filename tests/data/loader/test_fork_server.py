"""The server of data workers starts beside the imports of a run, not after them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clipscale.cli import train as verb
from clipscale.config.data import DataConfig
from clipscale.config.train import TrainConfig


@pytest.mark.parametrize("place", ["", "x" * 100], ids=["", "beyond a socket's path"])
def test_the_server_needs_nothing_heavy(tmp_path: Path, place: str) -> None:
    (tmp_path / place).mkdir(exist_ok=True)
    environment = os.environ | {"TMPDIR": str(tmp_path / place)} if place else os.environ
    code = "import sys; from multiprocessing import forkserver; from clipscale.data.loader.fork_server import warm_up; "
    code += "warm_up(); print(forkserver._forkserver._forkserver_pid is not None, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False"], done.stderr


@pytest.mark.parametrize("workers", [None, 0])
def test_it_starts_before_the_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, workers: int | None) -> None:
    order = []
    monkeypatch.setattr(verb, "warm_up", lambda: order.append("server"))
    monkeypatch.setattr("clipscale.tools.plan.of_run.before", lambda *_: order.append("plan"))
    monkeypatch.setattr("clipscale.launch.local.run", lambda *_, **__: order.append("run"))
    config = TrainConfig(
        run=str(tmp_path / "run"), batch=16, samples=64, device="cpu", data=DataConfig(workers=workers)
    )
    verb.main(config)
    assert order == (["server"] if workers is None else []) + ["plan", "run"]
