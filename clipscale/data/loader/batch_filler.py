"""Fills one worker's rows of every local batch from its shard streams, and reports what it has filled."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from clipscale.common.signals import Poll
from clipscale.data.loader.host_batch import Arena
from clipscale.data.loader.position import StreamPosition
from clipscale.data.loader.shard_stream import SetStatus, ShardStream, WorkerSpec, open_shard_stream
from clipscale.data.shards.store import Store


@dataclass(frozen=True)
class Report:
    """A worker's message: it has filled `num_filled` of its rows of batch `step`. Step -1: it is alive."""

    step: int
    num_filled: int
    # Since the last report: skipped samples by reason, and faults that cost no sample.
    broken: Counter[str]
    faults: Counter[str]
    # The positions of its streams after the batch; only in a batch's last report.
    positions: dict[int, StreamPosition] | None = None


class BatchFiller:
    """Fills one worker's rows of every local batch from its shard streams. `open_filler` makes it."""

    def __init__(
        self, spec: WorkerSpec, arena: Arena, store: Store, broken: Counter[str], streams: Mapping[int, ShardStream]
    ) -> None:
        """`store`: opens the streams' shards. `broken`: counts the samples that the streams skip."""
        self._spec = spec
        self._arena = arena
        self._store = store
        self._broken = broken
        self.streams = streams
        self._discarded_pixels = np.empty(spec.transform.shape, np.uint8)  # takes the pixels of another rank's samples

    def set_poll(self, poll: Poll) -> None:
        """From now on, call `poll` between samples and while the storage is waited for."""
        self._store.poll = poll

    def fill(self, step: int) -> Iterator[Report]:
        """Fill this worker's rows of a batch. Yields a report after every `samples_per_report` samples, and a
        last one with the positions.

        If two ranks read a stream, each also decodes the other's samples and drops them, so that both skip the same
        broken ones. Raises UserError.
        """
        slot = self._arena.slot(step)
        local = range(self._spec.share.local_batch)
        work = []
        for stream, stream_rows in zip(self.streams.values(), self._spec.rows()):
            work += [(stream, int(row)) for row in stream_rows]
        for start in range(0, len(work), self._spec.samples_per_report):
            part = work[start : start + self._spec.samples_per_report]
            texts: dict[int, str] = {}  # row of the tokens -> its text
            for stream, row in part:
                self._store.poll()
                is_own = row in local
                sample = stream.next_sample(slot["pixels"][row] if is_own else self._discarded_pixels)
                if is_own:
                    texts.update(zip(self._arena.layout.text_rows(row), sample.texts, strict=True))
                    slot["sameness_keys"][row] = sample.sameness_key
                    for teacher, features in zip(self._spec.shards.teachers, sample.teacher_features, strict=True):
                        slot[teacher.member][row] = features
            if texts:
                tokens = np.asarray(self._spec.tokenizer(list(texts.values())))
                rows = list(texts)
                slot["tokens"][rows] = tokens
                slot["lengths"][rows] = self._spec.padding.lengths(tokens)
            yield self.report(step, start + len(part))
        positions = {stream_id: stream.position for stream_id, stream in self.streams.items()}
        yield replace(self.report(step), positions=positions)

    def report(self, step: int = -1, num_filled: int = 0) -> Report:
        """A report with the counts since the last one. Clears the counts."""
        report = Report(step, num_filled, Counter(self._broken), Counter(self._store.faults))
        self._broken.clear()
        self._store.faults.clear()
        return report

    def close(self) -> None:
        for stream in self.streams.values():
            stream.close()


def open_filler(spec: WorkerSpec, arena: Arena, poll: Poll, set_status: SetStatus = lambda text: None) -> BatchFiller:
    """Open one worker's streams, which then can fill its rows. `poll`: see `BatchFiller.set_poll`."""
    store = Store(poll, spec.timeout_s)
    broken: Counter[str] = Counter()
    streams = {
        stream_id: open_shard_stream(spec, stream_id, store, broken, set_status) for stream_id in spec.start_by_stream
    }
    return BatchFiller(spec, arena, store, broken, streams)
