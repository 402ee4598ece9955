"""Follows how the workers fill the batches: which rows have arrived, what was skipped, and where the shard streams stand."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from clipscale.data.loader.host_batch import Slot, Stopwatch
from clipscale.data.loader.shard_stream import TRUNCATED, WorkerSpec
from clipscale.data.loader.workers import Fill, InProcess, Loaded, Message, Restarted, Workers
from clipscale.data.shards.access import EVENT


@dataclass
class SampleCounts:
    """What happened to the samples of this rank so far."""

    broken: Counter[str] = field(default_factory=Counter)
    """Reason -> samples skipped."""
    seen: Counter[str] = field(default_factory=Counter)
    """Event -> how often it happened without costing a sample, such as a request made again."""
    truncated: int = 0
    """Captions that filled the whole context: cut, or exactly as long."""

    def add(self, counts: dict[str, int]) -> None:
        """Add what a worker has counted."""
        for reason, count in counts.items():
            if reason == EVENT + TRUNCATED:
                self.truncated += count
            elif reason.startswith(EVENT):
                self.seen[reason.removeprefix(EVENT)] += count
            else:
                self.broken[reason] += count

    def take_back(self, counts: dict[str, int]) -> None:
        """Forget what will be counted again."""
        self.add({reason: -count for reason, count in counts.items()})
        for counter in (self.broken, self.seen):
            for reason in [reason for reason, count in counter.items() if not count]:
                del counter[reason]


@dataclass
class _Filling:
    """A batch that the workers fill."""

    size: int
    """Local samples."""
    places: list[np.ndarray]
    """Each worker's places, in the order in which it fills them."""
    done: list[int]
    """How many of them each worker has filled."""
    unfinished: set[int]
    """Workers that have not reported their positions after this batch."""
    positions: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def first_rows(self) -> int:
        """How many rows have arrived without a gap. Places outside of the batch are another rank's."""
        missing = (int(places[done]) for places, done in zip(self.places, self.done) if done < len(places))
        return min(max(0, min(missing, default=self.size)), self.size)


class BatchAssembler:
    """Lets the workers fill batch after batch, and waits for their rows."""

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        workers: Workers | InProcess,
        sizes: Callable[[int], int],
        counts: SampleCounts,
    ) -> None:
        """`sizes`: step -> size of the global batch."""
        self._specs, self.workers, self._sizes, self.counts = specs, workers, sizes, counts
        self._batches: dict[int, _Filling] = {}
        self._loads: dict[int, set[int]] = {}
        """Ticket -> workers that have not loaded their part."""
        self._recent: list[Counter[str]] = [Counter() for _ in specs]
        """What each worker has counted since its last complete batch."""
        self._ticket = 0
        self.waited = Stopwatch()

    def size(self, step: int) -> int:
        """Local samples of the batch."""
        return self._sizes(step) // self._specs[0].world

    def begin(self, step: int) -> None:
        """Let the workers fill the batch, when they have filled those begun before."""
        batch = self._sizes(step)
        places = [np.concatenate(spec.places(batch)) for spec in self._specs]
        numbers = range(len(self._specs))
        self._batches[step] = _Filling(self.size(step), places, [0 for _ in numbers], set(numbers))
        self.workers.fill(Fill(step, batch))

    def wait(self, step: int, stop: int) -> None:
        """Block until rows 0..stop of the batch have arrived. Raises UserError if the workers cannot go on."""
        batch = self._batches[step]
        needed = [int(np.searchsorted(places, stop)) for places in batch.places]
        self._wait(lambda: [n for n, need in enumerate(needed) if batch.done[n] < need])

    def arrived(self) -> list[tuple[int, int, int]]:
        """(step, count, size) of every batch in work: its first `count` rows have arrived."""
        for number, message in self.workers.received():
            self._note(number, message)
        return [(step, batch.first_rows(), batch.size) for step, batch in sorted(self._batches.items())]

    def finish(self, step: int) -> dict[int, tuple[int, ...]]:
        """Block until the batch is complete; returns the position of every stream after it."""
        batch = self._batches[step]
        self._wait(lambda: sorted(batch.unfinished))
        return batch.positions

    def forget(self, step: int) -> None:
        """The batch's slot will be filled again."""
        del self._batches[step]

    def load(self, slot: Slot, start: int, stop: int, buffer: int) -> Callable[[], None]:
        """Let the workers load image rows into a buffer (a prefetch.Load)."""
        assert isinstance(self.workers, Workers)
        self._ticket += 1
        missing = self._loads[self._ticket] = set(range(len(self.workers)))
        self.workers.load(self._ticket, slot.number, start, stop, buffer)
        return lambda: self._wait(lambda: sorted(missing))

    def _wait(self, missing: Callable[[], list[int]]) -> None:
        """Handle the workers' messages until no worker is missing."""
        with self.waited:
            while late := missing():
                for number, message in self.workers.receive(late):
                    self._note(number, message)

    def _note(self, number: int, message: Message) -> None:
        if isinstance(message, Loaded):
            missing = self._loads[message.ticket]
            missing.remove(number)
            if not missing:
                del self._loads[message.ticket]
            return
        if isinstance(message, Restarted):  # rows that have arrived stay as they are
            self.counts.take_back(self._recent[number])
            self._recent[number].clear()
            return
        self.counts.add(message.counts)
        self._recent[number].update(message.counts)
        if message.positions is not None:
            batch = self._batches[message.step]
            batch.positions.update(message.positions)
            batch.unfinished.remove(number)
            self._recent[number].clear()
        elif message.step >= 0:
            done = self._batches[message.step].done
            done[number] = max(done[number], message.done)
