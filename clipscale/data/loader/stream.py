"""The training stream: gives one local batch after another. `open_stream.py` opens it.

data/order.py fixes the order of samples; workers read and decode them.
"""

import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np

from clipscale.common.errors import LoaderError, UserError
from clipscale.common.signals import Poll, no_poll
from clipscale.common.terminal import print_failure
from clipscale.data.loader.host_batch import Arena, HostBatch
from clipscale.data.loader.position import DataPosition, StreamPosition
from clipscale.data.loader.shard_stream import WorkerSpec
from clipscale.data.loader.workers import InProcessWorker, Workers
from clipscale.data.shards.index import CHANGED_SHARD

log = logging.getLogger(__name__)


@dataclass
class PendingBatch:
    """A batch that the workers are filling."""

    host_batch: HostBatch
    num_filled: list[int]  # of each worker's rows
    unfinished: set[int]  # workers that have not reported their positions after this batch
    positions: dict[int, StreamPosition] = field(default_factory=dict)


class LoaderRecord(TypedDict):
    """The counts of a rank's loader, by their names in `metrics.jsonl`."""

    broken: int
    faults: int
    host_pinned: bool
    broken_by: dict[str, int]
    faults_by: dict[str, int]


class TrainStream:
    """Gives one local batch after another, without end. `open_stream` makes it."""

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        arena: Arena,
        workers: Workers | InProcessWorker,
        start_by_stream: dict[int, StreamPosition],
        memory_line: str,
    ) -> None:
        """`start_by_stream`: the position of each of the rank's shard streams. `memory_line`: for the user."""
        self.memory_line = memory_line
        self._arena = arena
        self.workers = workers
        self._shards = specs[0].shards
        self._rows = [np.concatenate(spec.rows()) for spec in specs]  # each worker's rows, in the order it fills them
        self._positions = start_by_stream
        self._num_streams = len(start_by_stream)
        self._step = -1
        self._is_last_discarded = False
        self._batches: dict[int, PendingBatch] = {}
        # Reason -> samples that the workers have skipped so far.
        self.broken: Counter[str] = Counter()
        # Fault -> how often it has happened. Faults cost no sample, such as a request that is repeated.
        self.faults: Counter[str] = Counter()
        # Seconds that this process has waited for samples.
        self.waited_s = 0.0
        self._defers_failures = False
        self._poll: Poll = no_poll
        # The error of the workers, or of a wait for them. After an error, reads return at once, and rows may still
        # have old samples. The caller must discard the batch (`discard_last_batch`).
        self.failure: UserError | None = None
        # Samples of an epoch of all ranks; None if shards are drawn with replacement.
        self.epoch_samples = self._shards.epoch_samples

    def request_first(self) -> None:
        """Let the workers fill the first batches, one for each slot of the memory."""
        for step in range(len(self._arena.slots)):
            self._request(step)

    def record(self) -> LoaderRecord:
        """This rank's counts since the start."""
        return {
            "broken": self.broken.total(),
            "faults": self.faults.total(),
            "host_pinned": self._arena.is_pinned,
            "broken_by": dict(self.broken),
            "faults_by": dict(self.faults),
        }

    def defer_failures(self) -> None:
        """From now on only `raise_failure` raises a failure of the workers: the ranks end their step together."""
        self._defers_failures = True

    def set_poll(self, poll: Poll) -> None:
        """Call `poll` a few times a second while samples are waited for. What it raises is a failure."""
        self._poll = poll

    def raise_failure(self) -> None:
        """Raise the `failure`, if there is one."""
        if self.failure:
            raise self.failure

    def next_batch(self) -> HostBatch:
        """The next local batch, whose samples may still be arriving: reading its rows waits for them.

        First waits until the previous batch is complete, which then becomes invalid.
        """
        before = self._step
        step = before + 1
        self._step = step
        if before >= 0:
            self._positions = {}  # unknown if the next line fails
            self._positions = self.wait_for_batch(before)
            del self._batches[before]
            self._request(before + len(self._arena.slots))  # into the slot of the previous batch
        return self._batches[step].host_batch

    def upcoming(self) -> HostBatch | None:
        """The batch that `next_batch` will return, if all its samples have arrived; otherwise None. Does not wait."""
        self._receive([])
        batch = self._batches.get(self._step + 1)
        return batch.host_batch if batch and not batch.unfinished else None

    def _host_batch(self, step: int) -> HostBatch:
        def wait(stop: int) -> None:
            batch = self._batches[step]
            needed = [int(np.searchsorted(rows, stop)) for rows in self._rows]
            self._wait(
                lambda: [worker for worker, need in enumerate(needed) if batch.num_filled[worker] < need],
                self._poll,
            )

        return HostBatch(self._arena.slot(step), self._arena.layout, wait)

    def discard_last_batch(self) -> None:
        """Discard the last batch: `position` is then the position before it. No further batch can follow."""
        self._is_last_discarded = True

    def position(self) -> DataPosition:
        """The positions of this rank's shard streams after the last batch. Blocks until that batch is complete.

        Raises the `failure` if that has left a position unknown.
        """
        positions = self._positions if self._step < 0 or self._is_last_discarded else self.wait_for_batch(self._step)
        if self.failure and len(positions) < self._num_streams:
            raise self.failure
        by_stream = {stream_id: positions[stream_id] for stream_id in sorted(positions)}
        return DataPosition(self._shards.order_fingerprint, self._shards.order.num_streams, by_stream)

    def close(self) -> None:
        """End the workers and release the memory."""
        self.workers.close()
        self._arena.close()

    def __enter__(self) -> "TrainStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, step: int) -> None:
        """Let the workers fill a batch, after those requested before."""
        self._batches[step] = PendingBatch(self._host_batch(step), [0] * len(self._rows), set(range(len(self._rows))))
        self.workers.fill(step)

    def wait_for_batch(self, step: int) -> dict[int, StreamPosition]:
        """Block until the batch is complete; returns the streams' positions after it.

        After a failure of the workers some positions are missing.
        """
        batch = self._batches[step]
        self._wait(lambda: sorted(batch.unfinished))
        return batch.positions

    def _wait(self, missing: Callable[[], list[int]], poll: Poll = no_poll) -> None:
        """Handle the workers' messages until `missing` names no worker. `poll`: see `Workers.receive`."""
        begun = time.monotonic()
        needed = missing()
        while self.failure is None and needed:
            self._receive(needed, poll)
            needed = missing()
        self.waited_s += time.monotonic() - begun

    def _receive(self, needed: Sequence[int], poll: Poll = no_poll) -> None:
        """Handle the messages that have arrived; waits for one if workers are `needed`. Sets `failure`, and raises it
        if it is not deferred."""
        try:
            messages = [] if self.failure else self.workers.receive(needed, poll)
        except UserError as error:
            self.failure = error
            if not self._defers_failures:
                raise
            return
        except Exception as error:  # after a bug of the loader, too, the run saves its steps and ends
            self.failure = LoaderError(f"the data loader failed: {error!r}")
            print_failure("the data loader failed", "".join(traceback.format_exception(error)))
            if not self._defers_failures:
                raise self.failure from error
            return
        for number, message in messages:
            if CHANGED_SHARD in message.faults and CHANGED_SHARD not in self.faults:
                log.warning(
                    "data.train: shards have changed since they were indexed; they are read without their index, and "
                    "counted (%s of faults_by); run `clipscale data index` again",
                    CHANGED_SHARD,
                )
            self.broken.update(message.broken)
            self.faults.update(message.faults)
            if message.positions is not None:
                batch = self._batches[message.step]
                batch.positions |= message.positions
                batch.unfinished.remove(number)
            elif message.step >= 0:
                self._batches[message.step].num_filled[number] = message.num_filled
