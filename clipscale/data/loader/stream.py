"""The training stream: opens the data of a run, and hands out one local batch after another.

order.py fixes the order, the workers read and decode, the assembler follows what has arrived, and the prefetcher loads
rows that wait elsewhere.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from clipscale.common.errors import UserError
from clipscale.common.hardware import cores_of_rank
from clipscale.common.record import Record
from clipscale.config.data import DataConfig
from clipscale.data.columns import Columns
from clipscale.data.filters import selection
from clipscale.data.loader.assembler import BatchAssembler
from clipscale.data.loader.host_batch import HOST, Arena, HostBatch, Layout, Offload
from clipscale.data.loader.memory import picture_bytes, stated_memory
from clipscale.data.loader.prefetch import Prefetcher
from clipscale.data.loader.shard_reader import OrderedShards, Position
from clipscale.data.loader.shard_stream import WorkerSpec
from clipscale.data.loader.workers import InProcess, Workers
from clipscale.data.order import BatchShare
from clipscale.data.shards.addresses import EVENT
from clipscale.data.shards.counts import Once, build_order, here
from clipscale.data.shards.listing import list_shards
from clipscale.data.shards.store import Store

log = logging.getLogger(__name__)

PIECE, PIECES = 64, 64
"""Samples that a worker delivers at once: enough to tokenise together, few enough for the first chunk to start early.
In large batches each worker delivers this many pieces; more reports could fill a pipe while nobody waits for
samples."""


class TrainStream:
    """Endless local batches of this rank's share of the global batch. `open_stream` makes it."""

    def __init__(
        self,
        shards: OrderedShards,
        start: dict[int, Position],
        arena: Arena,
        assembler: BatchAssembler,
        prefetcher: Prefetcher | None,
        memory: str,
    ) -> None:
        """`prefetcher` gives image rows that do not lie in the slots. `memory`: a line that states the memory."""
        self._shards = shards
        self._arena = arena
        self._assembler = assembler
        self.workers = assembler.workers
        self._prefetcher = prefetcher
        self.memory = memory
        self._positions = start
        self._streams = len(start)
        self._step = -1
        self._given_back = False
        self.samples_per_epoch = shards.samples
        """Over all ranks; None where shards are drawn with replacement."""
        for step in range(len(arena.slots)):
            assembler.begin(step)

    @property
    def broken(self) -> Counter[str]:
        """Reason -> samples skipped so far on this rank."""
        return Counter({name: n for name, n in self._assembler.counts.items() if not name.startswith(EVENT)})

    @property
    def faults(self) -> Counter[str]:
        """Event -> how often it happened without costing a sample, such as a request made again."""
        counts = self._assembler.counts.items()
        return Counter({name.removeprefix(EVENT): n for name, n in counts if name.startswith(EVENT)})

    def record(self) -> Record:
        """This rank's counts since the start, and `waited_s` since the last call, by the names of `metrics.jsonl`."""
        broken, faults = self.broken, self.faults
        counts = {"broken": broken.total(), "faults": faults.total(), "waited_s": self.waited_s()}
        return counts | {"host_pinned": self._arena.pinned, "broken_by": dict(broken), "faults_by": dict(faults)}

    def waited_s(self) -> float:
        """Seconds that this process has waited for samples since the last call."""
        return self._assembler.waited_s()

    def defer_failures(self) -> None:
        """From now on, workers that cannot go on raise nothing, before `check`."""
        self._assembler.defers = True

    def check(self) -> None:
        """Raise the `failure`, if there is one."""
        if self.failure:
            raise self.failure

    @property
    def failure(self) -> UserError | None:
        """Why the workers cannot go on: rows of the last batch hold anything then, and it must be given back."""
        return self._assembler.failure

    def next_batch(self) -> HostBatch:
        """The next local batch, at once; access to its rows blocks until they are there. The one before is invalid."""
        assembler = self._assembler
        prefetcher = self._prefetcher
        before = self._step
        step = before + 1
        self._step = step
        slot = self._arena.slot(step)
        if before >= 0:
            self._positions = assembler.finish(before)
        if prefetcher:
            prefetcher.open(slot)
        if before >= 0:  # give the slot of the batch before to the workers again
            assembler.forget(before)
            self._arena.empty(self._arena.slot(before))
            assembler.begin(before + len(self._arena.slots))

        def wait(stop: int) -> None:
            assembler.wait(step, stop)
            if prefetcher:
                prefetcher.arrived(assembler.arrived(step))

        return HostBatch(slot, self._arena.layout, wait, prefetcher)

    def give_back(self) -> None:
        """Count the batch handed out last as not used: `position` is the one before it, and no other batch follows."""
        self._given_back = True

    def position(self) -> Record:
        """Where this rank's shard streams stand after the last batch handed out. Blocks until that batch is complete.

        `at` maps each stream to epoch and samples read. A stream that two ranks read stands at the same place for both.
        Raises the `failure`, if that left the place unknown.
        """
        at = self._positions if self._step < 0 or self._given_back else self._assembler.finish(self._step)
        if self.failure and len(at) < self._streams:
            raise self.failure
        return {
            "order": self._shards.fingerprint,
            "streams": self._shards.order.streams,
            "at": {str(stream): at[stream].record() for stream in sorted(at)},
        }

    def close(self) -> None:
        """End the workers and release the memory."""
        self.workers.close()
        self._arena.close()

    def __enter__(self) -> "TrainStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ordered_shards(
    config: DataConfig, share: BatchShare, seed: int, position: Record | None = None, once: Once = here
) -> OrderedShards:
    """The training data, listed, counted and ordered; over the shard streams of `position`, if they fit.

    `once` does the work that one rank does for all: it looks up every shard's samples. Raises UserError.
    """
    urls, source_of = list_shards(config, once)
    order = build_order(config, urls, source_of, share, seed, position["streams"] if position else None, once)
    return OrderedShards(tuple(urls), order, max(config.shuffle, 1))


def open_stream(
    config: DataConfig,
    share: BatchShare,
    columns: Columns,
    tokenizer: Callable[[list[str]], Any],
    shards: OrderedShards,
    *,
    position: Record | None = None,
    offload: Offload = HOST,
    free: int | None = None,
) -> TrainStream:
    """The batches of `ordered_shards` from their start, or from `position`, the record that `merge_positions` made.

    `free` is the free memory before any process of this machine took its share (None: what is free now). Raises
    UserError for settings or shards that cannot work.
    """
    chosen = selection(config, first=any(column.of_first_caption for column in columns.beside))
    start = start_positions(shards, position, share)
    workers = worker_count(config, len(start))
    layout = layout_of(config, share.samples, columns, np.asarray(tokenizer(["a"])).shape[1], workers, offload)
    encoded = offload.backend == "encoded"
    picture = picture_bytes(shards.urls[0], layout, Store(config)) if encoded else None
    memory = stated_memory(layout, picture, free)
    arena = Arena(layout)
    if offload.gpu:
        arena.pin()
    count = max(1, workers)
    specs = [
        WorkerSpec(
            config=config,
            shards=shards,
            columns=columns,
            tokenizer=tokenizer,
            selection=chosen,
            streams=dict(
                islice(start.items(), number, None, count)
            ),  # so that all workers fill the batch from its first rows on
            share=share,
            piece=max(PIECE, share.samples // (count * PIECES)),
        )
        for number in range(count)
    ]
    readers = Workers(specs, arena, config.timeout_s) if workers else InProcess(specs[0], arena)
    assembler = BatchAssembler(specs, readers)
    prefetcher = None
    if offload.backend != "host":
        # On the CPU the trainer may keep the tensors, since no copy to a device comes between.
        prefetcher = Prefetcher(arena.buffers, layout.buffer_rows, assembler.load, copy=not offload.gpu)
    return TrainStream(shards, start, arena, assembler, prefetcher, memory)


def start_positions(shards: OrderedShards, position: Record | None, share: BatchShare) -> dict[int, Position]:
    """Where each of this rank's shard streams starts."""
    streams = share.streams(shards.order.streams)
    if position is None or position["order"] != shards.fingerprint:
        if position:
            log.warning(
                "the shards, batch, data.shuffle, data.order, data.weights or seed differ from the checkpoint's: this "
                "data is read from its first sample on"
            )
        return {stream: Position(0, 0) for stream in streams}
    at = {stream: position["at"][str(stream)] for stream in streams}
    return {stream: Position(epoch, index, sources) for stream, (epoch, index, *sources) in at.items()}


def worker_count(config: DataConfig, streams: int) -> int:
    """Loader processes of a rank that reads `streams` shard streams; 0: the training process does their work."""
    if config.workers is not None:
        return min(config.workers, streams)
    return min(max(1, cores_of_rank() - 1), streams)  # one core is left to the training process


def layout_of(
    config: DataConfig, samples: int, columns: Columns, context_length: int, workers: int, offload: Offload
) -> Layout:
    """What a rank stores whose batches have `samples` samples."""
    return Layout(
        slots=config.buffers if workers else 1,
        samples=samples,
        columns=columns,
        texts=(config.captions_per_step, config.texts_per_step - config.captions_per_step),
        context_length=context_length,
        offload=offload,
    )


def merge_positions(records: Sequence[Record]) -> Record:
    """The whole run's position, from `position()` of every rank. Raises UserError if ranks read different shards."""
    first = records[0]
    if any(record | {"at": {}} != first | {"at": {}} for record in records):
        raise UserError(
            "data.train: the processes see different shards; every node must have the same list, the same counts and "
            "the same clipscale"
        )
    return first | {"at": {stream: place for record in records for stream, place in record["at"].items()}}
