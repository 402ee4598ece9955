"""Records steps with torch's profiler, as a timeline that chrome://tracing and Perfetto open."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

log = logging.getLogger(__name__)

FIRST = 2
"""Steps of a start that come before the recorded ones: they compile, measure chunks, and fill caches."""


class Profiler:
    """`with profiler(step): ...` around every step. Records `steps` of them, after the first `FIRST`."""

    def __init__(self, run: Path, steps: int, rank: int, device: torch.device) -> None:
        self._folder, self._steps, self._rank = run / "profile", steps, rank
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        self._profile = profile(activities=activities) if steps else None
        self._seen = 0

    @contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        self._seen += 1
        if self._profile is None or self._seen <= FIRST:
            yield
            return
        if self._seen == FIRST + 1:
            self._profile.start()
        with record_function(f"step {step}"):
            yield
        if self._seen == FIRST + self._steps:
            self._profile.stop()
            try:
                self._folder.mkdir(exist_ok=True)
                self._profile.export_chrome_trace(str(self._folder / f"rank{self._rank}-to-step{step}.json.gz"))
            except OSError as error:
                log.warning("log.profile: the timeline could not be written (%s)", error)
            self._profile = None
