"""Shared by the tests of remote shards: a web server, small blocks and short waits."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from clipscale.data.shards import requests, store
from tests.data.shards.web import Web, serving


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small shards take many requests, and retries hardly wait."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setattr(store, "REQUEST_BYTES", 4096)
    monkeypatch.setattr(requests, "MIN_PROGRESS_BYTES", 1024)
    monkeypatch.setattr(store, "MAX_WAIT_S", 0.002)


@pytest.fixture
def web(tmp_path: Path, small_blocks: None) -> Iterator[Web]:
    """A web server of the test's folder."""
    with serving(Web(tmp_path)) as served:
        yield served
