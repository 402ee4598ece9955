"""Records steps with torch's profiler, as a timeline that chrome://tracing and Perfetto open."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

FIRST = 2
"""Steps of a start that come before the recorded ones: they compile, measure chunks, and fill caches."""


@contextmanager
def profiled(run: Path, steps: int, rank: int, device: torch.device) -> Iterator[Callable[[], None]]:
    """Records `steps` steps after the first `FIRST` into RUN/profile/rankN.json.gz. Yields what ends a step."""
    if not steps:
        yield lambda: None
        return

    def write(timeline: profile) -> None:
        (run / "profile").mkdir(exist_ok=True)
        timeline.export_chrome_trace(str(run / "profile" / f"rank{rank}.json.gz"))

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    order = schedule(wait=FIRST - 1, warmup=1, active=steps, repeat=1)
    with profile(activities=activities, schedule=order, on_trace_ready=write) as timeline:
        yield timeline.step
