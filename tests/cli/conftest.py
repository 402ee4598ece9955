"""Runs commands in this process."""

from collections.abc import Callable
from pathlib import Path

import pytest

from clipscale.cli.main import main
from tests.conftest import TINY, Cap

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capsys: Cap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """`cli("train", ...)`: exit status, stdout and stderr of a command, in this process and an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        status = main(words)
        out, err = capsys.readouterr()
        return status, out, err

    return run


def tiny(*words: str) -> list[str]:
    """The words of a small run, with others in place of some."""
    keys = {word.partition("=")[0] for word in words}
    return ["train", *(word for word in TINY if word.partition("=")[0] not in keys), *words]
