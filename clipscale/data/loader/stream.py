"""The training stream: opens the data of a run, and hands out one local batch after another.

order.py fixes the order, the workers read and decode, the assembler follows what has arrived, and the prefetcher loads rows that wait
elsewhere.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clipscale.common.errors import UserError
from clipscale.common.hardware import cores_of_rank
from clipscale.config.data import DataConfig, check
from clipscale.data.features import StoredFeatures
from clipscale.data.filters import selection
from clipscale.data.loader.assembler import BatchAssembler
from clipscale.data.loader.host_batch import Arena, HostBatch, Layout, Slot, stored_rows
from clipscale.data.loader.memory import fitted, picture_bytes
from clipscale.data.loader.offload import Transform, open_backend, row_kind
from clipscale.data.loader.prefetch import DECODERS, Prefetcher, ThreadLoader
from clipscale.data.loader.ramp import check_ramp
from clipscale.data.loader.shard_reader import OrderedShards, StreamPosition, order_version
from clipscale.data.loader.shard_stream import TRUNCATED, WorkerSpec
from clipscale.data.loader.workers import InProcess, Workers
from clipscale.data.order import local_places, streams_of
from clipscale.data.shards.access import EVENT
from clipscale.data.shards.counts import build_order
from clipscale.data.shards.listing import access_of, list_shards

log = logging.getLogger(__name__)

PIECE, PIECES = 64, 64
"""Samples that a worker delivers at once: enough to tokenise together, few enough for the first chunk to start early. In large batches
each worker delivers this many pieces; more reports could fill a pipe while nobody waits for samples."""


@dataclass(frozen=True)
class BatchShare:
    """The sizes of the batches, and this rank's share of them."""

    batch: int  # the largest global batch, a multiple of `world`
    rank: int = 0
    world: int = 1
    sizes: Callable[[int], int] | None = None
    """The global size of the i-th batch from here on, where it is not always `batch`. It never shrinks and ends at `batch`, and every size
    is a multiple of `world` and of the shard streams, so that all streams reach the end of an epoch together."""

    def size(self, step: int) -> int:
        """The size of the global batch of that step, counted from the stream's start."""
        return self.sizes(step) if self.sizes else self.batch


class TrainStream:
    """Endless local batches of this rank's share of the global batch. `open_stream` makes it."""

    def __init__(
        self,
        source: OrderedShards,
        start: Sequence[StreamPosition],
        arena: Arena,
        assembler: BatchAssembler,
        rows: Prefetcher | Callable[[Slot, int, int], Tensor],
        memory: str,
    ) -> None:
        """`rows` gives the image rows; `memory`: a line that states the memory of the batches."""
        self._source, self._arena, self._assembler, self.memory = source, arena, assembler, memory
        self._prefetcher = rows if isinstance(rows, Prefetcher) else None
        self._read = rows.rows if isinstance(rows, Prefetcher) else rows
        self._positions = {position.stream: position for position in start}
        self._step, self._given_back = -1, False
        self.samples_per_epoch = source.samples
        """Over all ranks; None where shards are drawn with replacement."""
        self.waited = assembler.waited
        """Measures how long the training process waits for samples."""
        for step in range(len(arena.slots)):
            assembler.begin(step)

    @property
    def broken(self) -> Counter[str]:
        """Reason -> samples skipped so far on this rank."""
        return Counter({name: n for name, n in self._assembler.total().items() if not name.startswith(EVENT)})

    @property
    def seen(self) -> Counter[str]:
        """Event -> how often it happened without costing a sample, such as a request made again."""
        total = self._assembler.total()
        del total[EVENT + TRUNCATED]
        return Counter({name.removeprefix(EVENT): n for name, n in total.items() if name.startswith(EVENT)})

    @property
    def truncated(self) -> int:
        """Captions so far that filled the whole context: cut, or exactly as long."""
        return self._assembler.total()[EVENT + TRUNCATED]

    def record(self) -> dict[str, Any]:
        """This rank's counts since the start, by the names of `metrics.jsonl`."""
        counts: dict[str, Any] = {"host_pinned": self._arena.pinned, "truncated": self.truncated}
        for name, found in (("broken", self.broken), ("faults", self.seen)):
            counts |= {name: found.total(), f"{name}_by": dict(found)}
        return counts

    def next_batch(self) -> HostBatch:
        """The next local batch; the one before is no longer valid. Returns at once; access to its rows blocks until they have arrived."""
        if self._step >= 0:  # give the slot of the batch before to the workers again
            self._positions = self._assembler.finish(self._step)
            if self._prefetcher:
                self._prefetcher.release()
            self._assembler.forget(self._step)
            self._assembler.begin(self._step + len(self._arena.slots))
        self._step += 1
        step, size, slot = self._step, self._assembler.size(self._step), self._arena.slot(self._step)

        def wait(stop: int) -> None:
            if step != self._step:
                raise RuntimeError("this batch is no longer valid: the next one has been asked for")
            if not 0 <= stop <= size:
                raise ValueError(f"row {stop} lies outside the local batch of {size}")
            self._assembler.wait(step, stop)
            if self._prefetcher:
                self._prefetcher.arrived(self._assembler.arrived(step))

        if not self._prefetcher:
            return HostBatch(slot, size, wait, self._read)
        self._prefetcher.open(slot)
        return HostBatch(slot, size, wait, self._read, self._prefetcher.expect)

    def give_back(self) -> None:
        """Count the batch handed out last as not used: `position` is the one before it, and no other batch follows."""
        self._given_back = True

    def position(self) -> dict[str, Any]:
        """This rank's record of where its shard streams stand after the last batch handed out. Blocks until that batch is complete.

        `at` maps each stream to epoch and samples read. A stream that two ranks read stands at the same place for both.
        """
        at = self._positions if self._step < 0 or self._given_back else self._assembler.finish(self._step)
        return {
            "order": self._source.fingerprint(),
            "windows": order_version(),
            "streams": self._source.streams,
            "at": {str(stream): [at[stream].epoch, at[stream].index, *at[stream].sources] for stream in sorted(at)},
        }

    def close(self) -> None:
        """End the workers and release the memory."""
        self._assembler.workers.close()
        if self._prefetcher:
            self._prefetcher.close()
        self._arena.close()

    def __enter__(self) -> "TrainStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_stream(
    config: DataConfig,
    share: BatchShare,
    *,
    image_size: int,
    tokenizer: Callable[[list[str]], Any],
    seed: int,
    position: dict[str, Any] | None = None,
    stored: StoredFeatures | None = None,
    device: torch.device | None = None,
    backend: str = "host",
    chunk: int = 256,
    folder: str | None = None,
    free: int | None = None,
) -> TrainStream:
    """The training data from its start, or from `position`, the record that `merge_positions` made.

    `device` is where the rows are trained on (None: the CPU). With `stored`, image rows are features read from the shards.
    `backend`, host, disk or encoded, is where image rows wait between the two passes (see offload.py); `chunk` of them, the
    image tower's chunk, are loaded at once; `folder` holds the file of disk (None: the system's for temporary files).
    `free` is the free memory before any process of this machine took its share (None: what is free now).
    Raises UserError for settings or shards that cannot work.
    """
    device = device or torch.device("cpu")
    check(config, share.batch, share.world)
    chosen = selection(config.caption_key, config.captions, config.templates, config.filter)
    kind = row_kind(config, image_size, stored)
    access = access_of(config)
    urls, source_of = list_shards(config)
    order = build_order(config, urls, source_of, share.size(0), share.world, seed, position)
    source = OrderedShards(tuple(urls), order, max(config.shuffle, 1), seed)
    check_ramp(share.size(0), share.batch, source.streams, share.world)
    start = start_positions(source, position, share)
    workers = worker_count(config, len(start))
    layout = Layout(
        slots=config.buffers if workers else 1,
        samples=share.batch // share.world,
        row=kind.shape,
        dtype=kind.dtype,
        context_length=np.asarray(tokenizer(["a"])).shape[1],
        backend=backend,
        chunk=chunk,
        folder=folder,
    )
    picture = picture_bytes(source, kind.members, layout, access) if layout.encoded else None
    layout, memory = fitted(layout, picture, free)
    arena = Arena(layout)
    if device.type == "cuda":
        arena.pin()
    parts = divide(start, workers, share, source.streams)
    specs = [
        WorkerSpec(
            config=config,
            source=source,
            rows=kind,
            tokenizer=tokenizer,
            selection=chosen,
            access=access,
            streams=part,
            rank=share.rank,
            world=share.world,
            span=span,
            piece=max(PIECE, layout.samples // (len(parts) * PIECES)),
        )
        for part, span in parts
    ]
    readers = Workers(specs, arena, config.timeout_s) if workers else InProcess(specs[0], arena)
    assembler = BatchAssembler(specs, readers, share.size)
    rows = row_source(arena, assembler, kind.transform, copy=device.type == "cpu")
    return TrainStream(source, start, arena, assembler, rows, memory)


def start_positions(source: OrderedShards, position: dict[str, Any] | None, share: BatchShare) -> list[StreamPosition]:
    """Where each of this rank's shard streams starts."""
    own = streams_of(source.streams, share.batch, share.rank, share.world)
    if position is None or position["order"] != source.fingerprint():
        if position:
            log.warning(
                "the shards, data.shuffle, data.order, data.weights or the seed differ from the checkpoint's: this data is read from its "
                "first sample on"
            )
        return [StreamPosition(stream, 0, 0) for stream in own]
    if position.get("windows") != order_version():
        log.warning(
            "the checkpoint is of a version of clipscale that may shuffle otherwise within a shard: its place in the data is kept, but of "
            "the shards it was in, some samples may come twice or not at all"
        )
    places = ((stream, position["at"][str(stream)]) for stream in own)
    return [StreamPosition(stream, epoch, index, tuple(sources)) for stream, (epoch, index, *sources) in places]


def worker_count(config: DataConfig, streams: int) -> int:
    """Loader processes of a rank that reads `streams` shard streams."""
    if config.workers is not None:
        return config.workers
    # One core is left to the training process. Each worker takes host memory, and 16 of them decode over 2,000 pictures a second.
    return min(max(1, cores_of_rank() - 1), 16, max(1, streams))


def divide(
    start: Sequence[StreamPosition], workers: int, share: BatchShare, streams: int
) -> list[tuple[tuple[StreamPosition, ...], tuple[int, int]]]:
    """Each worker's shard streams: every n-th, so that all workers fill the batch from its first rows on.

    And its samples of a whole local batch, (first, stop), where the samples are counted one worker after another.
    """
    if workers > len(start):
        log.warning(
            f"data.workers={workers}: this rank has only {len(start)} shard streams, so {len(start)} workers; take so many, or raise "
            "data.shard_streams"
        )
    count = max(1, min(workers, len(start)))
    parts, local = [tuple(start[number::count]) for number in range(count)], share.batch // share.world

    def size(part: Sequence[StreamPosition]) -> int:
        places = [local_places(own.stream, streams, share.batch, share.rank, share.world) for own in part]
        return sum(min(span.stop, local) - max(span.start, 0) for span in places)

    return list(zip(parts, pairwise(accumulate(map(size, parts), initial=0))))


def row_source(
    arena: Arena, assembler: BatchAssembler, transform: Transform, *, copy: bool
) -> Prefetcher | Callable[[Slot, int, int], Tensor]:
    """What gives the arena's image rows. `copy`: the trainer may keep the tensors, since no copy to a device comes between."""
    layout = arena.layout
    if layout.backend == "host":
        return stored_rows
    if layout.backend == "encoded" and isinstance(assembler.workers, Workers):
        return Prefetcher(arena.buffers, layout.buffer_rows, assembler.load, copy=copy)
    load = open_backend(arena, transform, (0, layout.samples)).load
    loader = ThreadLoader(load, arena.buffers, 1 if layout.backend == "disk" else DECODERS, assembler.waited)
    return Prefetcher(arena.buffers, layout.buffer_rows, loader, copy=copy, close=loader.close)


def merge_positions(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The position of the whole run from `position()` of every rank. Raises UserError if the ranks read different shards."""
    first = records[0]
    if any(record | {"at": {}} != first | {"at": {}} for record in records):
        raise UserError(
            "data.train: the processes see different shards; every node must have the same list, the same counts and the same clipscale"
        )
    merged = {stream: place for record in records for stream, place in record["at"].items()}
    if len(merged) != first["streams"]:
        raise ValueError(
            f"positions of {len(merged)} shard streams, of {first['streams']}: pass the record of every rank"
        )
    return first | {"at": merged}
