"""The record of a step. It is completed when the device has done the step, so the host need not wait for that."""

import time
from dataclasses import dataclass
from typing import cast

import psutil
from torch import Tensor

from clipscale.common.record import Results
from clipscale.data.loader.stream import TrainStream
from clipscale.log.metrics import MetricLog
from clipscale.models.flops import Flops
from clipscale.run_folder.records import StepRecord
from clipscale.step.measurements import CLOCK_STEP_S, Readback
from clipscale.step.train_step import StepResult


@dataclass(frozen=True)
class PendingRecord:
    """A step's record without the numbers that the device may still be computing."""

    record: StepRecord
    result: StepResult
    logit_scale: Readback

    @property
    def is_ready(self) -> bool:
        """Whether its record can be completed without a wait for the device."""
        return self.logit_scale.is_ready and (self.result.statistics is None or self.result.statistics.is_ready)


class StepRecords:
    """Completes the records of a run's steps, one by one."""

    def __init__(self, log: MetricLog | None, world_size: int, flops: Flops, stream: TrainStream) -> None:
        """`log` takes each complete record; None on a rank that does not log."""
        self._log = log
        self._world_size = world_size
        self._flops = flops
        self._stream = stream
        self._measured_at = time.monotonic()
        self._pending: PendingRecord | None = None

    def add(self, record: StepRecord, result: StepResult, logit_scale: Tensor) -> None:
        """Add a step that the device may still be computing. Logs the step before it.

        `record`: what the loop knows of the step.
        """
        self.flush()
        now = time.monotonic()
        num_texts = sum(result.texts_by_seq_len.values())
        num_tokens = sum(seq_len * count for seq_len, count in result.texts_by_seq_len.items())
        scalars = result.scalars
        measured: StepRecord = {
            "loss": scalars.loss,
            **scalars.captioner_losses,
            "grad_norm": None if scalars.overflows else scalars.grad_norm,
            "skipped": scalars.overflows,  # with fp16; otherwise such a step ends the run, without a record
            "time": round(time.time(), 3),
            # Includes waiting, evaluations and saves between steps.
            "samples_per_s_wall": record["batch"] / max(now - self._measured_at, CLOCK_STEP_S),
            "host_rss_bytes": psutil.Process().memory_info().rss,
            **self._stream.record(),
            "caption_tokens": num_tokens / num_texts,  # with padding
        }
        self._measured_at = now
        self._pending = PendingRecord({**record, **measured}, result, Readback.start_scalars(logit_scale))

    def log_if_ready(self) -> None:
        """Log the last step's record if the device has done the step."""
        if self._pending and self._pending.is_ready:
            self.flush()

    def flush(self) -> None:
        """Wait until the device has done the last step, and log its record."""
        pending = self._pending
        self._pending = None
        if pending and self._log:
            self._log.log_step(self._complete(pending))

    def log_evaluation(self, step: int, results: Results) -> None:
        """Log the results of an evaluation."""
        if self._log:
            self._log.log_evaluation(step, results)

    def show_progress(self, task: str, done: int, total: int) -> None:
        """Show how far the run is."""
        if self._log:
            self._log.progress(task, done, total)

    def close(self) -> None:
        """Log what is left, and close the log."""
        self.flush()
        if self._log:
            self._log.close()

    def _complete(self, pending: PendingRecord) -> StepRecord:
        record = pending.record
        result = pending.result
        timer = result.timer
        rate = record["batch"] / timer.total
        complete = {
            **record,
            "logit_scale": pending.logit_scale.read()[0],
            **(result.statistics.read() if result.statistics else {}),
            "samples_per_s": rate,
            "samples_per_s_per_gpu": rate / self._world_size,
            "data_wait_frac": result.waited_s / timer.total,
            **timer.record(),
            "mfu": self._flops.utilisation(rate / self._world_size, result.texts_by_seq_len),
        }
        return cast(StepRecord, complete)
