"""A store may be slow, and not silent."""

import time
from pathlib import Path

import pytest

from clipscale.checkpoint import copy_store
from clipscale.checkpoint.copy_store import TimeLimited
from clipscale.common import remote
from tests.conftest import Capture


class Slow:
    """A store that sends a byte every tenth of a second, so many in all, and no more."""

    def __init__(self, size: int) -> None:
        self.size = size

    def get(self, sources: list[str], targets: list[str]) -> None:
        for _ in range(self.size):
            with Path(targets[0]).open("ab") as file:
                file.write(b"x")
            time.sleep(0.1)
        time.sleep(1000 * (self.size < 6))

    def ls(self, path: str) -> None:
        time.sleep(1000)


def test_a_store_may_be_slow_and_not_silent(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line says what is waited for."""
    monkeypatch.setattr(copy_store, "ANSWER_S", 1.0)
    monkeypatch.setattr(remote, "LOOK_S", 0.1)
    monkeypatch.setattr(remote, "ANNOUNCE_S", 0.3)
    TimeLimited(Slow(15), "it", announce=False).get(["x"], [str(tmp_path / "x")])
    assert (tmp_path / "x").stat().st_size == 15
    assert "waiting" not in capsys.readouterr().err
    silent = TimeLimited(Slow(2), "checkpoint.copy=s3://b", announce=True)
    for call in (lambda: silent.get(["x"], [str(tmp_path / "y")]), lambda: silent.ls("x")):
        with pytest.raises(TimeoutError, match="no answer"):
            call()
        assert capsys.readouterr().err.count("waiting for checkpoint.copy=s3://b") == 1
