"""Follows how workers fill batches: which rows are there, what was skipped, where the shard streams stand."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from clipscale.common.errors import UserError
from clipscale.data.loader.host_batch import Slot
from clipscale.data.loader.shard_reader import Position
from clipscale.data.loader.shard_stream import Report, WorkerSpec
from clipscale.data.loader.workers import InProcess, Workers


@dataclass
class _Filling:
    """A batch that the workers fill."""

    done: list[int]  # how many of its places each worker has filled
    unfinished: set[int]  # workers that have not reported where their streams stand after this batch
    positions: dict[int, Position] = field(default_factory=dict)


class BatchAssembler:
    """Lets the workers fill batch after batch, and waits for their rows."""

    def __init__(self, specs: Sequence[WorkerSpec], workers: Workers | InProcess) -> None:
        self.workers = workers
        self._places = [np.concatenate(spec.places()) for spec in specs]  # each worker's, in the order it fills them
        self.size = specs[0].share.samples
        """Local samples of a batch."""
        self._batches: dict[int, _Filling] = {}
        self.counts: Counter[str] = Counter()
        """What the workers have counted so far. Names that begin with EVENT cost no sample."""
        self.defers = False
        """Whether a failure is not raised: the training process finishes the step that all ranks are in."""
        self.failure: UserError | None = None
        """Why the workers cannot go on. Nothing is waited for then, and rows that are missing hold anything."""
        self._waited_s = 0.0

    def begin(self, step: int) -> None:
        """Let the workers fill the batch, when they have filled those begun before."""
        self._batches[step] = _Filling([0] * len(self._places), set(range(len(self._places))))
        self.workers.fill(step)

    def wait(self, step: int, stop: int) -> None:
        """Block until rows 0..stop of the batch have arrived. Raises UserError if the workers cannot go on."""
        batch = self._batches[step]
        needed = [int(np.searchsorted(places, stop)) for places in self._places]
        self._wait(lambda: [n for n, need in enumerate(needed) if batch.done[n] < need])

    def arrived(self, step: int) -> int:
        """How many of the batch's first rows have arrived, without a gap."""
        self._receive(())
        batch = self._batches[step]
        missing = (int(places[done]) for places, done in zip(self._places, batch.done) if done < len(places))
        return min(max(0, min(missing, default=self.size)), self.size)  # places outside of it are another rank's

    def finish(self, step: int) -> dict[int, Position]:
        """Block until the batch is complete; returns where every stream stands after it.

        Some are missing if the workers cannot go on.
        """
        batch = self._batches[step]
        self._wait(lambda: sorted(batch.unfinished))
        return batch.positions

    def forget(self, step: int) -> None:
        """The batch's slot will be filled again."""
        del self._batches[step]

    def load(self, slot: Slot, start: int, stop: int, at: int) -> Callable[[], None]:
        """Let the workers load image rows into the buffers (a prefetch.Load)."""
        missing = self.workers.load(slot.number, start, stop, at)
        return lambda: self._wait(missing)

    def _wait(self, missing: Callable[[], list[int]]) -> None:
        """Handle the workers' messages until no worker is missing."""
        begun = time.monotonic()
        while self.failure is None and (late := missing()):
            self._receive(late)
        self._waited_s += time.monotonic() - begun

    def waited_s(self) -> float:
        """Seconds that the training process has waited for samples since the last call."""
        seconds = self._waited_s
        self._waited_s = 0.0
        return seconds

    def _receive(self, needed: Sequence[int]) -> None:
        try:
            messages = [] if self.failure else self.workers.receive(needed)
        except UserError as error:
            if not self.defers:
                raise
            self.failure = error
            return
        for number, message in messages:
            if not isinstance(message, Report):
                continue
            self.counts.update(message.counts)
            if message.positions is not None:
                batch = self._batches[message.step]
                batch.positions |= message.positions
                batch.unfinished.remove(number)
            elif message.step >= 0:
                self._batches[message.step].done[number] = message.done
