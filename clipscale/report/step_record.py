"""The record of a step, completed when the device has done it. Nothing waits for the device in between."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import psutil
from torch import Tensor

from clipscale.common.phases import Phases, Readback
from clipscale.data.loader.stream import TrainStream
from clipscale.models.flops import Flops

Record = dict[str, Any]


class StepRecords:
    """Completes the records of a run's steps, one by one."""

    def __init__(self, log: Callable[[Record], None] | None, ranks: int, flops: Flops, stream: TrainStream) -> None:
        """`log` takes each complete record; None: this rank logs none."""
        self._log, self._ranks, self._flops, self._stream = log, ranks, flops, stream
        self._measured_at = time.monotonic()
        self._unfinished: Callable[[], Record] | None = None

    def add(self, record: Record, phases: Phases, scale: Tensor, widths: Mapping[int, int]) -> None:
        """A step has been given to the device. `scale`: the logit scale after it; `widths`: captions by width."""
        now, before = time.monotonic(), self._measured_at
        self._measured_at = now
        measured = {
            "time": round(time.time(), 3),
            "samples_per_s_wall": record["batch"] / (now - before),  # with waiting, evaluations and saves between steps
            "host_rss_bytes": psutil.Process().memory_info().rss,
            **self._stream.record(),
            "caption_tokens": sum(width * count for width, count in widths.items()) / sum(widths.values()),
        }
        waited = self._stream.waited.take()
        self._unfinished = partial(self._complete, record | measured, phases, Readback(scale), dict(widths), waited)

    def finish(self) -> None:
        """Log the last step's record. Where the device already has more work, it goes on with it."""
        unfinished, self._unfinished = self._unfinished, None
        if unfinished is not None and self._log is not None:
            self._log(unfinished())

    def _complete(
        self, record: Record, phases: Phases, scale: Readback, widths: dict[int, int], waited: float
    ) -> Record:
        rate = record["batch"] / phases.total
        return record | {
            "logit_scale": scale.read()[0],
            "samples_per_s": rate,
            "samples_per_s_per_gpu": rate / self._ranks,
            "data_wait_frac": waited / phases.total,
            **phases.record(),
            "mfu": self._flops.utilisation(rate / self._ranks, widths),
        }
