"""Runs commands in this process."""

import errno
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from clipscale.cli.main import main
from clipscale.common.errors import StoppedError, UserError
from clipscale.config.train_config import TrainConfig
from tests.conftest import TINY, Capture

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """`cli("train", ...)`: exit status, stdout and stderr of a command, in this process and an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        status = main(words)
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[TrainConfig]:
    """The settings of the runs that a sweep has started.

    Instead of training, a run has its seed as its loss; seeds 13 and 17 fail, and 99 is stopped.
    """
    monkeypatch.chdir(tmp_path)
    configs = []

    def run(config: TrainConfig, main: object, *, isolated: bool, **options: object) -> dict:
        assert isolated
        configs.append(config)
        if config.seed == 13:
            raise UserError("went wrong")
        if config.seed == 17:
            raise OSError(errno.ENOSPC, "No space left on device", config.run)
        if config.seed == 99:
            raise StoppedError("stopped by SIGTERM", signal.SIGTERM)
        return {"step": 2, "loss": float(config.seed), "run": config.run, "eval": {"birds": {"top1": 0.5, "top5": 0.9}}}

    monkeypatch.setattr("clipscale.launch.local.launch", run)
    return configs


def tiny(*words: str) -> list[str]:
    """The words of a small run, with others in place of some."""
    keys = {word.partition("=")[0] for word in words}
    return ["train", *(word for word in TINY if word.partition("=")[0] not in keys), *words]
