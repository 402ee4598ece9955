"""Shared by the tests of remote shards: a web server, small blocks and short waits."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from clipscale.data.shards import remote, remote_object
from tests.data.shards.web import Web, serving


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small shards take many requests, and retries hardly wait."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setattr(remote, "FIRST_BLOCK", 4096)
    monkeypatch.setattr(remote, "LARGEST_BLOCK", 16384)
    monkeypatch.setattr(remote_object, "LONGEST_WAIT_S", 0.002)


@pytest.fixture
def web(tmp_path: Path, small_blocks: None) -> Iterator[Web]:
    """A web server of the test's folder."""
    with serving(Web(tmp_path)) as served:
        yield served


@pytest.fixture
def called_off(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """The number of requests cancelled before their answer was complete: their faults are not counted."""
    submit, futures = remote_object.submit, list[Future[Any]]()

    def tracked(request: Any) -> Future[Any]:
        futures.append(submit(request))
        return futures[-1]

    for module in (remote, remote_object):
        monkeypatch.setattr(module, "submit", tracked)
    return lambda: sum(future.cancelled() for future in futures)
