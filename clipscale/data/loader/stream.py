"""The training stream: opens the data of a run, and gives one local batch after another.

data/order.py fixes the order of samples; workers read and decode them.
"""

import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypedDict

import numpy as np
from torch import Tensor

from clipscale.common.cpu import cores_of_rank
from clipscale.common.errors import LoaderError, UserError
from clipscale.common.ranks import OnRank0, in_this_process
from clipscale.common.signals import Poll, no_poll
from clipscale.common.terminal import print_failure
from clipscale.config.data import DataConfig
from clipscale.data.filters import parse_selection
from clipscale.data.loader.batch_filler import open_filler
from clipscale.data.loader.host_batch import Arena, HostBatch, Layout, check_memory, create_arena
from clipscale.data.loader.padding import Padding
from clipscale.data.loader.position import DataPosition, StreamPosition
from clipscale.data.loader.shard_reader import OrderedShards
from clipscale.data.loader.shard_stream import WorkerSpec
from clipscale.data.loader.workers import InProcessWorker, Workers, start_workers
from clipscale.data.order import BatchShare
from clipscale.data.shards.counts import build_order
from clipscale.data.shards.features import TeacherFeatures
from clipscale.data.shards.listing import list_shards
from clipscale.data.shards.shard_errors import CHANGED_SHARD
from clipscale.data.shards.subset import subset_of
from clipscale.data.train_transform import TrainTransform

log = logging.getLogger(__name__)

# A worker reports after this many samples: enough to tokenise together, few enough for the first chunk to start early.
SAMPLES_PER_REPORT = 64
# A worker sends at most about this many reports of a batch. More could fill the pipe, and block the worker, while the
# training process computes.
MAX_REPORTS = 64


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
        start: dict[int, StreamPosition],
        memory_line: str,
    ) -> None:
        """`start`: the position of each of the rank's shard streams. `memory_line`: for the user."""
        self.memory_line = memory_line
        self._arena = arena
        self.workers = workers
        self._shards = specs[0].shards
        self._rows = [np.concatenate(spec.rows()) for spec in specs]  # each worker's rows, in the order it fills them
        self._positions = start
        self._num_streams = len(start)
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
        # The error of the workers, or of a wait for them. After an error, reading rows does not wait, and the rows may
        # have no samples in them. The caller must discard the batch with
        # `discard_last_batch`.
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


def order_shards(
    config: DataConfig,
    share: BatchShare,
    seed: int,
    position: DataPosition | None = None,
    on_rank0: OnRank0 = in_this_process,
    largest_divisor: Callable[[int], int] = lambda num_streams: num_streams,
    teachers: tuple[TeacherFeatures, ...] = (),
) -> OrderedShards:
    """List, count and order the training data. Takes as many shard streams as `position` has, if they fit.

    `on_rank0` counts every shard's samples on one rank. `largest_divisor(n)`: the largest divisor of n that
    also divides the batch of every stage. `teachers`: their features lie beside the samples. Raises UserError.
    """
    urls, source_of = list_shards(config, on_rank0)
    earlier_streams = position.num_streams if position else None
    order = build_order(config, urls, source_of, share, seed, earlier_streams, on_rank0)
    if config.shard_streams is None:
        num_streams = largest_divisor(order.num_streams)
        if num_streams < order.num_streams:
            order = build_order(config, urls, source_of, share, seed, num_streams, on_rank0)
    subset = subset_of(config)
    digests = (subset.table.digest(),) if subset else ()
    return OrderedShards(tuple(urls), order, max(config.shuffle, 1), digests, teachers)


def open_stream(
    config: DataConfig,
    share: BatchShare,
    image_size: int,
    tokenizer: Callable[[list[str]], Tensor],
    shards: OrderedShards,
    *,
    position: DataPosition | None = None,
    gpu: bool = False,
    free: int | None = None,
) -> TrainStream:
    """Open the stream of batches over `shards`, at the start or at the run's `position`.

    `image_size`: the side of the model's pictures in pixels. `gpu`: page-lock the batch memory. `free`: see
    `check_memory`. Raises UserError for settings or shards that cannot work.
    """
    selection = parse_selection(config, first_caption_only=bool(shards.teachers))
    empty, other = (np.asarray(tokenizer([text]))[0] for text in ("", "a"))
    start = start_positions(shards, position, share)
    workers = worker_count(config, len(start))
    layout = layout_of(config, share.local_batch, image_size, len(empty), workers, shards.teachers)
    memory_line = check_memory(layout, free)
    arena = create_arena(layout)
    count = max(1, workers)
    spec = WorkerSpec(
        shards=shards,
        subset=subset_of(config),
        repeats_samples=bool(config.sample_weights),
        timeout_s=config.timeout_s,
        transform=TrainTransform(image_size, config.augment),
        tokenizer=tokenizer,
        padding=Padding.of(empty, other),
        selection=selection,
        start_by_stream=start,
        share=share,
        samples_per_report=max(SAMPLES_PER_REPORT, share.local_batch // (count * MAX_REPORTS)),
    )
    # Workers take streams in turn, so that all of them fill the batch from its first rows on.
    streams = list(start.items())
    specs = [replace(spec, start_by_stream=dict(streams[number::count])) for number in range(count)]
    readers: Workers | InProcessWorker
    if workers:
        readers = start_workers(specs, arena, config.timeout_s)
    else:
        readers = InProcessWorker(open_filler(specs[0], arena, no_poll))
    stream = TrainStream(specs, arena, readers, start, memory_line)
    stream.request_first()
    if gpu:
        arena.pin()  # takes half a second a GiB, while the workers read
    return stream


def start_positions(
    shards: OrderedShards, position: DataPosition | None, share: BatchShare
) -> dict[int, StreamPosition]:
    """The position at which each of this rank's shard streams starts."""
    stream_ids = share.stream_ids(shards.order.num_streams)
    if position is None or position.order_fingerprint != shards.order_fingerprint:
        if position:
            log.warning(
                "the shards, batch, data.shuffle, data.order, data.weights, seed, or the samples in the file of "
                "data.only_keys or data.sample_weights differ from the checkpoint's: this data is read from its first "
                "sample on"
            )
        return {stream_id: StreamPosition(0, 0) for stream_id in stream_ids}
    return {stream_id: position.by_stream[stream_id] for stream_id in stream_ids}


def worker_count(config: DataConfig, num_streams: int) -> int:
    """Worker processes of a rank with `num_streams` shard streams; 0: the training process does their work."""
    if config.workers is not None:
        return min(config.workers, num_streams)
    return min(max(1, cores_of_rank() - 1), num_streams)  # one core is left to the training process


def layout_of(
    config: DataConfig,
    samples: int,
    image_size: int,
    context_length: int,
    workers: int,
    teachers: tuple[TeacherFeatures, ...] = (),
) -> Layout:
    """The batch memory of a rank with `samples` samples in its local batch."""
    return Layout(
        slots=config.buffers if workers else 1,
        samples=samples,
        image_size=image_size,
        context_length=context_length,
        text_layout=config.text_layout,
        teachers=teachers,
    )
