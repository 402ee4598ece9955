"""The Makefile's commands for a GPU are ones that the program understands: a machine with one is not spent on a spelling mistake."""

import shlex
import subprocess
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch

from clipscale.bench import data, loss, step
from clipscale.cli import compose
from clipscale.cli import main as cli
from clipscale.config.parse import typed
from clipscale.config.train import TrainConfig
from clipscale.config.train import check as check_settings
from clipscale.data.tools import demo

ROOT = Path(__file__).parents[2]
BENCHES: dict[str, Any] = {"loss": loss, "step": step, "data": data}
LOSS = ["gpu-loss", "gpu-loss-widths", "gpu-loss-types", "gpu-tune"]
STEP = ["gpu-step", "gpu-step-b32", "gpu-step-b16", "gpu-step-b16-large", "gpu-step-l14"]
TARGETS = ["gpu-right", *LOSS, *STEP, "gpu-memory", "gpu-largest", "gpu-largest-encoded", "gpu-data"]
LIMIT = 600
"""Seconds that a target may take."""


def commands(target: str) -> list[tuple[float, list[str]]]:
    """What `make TARGET` would run, without the installation: most seconds, and the words after `-m`."""
    command = ["make", "--dry-run", "--no-print-directory", target, "INSTALLED=", "RUN=python3"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = printed.replace("\\\n", " ").splitlines()
    found = (shlex.split(command) for line in lines for command in line.split("&&"))
    whole = [(bound(words), words[words.index("-m") + 1 :]) for words in found if "-m" in words]
    return [
        (seconds, list(takewhile(lambda word: word not in ("|", ">", ">>", "2>&1"), words))) for seconds, words in whole
    ]


def bound(words: list[str]) -> float:
    """Seconds that `timeout` gives a command; 0 without it."""
    after = words[words.index("timeout") + 1 :] if "timeout" in words else ["0"]
    return float(next(word for word in after if not word.startswith("-")))


def composed(words: list[str]) -> Any:
    """Settings of `clipscale train`, checked as a run checks them."""
    values = compose.once("train", words)
    assert values is not None
    return check_settings(typed(TrainConfig, values))


def check(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Is a command understood. Nothing of it is run."""
    module, *rest = words
    match module:
        case "clipscale" if rest[0] == "bench":
            seen: list[Any] = []
            bench = BENCHES[rest[1]]
            monkeypatch.setattr(bench, "main", lambda settings: seen.append(settings) or [])
            assert cli.main(rest) == 0, shlex.join(words)
            (settings,) = seen
            if bench is not data:
                bench.plan(settings)
                assert settings.device == "cuda" and settings.resume
        case "clipscale" if rest[0] == "train":
            config = composed(rest[1:])
            assert config.device == "cuda" and config.data.workers >= 1
        case "clipscale" if rest[0] == "plan":
            assert rest[1].startswith("run=runs/gpu-")
        case "clipscale":
            monkeypatch.setattr(demo, "render_demo", lambda *args, **given: False)
            assert cli.main(rest) == 0, shlex.join(words)
        case "clipscale.bench.record" | "pytest":
            assert rest
        case _:
            raise AssertionError(f"nobody knows {shlex.join(words)}")


@pytest.mark.parametrize("target", TARGETS)
def test_every_command_for_a_gpu_is_understood(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = commands(target)
    assert found
    for _, words in found:
        check(words, monkeypatch)
    assert sum(seconds for seconds, _ in found) <= LIMIT, "longer than one sitting at the machine"


@pytest.mark.parametrize(
    "line",
    [
        "clipscale bench data wrokers=2",
        "clipscale bench step device=cuda resume=true methods=cahce",
        "clipscale train run=x cache.kept=40G",
    ],
)
def test_a_slip_would_be_seen(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises((AssertionError, cli.UserError)):
        check(shlex.split(line), monkeypatch)


def test_every_choice_of_the_kernels_that_is_tried_is_in_the_documents() -> None:
    named = next(word for _, words in commands("gpu-loss") for word in words if word.startswith("methods=triton,"))
    text = (ROOT / "docs" / "benchmarks" / "README.md").read_text()
    assert [name for name in named.removeprefix("methods=").split(",") if f"`{name}`" not in text] == []


def test_every_target_for_a_gpu_is_known_here() -> None:
    lines = (ROOT / "Makefile").read_text().splitlines()
    listed = [word for line in lines if line.startswith(("GPU :=", "MORE :=")) for word in line.split()[2:]]
    assert sorted(listed) == sorted(TARGETS)


def test_every_file_of_the_tests_for_a_gpu_exists() -> None:
    words = next(words for _, words in commands("gpu-right") if words[0] == "pytest")
    files = [ROOT / word for word in words if word.startswith("tests/")]
    assert files and all(file.is_file() for file in files), files
    marked = [
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if "mark.gpu" in path.read_text() or "= on_device" in path.read_text()
    ]
    assert set(marked) - {Path(__file__)} <= set(files), "a file with tests for a GPU that make gpu-right leaves out"


def test_python_is_the_one_that_is_named() -> None:
    found = subprocess.run(
        ["make", "-n", "gpu-data", "INSTALLED=", "RUN=python3.99"], cwd=ROOT, capture_output=True, text=True
    )
    assert "python3.99 -m clipscale bench data" in found.stdout and "venv" not in found.stdout, found.stdout
