"""The training stream: which sample comes when, and how it reaches the host batch.

Lanes (order.py) fix the order; worker processes (workers.py) read and decode; this file joins them to the training loop.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clipscale.config.data import DataConfig, check
from clipscale.data.decode import TrainTransform
from clipscale.data.features import StoredFeatures
from clipscale.data.filters import selection
from clipscale.data.loader.gpu_decode import DecodedAhead, DeviceDecoder, jpeg_decoder
from clipscale.data.loader.host_batch import HostBatch, Layout
from clipscale.data.loader.ramp import check_ramp
from clipscale.data.loader.rows import Returning, Stopwatch, arena_for, row_kind
from clipscale.data.loader.shard_stream import TRUNCATED, LaneShare, Plan, Producer, windows
from clipscale.data.loader.workers import Fill, Loaded, Report, Workers, reports
from clipscale.data.order import Epochs, fingerprint, stream_bounds
from clipscale.data.shards.access import EVENT, Access
from clipscale.data.shards.listing import build_order, list_shards
from clipscale.errors import UserError

log = logging.getLogger(__name__)

PIECE, PIECES = 64, 64
"""Samples that a worker delivers at once: enough to tokenise together, few enough for the first chunk to start early. Large batches come
in so many pieces a worker; more reports of them could fill a pipe while nobody waits for samples."""


class TrainStream:
    """Endless local batches of this rank's share of the global batch."""

    def __init__(
        self,
        config: DataConfig,
        *,
        image_size: int,
        tokenizer: Callable[[list[str]], Any],
        batch: int,
        rank: int,
        world: int,
        seed: int,
        position: dict[str, Any] | None = None,
        pin: bool = False,
        sizes: Callable[[int], int] | None = None,
        tier: str = "host",
        chunk: int = 256,
        folder: str | None = None,
        stored: StoredFeatures | None = None,
        free: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        """`batch` is the global batch, a multiple of `world`; `position` a record merged over ranks, to go on from.

        `sizes` says how large the i-th batch from here on is, where it is not always `batch`: it never shrinks, ends at `batch`, and every
        size is a multiple of `world` and of the lanes, so that all lanes come to the end of an epoch together. `tier` says where image rows
        wait (tiers.py): in pieces of `chunk`, on disk in `folder`. With `stored`, image rows are features read from the shards. With
        data.decode=gpu, `device` decodes the pictures: as they arrive, or with `encoded` for each pass.
        `free` is the memory there was before any process of this machine took its share (None: what there is now).
        Raises UserError for settings or shards that cannot work.
        """
        check(config, batch, world)
        decoder = jpeg_decoder(device or torch.device("cpu")) if config.on_device else None
        chosen = selection(config.caption_key, config.captions, config.templates, config.filter)
        kind = row_kind(config, image_size, stored)
        access = Access(config.cache, config.cache_bytes, config.retries, config.wait_s)
        self._sizes, self._world = sizes or (lambda _: batch), world
        urls, weights = list_shards(config)
        self._order = build_order(config, urls, weights, self._sizes(0), world, seed, position)
        check_ramp(self._sizes(0), batch, self._order.streams, world)
        self._fingerprint = fingerprint(self._order, [url.rsplit("/", 1)[-1] for url in urls], max(config.shuffle, 1))
        self._positions = self._starts(position, rank, world)
        stripes = self._stripes(config.workers)
        layout = Layout(
            slots=config.buffers if config.workers else 1,
            samples=batch // world,
            row=kind.shape,
            dtype=kind.dtype,
            context_length=np.asarray(tokenizer(["a"])).shape[1],
            tier="device" if decoder else tier,
            decoded=decoder is not None and tier != "encoded",
            chunk=chunk,
            folder=folder,
        )
        self._arena, self.memory = arena_for(layout, urls, kind.members, access, free=free, pin=pin)
        """Besides, a line that states the memory the batches take."""
        self.pinned = self._arena.pinned
        """Whether what is copied to the GPU is page-locked."""
        self._plans = [
            Plan(
                urls=tuple(urls),
                order=self._order,
                window=max(config.shuffle, 1),
                seed=seed,
                transform=kind.transform,
                image_types=kind.members,
                most=config.max_bytes,
                tokenizer=tokenizer,
                selection=chosen,
                access=access,
                shares=stripe,
                rank=rank,
                world=world,
                room=room,
                piece=max(PIECE, layout.samples // (len(stripes) * PIECES)),
            )
            for stripe, room in zip(stripes, rooms(stripes, batch, self._order.streams))
        ]
        self.broken: Counter[str] = Counter()
        """Reason -> samples passed over so far, on this rank."""
        self.seen: Counter[str] = Counter()
        """What went wrong so far without costing a sample: requests made again and the like."""
        self.truncated = 0
        """Captions so far that filled the whole context: cut, or exactly as long."""
        self._waited = Stopwatch()
        self._step = -1
        self._places: dict[int, list[np.ndarray]] = {}
        self._done: dict[int, list[int]] = {}
        self._ends: dict[int, dict[int, tuple[int, int]]] = {}
        self._workers: Workers | None = None
        self._producer: Producer | None = None
        self._reports: Iterator[Report] = iter(())
        if config.workers:
            self._workers = Workers(self._plans, self._arena, rank, config.timeout_s)
            for step in range(layout.slots):
                self._allow(step)
        else:
            self._producer = Producer(self._plans[0], self._arena, lambda: None)
        self._returning: Returning | None = None
        if layout.tier in ("disk", "encoded"):
            copy = device is None or device.type == "cpu"  # a graph of the first pass may keep them
            self._returning = Returning(self._arena, kind.transform, self._workers, self._pump, self._waited, copy=copy)
        self._decoder: DeviceDecoder | None = None
        self._ahead: DecodedAhead | None = None
        if decoder:
            assert isinstance(kind.transform, TrainTransform)
            self._decoder = DeviceDecoder(kind.transform, decoder, self.broken, self.seen)
            self._ahead = DecodedAhead(self._decoder, self._arena.window) if layout.decoded else None

    # -- the public face -----------------------------------------------------------------------------------------------

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples in an epoch, over all ranks; None where shards are drawn with replacement."""
        return sum(self._order.counts) if isinstance(self._order, Epochs) else None

    def next_batch(self) -> HostBatch:
        """The next local batch; the one before is no longer valid. Returns at once; its rows block until they have arrived."""
        if self._returning:
            self._returning.window.drain()
        if self._step >= 0:
            self._finish(self._step)
            if self._ahead:
                self._ahead.forget(self._step)
            self._positions = self._ends.pop(self._step)
            del self._done[self._step], self._places[self._step]
            if self._workers:
                self._allow(self._step + len(self._arena.slots))
        self._step += 1
        step = self._step
        if not self._workers:
            self._allow(step)
            assert self._producer
            self._reports = reports(self._producer, self._arena, step, self._sizes(step))
        slot, size = self._arena.slots[step % len(self._arena.slots)], self._sizes(step) // self._world

        def wait(stop: int) -> None:
            if step != self._step:
                raise RuntimeError("this batch is no longer valid: the next one has been asked for")
            if not 0 <= stop <= size:
                raise ValueError(f"row {stop} lies outside the local batch of {size}")
            self._wait(step, stop)
            self._decode_arrived()

        if self._ahead:
            return HostBatch(slot, size, wait, partial(self._rows_ahead, step))
        if self._decoder:
            return HostBatch(slot, size, wait, partial(self._decoder, slot))
        if self._returning is None:
            return HostBatch(slot, size, wait)
        window = self._returning.window
        window.open(slot)
        return HostBatch(
            slot, size, wait, lambda start, stop: window.rows(start, stop, self._arrived(step, size)), window.expect
        )

    def position(self) -> dict[str, Any]:
        """Where this rank's lanes stand after the last batch handed out; plain and JSON-like. Blocks until that batch is complete."""
        positions = self._positions
        if self._step >= 0:
            self._finish(self._step)
            positions = self._ends[self._step]
        return {
            "order": self._fingerprint,
            "windows": windows(),
            "lanes": self._order.streams,
            "at": {str(lane): list(place) for lane, place in sorted(positions.items())},
        }

    def take_wait(self) -> float:
        """Seconds spent waiting for samples since the last call."""
        return self._waited.take()

    def close(self) -> None:
        """End the workers and release the memory."""
        if self._workers:
            self._workers.close()
            self._workers = None
        if self._producer:
            self._producer.close()
        if self._returning:
            self._returning.close()
        if self._ahead:
            self._ahead.close()
        self._arena.close()

    def __enter__(self) -> "TrainStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- lanes of this rank --------------------------------------------------------------------------------------------

    def _starts(self, position: dict[str, Any] | None, rank: int, world: int) -> dict[int, tuple[int, int]]:
        lanes = self._order.streams
        own = range(rank * lanes // world, (rank + 1) * lanes // world)
        if position is not None and position["order"] == self._fingerprint:
            if position.get("windows") != windows():
                log.warning(
                    "the checkpoint is of a version of clipscale that may shuffle otherwise within a shard: its place in the data is kept, "
                    "but of the shards it was in, some samples may come twice or not at all"
                )
            return {lane: tuple(position["at"][str(lane)]) for lane in own}
        if position is not None:
            log.warning(
                "the shards, data.shuffle, data.order or the seed differ from the checkpoint's: this data is read from its first sample on"
            )
        return dict.fromkeys(own, (0, 0))

    def _stripes(self, workers: int) -> list[tuple[LaneShare, ...]]:
        """Each worker's lanes: every so many-th, so that the batch fills from its first rows on, by all workers at once."""
        shares = [LaneShare(lane, turn, index) for lane, (turn, index) in sorted(self._positions.items())]
        count = min(workers, len(shares))
        if count < workers:
            message = (
                "data.workers=%d: this rank has only %d lanes, so %d workers; take so many, or raise data.shard_streams"
            )
            log.warning(message, workers, len(shares), count)
        return [tuple(shares[number :: max(count, 1)]) for number in range(max(count, 1))]

    # -- arrival -------------------------------------------------------------------------------------------------------

    def _allow(self, step: int) -> None:
        self._done[step] = [0] * len(self._plans)
        self._ends[step] = {}
        self._places[step] = [np.concatenate(plan.places(self._sizes(step))) for plan in self._plans]
        if self._workers:
            self._workers.fill(Fill(step, self._sizes(step)))

    def _wait(self, step: int, stop: int) -> None:
        """Block until rows 0..stop of batch `step` have arrived."""
        needed = [int(np.searchsorted(places, stop)) for places in self._places[step]]
        self._pump(lambda: [n for n, need in enumerate(needed) if self._done[step][n] < need])

    def _arrived(self, step: int, size: int) -> int:
        """How many rows of batch `step` are there, counted up to the first that is not."""
        if self._workers:
            for number, report in self._workers.heard():
                self._note(number, report)
        pairs = zip(self._places[step], self._done[step])
        return min([size, *(int(places[done]) for places, done in pairs if done < len(places))])

    def _finish(self, step: int) -> None:
        """Block until batch `step` is complete and its positions are known."""
        self._pump(lambda: [n for n, plan in enumerate(self._plans) if plan.shares[0].lane not in self._ends[step]])

    def _pump(self, missing: Callable[[], list[int]]) -> None:
        with self._waited:
            while late := missing():
                if self._workers:
                    for number, report in self._workers.receive(late):
                        self._note(number, report)
                else:
                    self._note(0, next(self._reports))

    def _note(self, number: int, report: Report | Loaded) -> None:
        if isinstance(report, Loaded):
            assert self._returning
            self._returning.note(number, report)
            return
        for reason, count in report.broken.items():
            if reason == EVENT + TRUNCATED:
                self.truncated += count
                continue
            own, name = (self.seen, reason.removeprefix(EVENT)) if reason.startswith(EVENT) else (self.broken, reason)
            own[name] += count
        if report.positions is not None:
            self._ends[report.step].update(report.positions)
        elif report.step >= 0:
            self._done[report.step][number] = report.done

    # -- image rows that the device decodes ----------------------------------------------------------------------------

    def _decode_arrived(self) -> None:
        """Have the device decode what has come of this batch, and of those that the workers fill meanwhile."""
        if not self._ahead:
            return
        for step in sorted(self._done):
            size = self._sizes(step) // self._world
            slot = self._arena.slots[step % len(self._arena.slots)]
            self._ahead.arrived(step, slot, self._arrived(step, size), size)

    def _rows_ahead(self, step: int, start: int, stop: int) -> Tensor:
        assert self._ahead
        with self._waited:
            return self._ahead.rows(step, start, stop)


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
    """The training data from its start, or from `position`, the record that `merge_positions` made of a checkpoint's.

    `device` is where the rows are trained on (None: the CPU); with data.decode=gpu it decodes the pictures. With `stored`, image rows are
    features read from the shards. Raises UserError for settings or shards that cannot work.
    """
    return TrainStream(
        config,
        image_size=image_size,
        tokenizer=tokenizer,
        batch=share.batch,
        rank=share.rank,
        world=share.world,
        seed=seed,
        position=position,
        pin=device is not None and device.type == "cuda",
        sizes=share.sizes,
        tier=offload.backend,
        chunk=offload.chunk,
        folder=offload.folder,
        stored=stored,
        free=offload.free,
        device=device,
    )


def rooms(stripes: Sequence[Sequence[LaneShare]], batch: int, lanes: int) -> list[tuple[int, int]]:
    """The places that each worker fills of a whole batch, counted over the workers one after another: (first, stop)."""
    bounds = stream_bounds(batch, lanes)
    ends = accumulate((sum(int(bounds[s.lane + 1] - bounds[s.lane]) for s in stripe) for stripe in stripes), initial=0)
    return list(pairwise(ends))


def merge_positions(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The position of the whole run from `position()` of every rank, as the constructor takes it.

    Raises UserError if the ranks read different shards.
    """
    first = records[0]
    common = {name: first[name] for name in ("order", "windows", "lanes")}
    if any({name: record[name] for name in common} != common for record in records):
        raise UserError(
            "data.train: the processes see different shards; every node must have the same list, the same counts and the same clipscale"
        )
    merged = {lane: place for record in records for lane, place in record["at"].items()}
    if len(merged) != first["lanes"]:
        raise ValueError(f"positions of {len(merged)} lanes, of {first['lanes']}: pass the record of every rank")
    return {**common, "at": merged}
