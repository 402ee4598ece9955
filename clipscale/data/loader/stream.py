"""The training stream: opens the data of a run, and hands out one local batch after another.

order.py fixes the order, the workers read and decode, the assembler follows what has arrived, and a row source hands out image rows.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from clipscale.config.data import DataConfig, check
from clipscale.data.decode import TrainTransform
from clipscale.data.features import StoredFeatures
from clipscale.data.filters import selection
from clipscale.data.loader.assembler import BatchAssembler, SampleCounts
from clipscale.data.loader.gpu_decode import DecodeOnRequest, DecodePrefetcher, DeviceDecoder, Torchvision, jpeg_decoder
from clipscale.data.loader.host_batch import Arena, HostBatch, Layout, RowSource
from clipscale.data.loader.memory import allocate
from clipscale.data.loader.offload import Transform, open_backend, row_kind
from clipscale.data.loader.pipeline import Source, pipeline_source
from clipscale.data.loader.prefetch import DECODERS, Prefetcher, ThreadLoader
from clipscale.data.loader.ramp import check_ramp
from clipscale.data.loader.shard_reader import OrderedShards, StreamPosition, order_version
from clipscale.data.loader.shard_stream import WorkerSpec
from clipscale.data.loader.workers import InProcess, Workers
from clipscale.data.order import local_places, streams_of
from clipscale.data.shards.counts import build_order
from clipscale.data.shards.listing import access_of, list_shards
from clipscale.errors import UserError
from clipscale.hardware import cores_of_rank

log = logging.getLogger(__name__)

PIECE, PIECES = 64, 64
"""Samples that a worker delivers at once: enough to tokenise together, few enough for the first chunk to start early. In large batches
each worker delivers this many pieces; more reports could fill a pipe while nobody waits for samples."""


@dataclass(frozen=True)
class BatchShare:
    """The sizes of the batches, and this rank's share of them."""

    batch: int
    """The largest global batch, a multiple of `world`."""
    rank: int = 0
    world: int = 1
    sizes: Callable[[int], int] | None = None
    """The global size of the i-th batch from here on, where it is not always `batch`. It never shrinks and ends at `batch`, and every size
    is a multiple of `world` and of the shard streams, so that all streams reach the end of an epoch together."""

    def size(self, step: int) -> int:
        """The size of the global batch of that step, counted from the stream's start."""
        return self.sizes(step) if self.sizes else self.batch


@dataclass(frozen=True)
class OffloadSpec:
    """Where image rows wait between the two passes."""

    backend: str = "host"
    """host, disk or encoded (see offload.py)."""
    chunk: int = 256
    """Rows that are loaded into host memory at once: the image tower's chunk."""
    folder: str | None = None
    """disk: the folder of the file; None: the system's folder for temporary files."""
    free: int | None = None
    """Free memory before any process of this machine took its share; None: what is free now."""


class TrainStream:
    """Endless local batches of this rank's share of the global batch. `open_stream` makes it."""

    def __init__(
        self,
        source: Source,
        start: Sequence[StreamPosition],
        arena: Arena,
        assembler: BatchAssembler,
        rows: RowSource,
        memory: str,
    ) -> None:
        """`memory`: a line that states the memory of the batches."""
        self._source, self._arena, self._assembler, self._rows, self.memory = source, arena, assembler, rows, memory
        self._positions = {s.stream: (s.epoch, s.index, *s.sources) for s in start}
        self._step, self._given_back = -1, False
        self.broken, self.seen = assembler.counts.broken, assembler.counts.seen
        """Reason -> samples skipped so far on this rank; and event -> how often it happened without costing a sample."""
        for step in range(len(arena.slots)):
            assembler.begin(step)

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples in an epoch, over all ranks; None where shards are drawn with replacement, or a pipeline gives them."""
        return self._source.samples

    def record(self) -> dict[str, Any]:
        """This rank's counts since the start, by the names of `metrics.jsonl`."""
        return {
            "host_pinned": self.pinned,
            "broken": self.broken.total(),
            "broken_by": dict(self.broken),
            "faults": self.seen.total(),
            "faults_by": dict(self.seen),
            "truncated": self.truncated,
        }

    @property
    def truncated(self) -> int:
        """Captions so far that filled the whole context: cut, or exactly as long."""
        return self._assembler.counts.truncated

    @property
    def pinned(self) -> bool:
        """Whether the memory that is copied to the GPU is page-locked."""
        return self._arena.pinned

    def next_batch(self) -> HostBatch:
        """The next local batch; the one before is no longer valid. Returns at once; access to its rows blocks until they have arrived."""
        if self._step >= 0:  # give the slot of the batch before to the workers again
            self._positions = self._assembler.finish(self._step)
            self._rows.release(self._step)
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
            if self._rows.follows_arrivals:
                for arrived, count, total in self._assembler.arrived():
                    self._rows.arrived(arrived, self._arena.slot(arrived), count, total)

        self._rows.open(step, slot)
        return HostBatch(slot, size, wait, self._rows)

    def give_back(self) -> None:
        """Count the batch handed out last as not used: `position` is the one before it, and no other batch follows."""
        self._given_back = True

    def position(self) -> dict[str, Any]:
        """This rank's record of where its shard streams stand after the last batch handed out. Blocks until that batch is complete.

        A stream that two ranks read stands at the same place for both.

        Checkpoints hold it, so its keys stay as they were: `at` maps each stream ("lane") to epoch and samples read.
        """
        at = self._positions if self._step < 0 or self._given_back else self._assembler.finish(self._step)
        return {
            "order": self._source.fingerprint(),
            "windows": order_version(),
            "lanes": self._source.streams,
            "at": {str(stream): list(place) for stream, place in sorted(at.items())},
        }

    @property
    def waiting(self) -> bool:
        """Whether the training process waits for samples right now."""
        return self._assembler.waited.running

    def take_wait(self) -> float:
        """Seconds spent waiting for samples since the last call."""
        return self._assembler.waited.take()

    def close(self) -> None:
        """End the workers and release the memory."""
        self._assembler.workers.close()
        self._rows.close()
        self._arena.close()

    def __enter__(self) -> "TrainStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_stream(
    config: DataConfig,
    share: BatchShare,
    offload: OffloadSpec = OffloadSpec(),
    *,
    image_size: int,
    tokenizer: Callable[[list[str]], Any],
    seed: int,
    position: dict[str, Any] | None = None,
    stored: StoredFeatures | None = None,
    device: torch.device | None = None,
) -> TrainStream:
    """The training data from its start, or from `position`, the record that `merge_positions` made.

    `device` is where the rows are trained on (None: the CPU); with data.decode=gpu it decodes the pictures. With `stored`, image rows are
    features read from the shards. Raises UserError for settings or shards that cannot work.
    """
    device = device or torch.device("cpu")
    check(config, share.batch, share.world)
    decoder = jpeg_decoder(device) if config.on_device else None
    chosen = selection(config.caption_key, config.captions, config.templates, config.filter)
    kind = row_kind(config, image_size, stored)
    access = access_of(config)
    source = open_source(config, share, seed, position)
    check_ramp(share.size(0), share.batch, source.streams, share.world)
    start = start_positions(source, position, share)
    workers = worker_count(config, len(start))
    layout = Layout(
        slots=config.buffers if workers else 1,
        samples=share.batch // share.world,
        row=kind.shape,
        dtype=kind.dtype,
        context_length=np.asarray(tokenizer(["a"])).shape[1],
        backend="device" if decoder else offload.backend,
        decoded=decoder is not None and offload.backend != "encoded",
        chunk=offload.chunk,
        folder=offload.folder,
    )
    arena, memory = allocate(layout, source, kind.members, access, free=offload.free, pin=device.type == "cuda")
    parts = divide(start, workers)
    specs = [
        WorkerSpec(
            source=source,
            rows=kind,
            max_bytes=config.max_bytes,
            tokenizer=tokenizer,
            selection=chosen,
            max_word=config.max_word,
            access=access,
            streams=part,
            rank=share.rank,
            world=share.world,
            span=span,
            piece=max(PIECE, layout.samples // (len(parts) * PIECES)),
        )
        for part, span in zip(parts, spans(parts, share, source.streams))
    ]
    readers = Workers(specs, arena, config.timeout_s) if workers else InProcess(specs[0], arena)
    assembler = BatchAssembler(specs, readers, share.size, SampleCounts())
    rows = row_source(arena, assembler, kind.transform, decoder, copy=device.type == "cpu")
    return TrainStream(source, start, arena, assembler, rows, memory)


def open_source(config: DataConfig, share: BatchShare, seed: int, position: dict[str, Any] | None) -> Source:
    """The shards in their order, or the pipeline, that the settings name. Raises UserError."""
    if config.pipeline:
        return pipeline_source(config, share.size(0), share.world, seed, position)
    urls, source_of = list_shards(config)
    order = build_order(config, urls, source_of, share.size(0), share.world, seed, position)
    return OrderedShards(tuple(urls), order, max(config.shuffle, 1), seed)


def start_positions(source: Source, position: dict[str, Any] | None, share: BatchShare) -> list[StreamPosition]:
    """Where each of this rank's shard streams starts."""
    streams = source.streams
    own = streams_of(streams, share.batch, share.rank, share.world)
    if position is not None and position["order"] == source.fingerprint():
        if position.get("windows") != order_version():
            log.warning(
                "the checkpoint is of a version of clipscale that may shuffle otherwise within a shard: its place in the data is kept, "
                "but of the shards it was in, some samples may come twice or not at all"
            )
        places = ((stream, position["at"][str(stream)]) for stream in own)
        return [StreamPosition(stream, epoch, index, tuple(sources)) for stream, (epoch, index, *sources) in places]
    if position is None:
        reason = ""
    elif isinstance(source, OrderedShards) and position["order"] == source.former_fingerprint():
        reason = "data.weights were parts of whole shards in the checkpoint's version of clipscale, and now are shares of the samples"
    else:
        reason = "the shards, data.shuffle, data.order, data.weights or the seed differ from the checkpoint's"
    if reason:
        log.warning("%s: this data is read from its first sample on", reason)
    return [StreamPosition(stream, 0, 0) for stream in own]


def worker_count(config: DataConfig, streams: int) -> int:
    """Loader processes of a rank that reads `streams` shard streams."""
    if config.workers is not None:
        return config.workers
    # One core is left to the training process. Each worker takes host memory, and 16 of them decode over 2,000 pictures a second.
    return min(max(1, cores_of_rank() - 1), 16, max(1, streams))


def divide(start: Sequence[StreamPosition], workers: int) -> list[tuple[StreamPosition, ...]]:
    """Each worker's shard streams: every n-th, so that all workers fill the batch from its first rows on."""
    count = min(workers, len(start))
    if count < workers:
        log.warning(
            "data.workers=%d: this rank has only %d shard streams, so %d workers; take so many, or raise data.shard_streams",
            workers,
            len(start),
            count,
        )
    return [tuple(start[number :: max(count, 1)]) for number in range(max(count, 1))]


def spans(parts: Sequence[Sequence[StreamPosition]], share: BatchShare, streams: int) -> Iterator[tuple[int, int]]:
    """Each worker's samples of a whole local batch, (first, stop), where the samples are counted one worker after another."""
    local = share.batch // share.world

    def size(stream: int) -> int:
        places = local_places(stream, streams, share.batch, share.rank, share.world)
        return min(places.stop, local) - max(places.start, 0)

    return pairwise(accumulate((sum(size(s.stream) for s in part) for part in parts), initial=0))


def row_source(
    arena: Arena, assembler: BatchAssembler, transform: Transform, decoder: Torchvision | None, *, copy: bool
) -> RowSource:
    """Hands out the arena's image rows. `copy`: the trainer may keep the tensors, since no copy to a device comes between."""
    layout, counts, waited = arena.layout, assembler.counts, assembler.waited
    if decoder:
        assert isinstance(transform, TrainTransform)
        decode = DeviceDecoder(transform, decoder, counts.broken, counts.seen)
        return DecodePrefetcher(decode, arena.buffers, waited) if layout.decoded else DecodeOnRequest(decode)
    if layout.backend == "host":
        return RowSource()
    if layout.backend == "encoded" and isinstance(assembler.workers, Workers):
        return Prefetcher(arena.buffers, assembler.load, copy=copy)
    backend = open_backend(arena, transform, (0, layout.samples))
    loader = ThreadLoader(backend, arena.buffers, 1 if layout.backend == "disk" else DECODERS, waited)
    return Prefetcher(arena.buffers, loader, copy=copy, close=loader.close)


def merge_positions(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The position of the whole run from `position()` of every rank, as `open_stream` takes it.

    Raises UserError if the ranks read different shards.
    """
    first = records[0]
    common = {name: first[name] for name in ("order", "windows", "lanes")}
    if any({name: record[name] for name in common} != common for record in records):
        raise UserError(
            "data.train: the processes see different shards; every node must have the same list, the same counts and the same clipscale"
        )
    merged = {stream: place for record in records for stream, place in record["at"].items()}
    if len(merged) != first["lanes"]:
        raise ValueError(
            f"positions of {len(merged)} shard streams, of {first['lanes']}: pass the record of every rank"
        )
    return {**common, "at": merged}
