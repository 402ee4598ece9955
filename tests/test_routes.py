"""Four routes through the code are short: `docs/architecture.md` shows their frames. They are counted in a real run."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import clipscale
from clipscale.cli.main import main
from tests.conftest import TINY

PACKAGE = str(Path(clipscale.__file__).parent)
Route = list[str]


def frames(frame: FrameType | None, begin: str) -> Route:
    """The functions of this package from `begin` to the frame."""
    names: Route = []
    while frame and (not names or names[-1] != begin):
        if frame.f_code.co_filename.startswith(PACKAGE):
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names[::-1]


def longest(routes: dict[str, Route]) -> Callable[[FrameType, str, Any], None]:
    """A profiler that keeps the longest call stack of each route."""

    def profile(frame: FrameType, event: str, called: Any) -> None:
        path, name = frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_code.co_qualname
        if event == "c_call" and called.__name__ == "read" and path.startswith("/data/shards"):
            begin, end = "_work", "a tar byte to its sample"
        elif event == "call" and path == "/loss/torch_backend.py" and name.endswith((".forward", ".backward")):
            begin, end = "train_step", "a feature to its kernel"
        elif event == "call" and name == "GradCache.__init__":
            begin, end = "main", "cache.chunk to its use"
        elif event == "call" and name == "async_save":
            begin, end = "save", "a checkpoint to its disk"
        else:
            return
        route = frames(frame, begin)
        if route and route[0] == begin:
            routes[end] = max(routes.get(end, []), route, key=len)

    return profile


def test_four_routes_are_short(shards: str, tmp_path: Path) -> None:
    routes: dict[str, Route] = {}
    before = sys.getprofile()
    sys.setprofile(longest(routes))
    try:
        assert main(["train", *TINY, f"data.train={shards}", f"run={tmp_path}/run"]) == 0
    finally:
        sys.setprofile(before)
    most = {
        "a tar byte to its sample": 6,
        "a feature to its kernel": 8,
        "cache.chunk to its use": 8,
        "a checkpoint to its disk": 6,
    }
    assert {name: len(route) <= most[name] for name, route in routes.items()} == dict.fromkeys(most, True), routes
