"""The Makefile's commands for a GPU are ones that the program understands: a machine with one is not spent on a spelling mistake."""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from clipscale import cli
from clipscale.bench import loss, step

ROOT = Path(__file__).parents[2]


def commands(target: str) -> list[list[str]]:
    """What `make TARGET` would run, without the installation: the words after `-m`."""
    asked = ["make", "--dry-run", "--no-print-directory", target, "INSTALLED=", "RUN=python3"]
    said = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = (shlex.split(line) for line in said.replace("\\\n", " ").splitlines())
    return [words[words.index("-m") + 1 :] for words in found if "-m" in words]


@pytest.mark.parametrize(("target", "least"), [("gpu-loss", 5), ("gpu-step", 3), ("gpu-memory", 1)])
def test_benchmarks_on_a_gpu_are_asked_for_rightly(target: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    plans: dict[str, Any] = {"loss": loss.plan, "step": step.plan}
    for name, module in (("loss", loss), ("step", step)):
        monkeypatch.setattr(
            module, "main", lambda settings, name=name: seen.append((settings, plans[name](settings))) or []
        )
    seen: list[tuple[Any, Any]] = []
    for words in commands(target):
        if words[1:2] == ["bench"]:
            assert words[0] == "clipscale" and cli.main(words[1:]) == 0, shlex.join(words)
    assert len(seen) >= least
    assert all(settings.device == "cuda" and settings.resume for settings, _ in seen)
    assert sum(settings.seconds for settings, _ in seen) <= 540, "longer than one sitting at the machine"


def test_every_file_of_the_tests_for_a_gpu_exists() -> None:
    (words,) = commands("gpu-right")
    files = [ROOT / word for word in words if word.startswith("tests/")]
    assert files and all(file.is_file() for file in files), files
    marked = [
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if "mark.gpu" in path.read_text() or "= on_device" in path.read_text()
    ]
    assert set(marked) - {Path(__file__)} <= set(files), "a file with tests for a GPU that make gpu-right leaves out"


def test_python_is_the_one_that_is_named() -> None:
    assert sys.executable
    said = subprocess.run(
        ["make", "-n", "gpu-data", "INSTALLED=", "RUN=python3.99"], cwd=ROOT, capture_output=True, text=True
    )
    assert "python3.99 -m clipscale bench data" in said.stdout and "venv" not in said.stdout, said.stdout
