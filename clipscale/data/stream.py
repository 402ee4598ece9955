"""The training stream: which sample comes when, and how it reaches the host batch.

Lanes (order.py) fix the order; worker processes (workers.py) read and decode; this file joins them to the training loop.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import torch

from clipscale.data import shards
from clipscale.data.batch import Arena, HostBatch, arena_layout
from clipscale.data.decode import TrainTransform
from clipscale.data.lanes import LaneShare, Plan, Producer, places_of
from clipscale.data.order import Epochs, Order, Resampled, default_lanes, fingerprint, lane_bounds, lanes_fit
from clipscale.data.workers import Report, Workers, reports
from clipscale.errors import UserError

log = logging.getLogger(__name__)

PIECE, PIECES = 64, 64
"""Samples that a worker delivers at once: enough to tokenise together, few enough for the first chunk to start early. Large batches come
in so many pieces a worker; more reports of them could fill a pipe while nobody waits for samples."""


@dataclass
class AugmentConfig:
    """Random resized crop and flip of training images (torchvision's RandomResizedCrop conventions)."""

    scale: tuple[float, float] = (0.9, 1.0)
    """Crop area as a share of the image."""
    ratio: tuple[float, float] = (0.75, 1.3333333)
    """Crop aspect ratio, width over height."""
    flip: float = 0.0
    """Probability of a horizontal flip."""


@dataclass
class DataConfig:
    """Where the training samples come from and how they are read."""

    train: list[str] | None = None
    """Shards: brace lists, globs, `@FILE` listing shards, directories; several are several sources."""
    weights: list[float] | None = None
    """One weight per source in `train` (drawn in proportion; needs resampling); None: by number of samples."""
    order: str = "auto"
    """`epochs`: each sample exactly once an epoch; `resampled`: shards drawn with replacement; `auto`: epochs where counts are known."""
    workers: int = 2
    """Loader processes per rank; 0 decodes in the training process."""
    lanes: int | None = None
    """Independent ordered streams whose union is the global order; None: 64, or what the batch and the ranks need."""
    shuffle: int = 256
    """Samples in each lane's shuffle window; 0: shard order. Every lane holds a window of undecoded samples in memory."""
    buffers: int = 2
    """Local batches held in host memory: 2 lets workers fill the next while one is trained on, 1 halves the memory."""
    image_size: int | None = None
    """Pixels; None: the model's."""
    caption_key: str = "txt"
    """Member that holds the caption: `txt`, or `json:FIELD`."""
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    max_pixels: int = 89_478_485
    """Larger images are skipped as broken (`huge_image`)."""
    allow_pipe: bool = False
    """Permit `pipe:` shard addresses, which run a shell command."""
    timeout_s: float = 300.0
    """A worker silent for this long ends the run with its name."""


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
    ) -> None:
        """`batch` is the global batch, a multiple of `world`; `position` a record merged over ranks, to go on from.

        Raises UserError for settings or shards that cannot work.
        """
        check(config, batch, world)
        urls, weights = list_shards(config)
        self._order = choose_order(config, urls, weights, batch, world, seed, position)
        self._fingerprint = fingerprint(self._order, [url.rsplit("/", 1)[-1] for url in urls], max(config.shuffle, 1))
        self._positions = self._starts(position, rank, world)
        shares = self._shares(batch, rank, world)
        self._size = batch // world
        workers = min(config.workers, len(shares))
        if workers < config.workers:
            log.warning(
                "data.workers=%d: this rank has only %d lanes, so %d workers; raise data.lanes",
                config.workers,
                len(shares),
                workers,
            )
        self._plans = [
            Plan(
                urls=tuple(urls),
                order=self._order,
                window=max(config.shuffle, 1),
                seed=seed,
                transform=TrainTransform(
                    image_size,
                    (config.augment.scale[0], config.augment.scale[1]),
                    (config.augment.ratio[0], config.augment.ratio[1]),
                    config.augment.flip,
                    config.max_pixels,
                ),
                tokenizer=tokenizer,
                caption_key=config.caption_key,
                # striped, so that the batch fills from its first rows on, by all workers at once
                shares=tuple(shares[number :: max(workers, 1)]),
                piece=max(PIECE, self._size // (max(workers, 1) * PIECES)),
            )
            for number in range(max(workers, 1))
        ]
        self._places = [places_of(plan.shares) for plan in self._plans]
        self.broken: Counter[str] = Counter()
        """Reason -> samples passed over so far, on this rank."""
        self._wait_s = 0.0
        self._step = -1
        self._done: dict[int, list[int]] = {}
        self._ends: dict[int, dict[int, tuple[int, int]]] = {}
        slots = config.buffers if workers else 1
        self._arena = allocate(slots, self._size, image_size, np.asarray(tokenizer(["a"])).shape[1])
        if pin and torch.cuda.is_available():
            self._arena.pin()
        self._workers: Workers | None = None
        self._reports: Iterator[Report] = iter(())
        if workers:
            self._workers = Workers(self._plans, self._arena, rank, config.timeout_s)
            for step in range(slots):
                self._allow(step)
        else:
            self._producer = Producer(self._plans[0], lambda: None)

    # -- the public face -----------------------------------------------------------------------------------------------

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples in an epoch, over all ranks; None where shards are drawn with replacement."""
        return sum(self._order.counts) if isinstance(self._order, Epochs) else None

    def next_batch(self) -> HostBatch:
        """The next local batch; the one before is no longer valid. Returns at once; its rows block until they have arrived."""
        if self._step >= 0:
            self._finish(self._step)
            self._positions = self._ends.pop(self._step)
            del self._done[self._step]
            if self._workers:
                self._allow(self._step + len(self._arena.slots))
        self._step += 1
        step = self._step
        if not self._workers:
            self._allow(step)
            self._reports = reports(self._producer, self._arena, step)

        def wait(stop: int) -> None:
            if step != self._step:
                raise RuntimeError("this batch is no longer valid: the next one has been asked for")
            self._wait(step, stop)

        return HostBatch(self._arena.slots[step % len(self._arena.slots)], wait)

    def position(self) -> dict[str, Any]:
        """Where this rank's lanes stand after the last batch handed out; plain and JSON-like. Blocks until that batch is complete."""
        positions = self._positions
        if self._step >= 0:
            self._finish(self._step)
            positions = self._ends[self._step]
        return {
            "order": self._fingerprint,
            "lanes": self._order.lanes,
            "at": {str(lane): list(place) for lane, place in sorted(positions.items())},
        }

    def take_wait(self) -> float:
        """Seconds spent waiting for samples since the last call."""
        waited, self._wait_s = self._wait_s, 0.0
        return waited

    def close(self) -> None:
        """End the workers and release the memory."""
        if self._workers:
            self._workers.close()
            self._workers = None
        self._arena.close()

    def __enter__(self) -> "TrainStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- lanes of this rank --------------------------------------------------------------------------------------------

    def _starts(self, position: dict[str, Any] | None, rank: int, world: int) -> dict[int, tuple[int, int]]:
        lanes = self._order.lanes
        own = range(rank * lanes // world, (rank + 1) * lanes // world)
        if position is not None and position["order"] == self._fingerprint:
            return {lane: tuple(position["at"][str(lane)]) for lane in own}
        if position is not None:
            log.warning(
                "the shards, data.shuffle, data.order or the seed differ from the checkpoint's: this data is read from its first sample on"
            )
        return dict.fromkeys(own, (0, 0))

    def _shares(self, batch: int, rank: int, world: int) -> list[LaneShare]:
        bounds = lane_bounds(batch, self._order.lanes)
        origin = rank * (batch // world)
        return [
            LaneShare(lane, turn, index, int(bounds[lane]) - origin, int(bounds[lane + 1]) - origin)
            for lane, (turn, index) in sorted(self._positions.items())
        ]

    # -- arrival -------------------------------------------------------------------------------------------------------

    def _allow(self, step: int) -> None:
        self._done[step] = [0] * len(self._plans)
        self._ends[step] = {}
        if self._workers:
            self._workers.allow(step)

    def _wait(self, step: int, stop: int) -> None:
        """Block until rows 0..stop of batch `step` have arrived."""
        if not 0 <= stop <= self._size:
            raise ValueError(f"row {stop} lies outside the local batch of {self._size}")
        needed = [int(np.searchsorted(places, stop)) for places in self._places]
        self._pump(lambda: [n for n, need in enumerate(needed) if self._done[step][n] < need])

    def _finish(self, step: int) -> None:
        """Block until batch `step` is complete and its positions are known."""
        self._pump(lambda: [n for n, plan in enumerate(self._plans) if plan.shares[0].lane not in self._ends[step]])

    def _pump(self, missing: Callable[[], list[int]]) -> None:
        begun = time.monotonic()
        while late := missing():
            if self._workers:
                for number, report in self._workers.receive(late):
                    self._note(number, report)
            else:
                self._note(0, next(self._reports))
        self._wait_s += time.monotonic() - begun

    def _note(self, number: int, report: Report) -> None:
        self.broken.update(report.broken)
        if report.positions is not None:
            self._ends[report.step].update(report.positions)
        elif report.step >= 0:
            self._done[report.step][number] = report.done


# -- settings ----------------------------------------------------------------------------------------------------------


def check(config: DataConfig, batch: int, world: int) -> None:
    """Raise UserError for settings that cannot work with any data."""
    if batch < 1 or batch % world:
        raise UserError(f"batch={batch} is not a multiple of the {world} processes; take a multiple")
    for name, least in (("workers", 0), ("shuffle", 0), ("buffers", 1), ("max_pixels", 1)):
        if getattr(config, name) < least:
            raise UserError(f"data.{name}={getattr(config, name)}: must be at least {least}")
    if config.timeout_s <= 0:
        raise UserError(f"data.timeout_s={config.timeout_s}: must be positive")
    if config.order not in ("auto", "epochs", "resampled"):
        raise UserError(f"data.order={config.order}: must be auto, epochs or resampled")
    augment = config.augment
    if not 0 < augment.scale[0] <= augment.scale[1] <= 1:
        raise UserError(f"data.augment.scale={list(augment.scale)}: must be two shares, 0 < low <= high <= 1")
    if not 0 < augment.ratio[0] <= augment.ratio[1]:
        raise UserError(f"data.augment.ratio={list(augment.ratio)}: must be two aspect ratios, 0 < low <= high")
    if not 0 <= augment.flip <= 1:
        raise UserError(f"data.augment.flip={augment.flip}: must be a probability")


def allocate(slots: int, samples: int, side: int, context_length: int) -> Arena:
    """The batch memory of this rank. Raises UserError if this machine's processes cannot all have as much."""
    _, size = arena_layout(slots, samples, side, context_length)
    share = psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if size > share:
        raise UserError(
            f"data.buffers={slots}: {slots} x {samples} samples of {side} pixels need {size / 2**30:.1f} GiB of host memory in each "
            f"process, which has {share / 2**30:.1f}; take a smaller batch, more nodes or fewer buffers"
        )
    return Arena(slots, samples, side, context_length)


def list_shards(config: DataConfig) -> tuple[list[str], list[float] | None]:
    """Every shard of every source, and per shard the share of its source's weight (None: no weights given). Raises UserError."""
    if not config.train:
        raise UserError("data.train is not set; give shards, for example data.train='/data/{00000..00099}.tar'")
    sources = [config.train] if isinstance(config.train, str) else list(config.train)
    listed = [shards.expand(source, config.allow_pipe) for source in sources]
    urls = [url for source in listed for url in source]
    if config.weights is None:
        return urls, None
    if len(config.weights) != len(sources):
        raise UserError(
            f"data.weights={list(config.weights)}: {len(config.weights)} weights for {len(sources)} sources in data.train"
        )
    if min(config.weights) < 0 or sum(config.weights) <= 0:
        raise UserError(f"data.weights={list(config.weights)}: must be non-negative and not all zero")
    return urls, [weight / len(source) for weight, source in zip(config.weights, listed) for _ in source]


def choose_order(
    config: DataConfig,
    urls: Sequence[str],
    weights: list[float] | None,
    batch: int,
    world: int,
    seed: int,
    position: dict[str, Any] | None,
) -> Order:
    """Exact epochs where the samples can be counted, else shards drawn with replacement; and how many lanes. Raises UserError."""
    counts = shards.noted_counts(urls)
    if config.order == "epochs" and weights is not None:
        raise UserError("data.weights and data.order=epochs exclude each other; weights need data.order=resampled")
    wants_epochs = config.order == "epochs" or (config.order == "auto" and weights is None)
    if wants_epochs:
        unknown = [url for url, count in zip(urls, counts) if count is None]
        local = all(shards.is_local(url) for url in unknown)
        if unknown and local and (config.order == "epochs" or len(urls) <= shards.SCAN_AT_MOST):
            scanned = dict(zip(unknown, shards.scanned_counts(unknown)))
            counts = [scanned[url] if count is None else count for url, count in zip(urls, counts)]
        elif unknown and config.order == "epochs":
            raise UserError(
                f"data.order=epochs: the samples in {unknown[0]} are not known; put a sizes.json beside it, or take data.order=resampled"
            )
    known = [count for count in counts if count is not None]
    exact = wants_epochs and len(known) == len(counts)
    if wants_epochs and not exact:
        log.warning(
            "the samples of %d shards are not known: shards are drawn with replacement (data.order=resampled)",
            len(urls),
        )
    total = sum(known) if exact else None
    if total == 0:
        raise UserError(
            f"data.train={config.train}: the {len(urls)} shards hold no sample; check that they are image-text tar files"
        )
    lanes = _lanes(config, batch, world, total, position)
    if exact:
        return Epochs(tuple(known), batch, lanes, seed)
    if weights is None:
        weights = [float(count) for count in known] if len(known) == len(counts) else [1.0] * len(counts)
    cumulative = np.cumsum(weights)
    return Resampled(tuple(cumulative.tolist()), tuple(counts), lanes, seed)


def _lanes(config: DataConfig, batch: int, world: int, total: int | None, position: dict[str, Any] | None) -> int:
    if position is not None:
        lanes = int(position["lanes"])
        if lanes % world:
            raise UserError(
                f"resume: the checkpoint's data position has {lanes} lanes, which {world} processes cannot share; "
                f"resume with a number of processes that divides {lanes}"
            )
        if lanes_fit(lanes, batch, total):
            return lanes
        log.warning("the checkpoint's %d lanes do not fit this batch and data; its data position is given up", lanes)
    lanes = config.lanes or default_lanes(batch, world, total)
    if lanes % world:
        raise UserError(f"data.lanes={lanes} is not a multiple of the {world} processes; take a multiple")
    if not lanes_fit(lanes, batch, total):
        size = f"the batch of {batch}" if lanes > batch else f"the {total} samples in data.train"
        raise UserError(f"data.lanes={lanes}: too many for {size}; take fewer lanes, fewer processes or more data")
    return lanes


def merge_positions(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The position of the whole run from `position()` of every rank, as the constructor takes it.

    Raises UserError if the ranks read different shards.
    """
    first = records[0]
    if any((record["order"], record["lanes"]) != (first["order"], first["lanes"]) for record in records):
        raise UserError(
            "data.train: the processes see different shards; every node must have the same list and the same counts"
        )
    merged = {lane: place for record in records for lane, place in record["at"].items()}
    if len(merged) != first["lanes"]:
        raise ValueError(f"positions of {len(merged)} lanes, of {first['lanes']}: pass the record of every rank")
    return {"order": first["order"], "lanes": first["lanes"], "at": merged}
