"""Records steps with torch's profiler, as a timeline that chrome://tracing and Perfetto open."""

import gzip
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from clipscale.common import files

log = logging.getLogger(__name__)

FIRST = 2
"""Steps of a start that come before the recorded ones: they compile, measure chunks, and fill caches."""


class Profiler:
    """`with profiler(step): ...` around every step. Records `steps` of them, after the first `FIRST`, and leaves one file for this rank."""

    def __init__(self, run: Path, steps: int, rank: int, device: torch.device) -> None:
        self._run, self._steps, self._rank = run, steps, rank
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
            self._write(self._profile, step)
            self._profile = None

    def _write(self, recorder: profile, step: int) -> None:
        recorder.stop()
        try:
            with tempfile.TemporaryDirectory() as folder:
                trace = Path(folder) / "trace.json"
                recorder.export_chrome_trace(str(trace))
                place = files.inner_folder(self._run, "profile") / f"rank{self._rank}-to-step{step}.json.gz"
                with files.replacing(place) as file:
                    file.write(gzip.compress(trace.read_bytes(), 5, mtime=0))
        except OSError as error:
            log.warning("log.profile: the timeline could not be written (%s)", error)
