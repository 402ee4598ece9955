"""The training stream: which sample comes when, and how it reaches the host batch.

Lanes (order.py) fix the order; worker processes (workers.py) read and decode; this file joins them to the training loop.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import psutil
import torch

from clipscale.data.batch import Arena, HostBatch, arena_layout
from clipscale.data.choose import choose_order, list_shards
from clipscale.data.config import DataConfig, check
from clipscale.data.decode import TrainTransform
from clipscale.data.filters import selection
from clipscale.data.lanes import TRUNCATED, LaneShare, Plan, Producer
from clipscale.data.order import Epochs, fingerprint
from clipscale.data.sources import SEEN, Access
from clipscale.data.workers import Report, Workers, reports
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
    ) -> None:
        """`batch` is the global batch, a multiple of `world`; `position` a record merged over ranks, to go on from.

        `sizes` says how large the i-th batch from here on is, where it is not always `batch`: it never shrinks, ends at `batch`, and every
        size is a multiple of `world` and of the lanes, so that all lanes come to the end of an epoch together.
        Raises UserError for settings or shards that cannot work.
        """
        check(config, batch, world)
        chosen = selection(config.caption_key, config.captions, config.templates, config.filter)
        urls, weights = list_shards(config)
        self._sizes = sizes or (lambda _: batch)
        least = self._sizes(0)
        self._order = choose_order(config, urls, weights, least, world, seed, position)
        if least != batch and least % self._order.lanes:
            raise UserError(
                f"ramp.start: a batch of {least} is not a multiple of the {self._order.lanes} lanes in which the data is read; "
                "set data.lanes to a divisor of it"
            )
        self._fingerprint = fingerprint(self._order, [url.rsplit("/", 1)[-1] for url in urls], max(config.shuffle, 1))
        self._positions = self._starts(position, rank, world)
        shares = [LaneShare(lane, turn, index) for lane, (turn, index) in sorted(self._positions.items())]
        self._world = world
        largest = batch // world
        workers = min(config.workers, len(shares))
        if workers < config.workers:
            message = "data.workers=%d: this rank has only %d lanes, so %d workers; raise data.lanes"
            log.warning(message, config.workers, len(shares), workers)
        slots = config.buffers if workers else 1
        self._arena = allocate(slots, largest, image_size, np.asarray(tokenizer(["a"])).shape[1])
        if pin and torch.cuda.is_available():
            self._arena.pin()
        # striped, so that the batch fills from its first rows on, by all workers at once
        stripes = [tuple(shares[number :: max(workers, 1)]) for number in range(max(workers, 1))]
        scale, ratio = config.augment.scale, config.augment.ratio
        self._plans = [
            Plan(
                urls=tuple(urls),
                order=self._order,
                window=max(config.shuffle, 1),
                seed=seed,
                transform=TrainTransform(
                    image_size, (scale[0], scale[1]), (ratio[0], ratio[1]), config.augment.flip, config.max_pixels
                ),
                tokenizer=tokenizer,
                selection=chosen,
                access=Access(config.cache, config.cache_bytes, config.retries),
                rank=rank,
                world=world,
                shares=stripe,
                piece=max(PIECE, largest // (len(stripes) * PIECES)),
            )
            for stripe in stripes
        ]
        self._known_places: dict[int, list[np.ndarray]] = {}
        self.broken: Counter[str] = Counter()
        """Reason -> samples passed over so far, on this rank."""
        self.seen: Counter[str] = Counter()
        """What went wrong so far without costing a sample: requests made again and the like."""
        self.truncated = 0
        """Captions so far that filled the whole context: cut, or exactly as long."""
        self._wait_s = 0.0
        self._step = -1
        self._done: dict[int, list[int]] = {}
        self._ends: dict[int, dict[int, tuple[int, int]]] = {}
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
            self._reports = reports(self._producer, self._arena, step, self._sizes(step))

        def wait(stop: int) -> None:
            if step != self._step:
                raise RuntimeError("this batch is no longer valid: the next one has been asked for")
            self._wait(step, stop)

        slot = self._arena.slots[step % len(self._arena.slots)]
        return HostBatch(slot.first(self._sizes(step) // self._world), wait)

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

    # -- arrival -------------------------------------------------------------------------------------------------------

    def _allow(self, step: int) -> None:
        self._done[step] = [0] * len(self._plans)
        self._ends[step] = {}
        if self._workers:
            self._workers.allow(step, self._sizes(step))

    def _wait(self, step: int, stop: int) -> None:
        """Block until rows 0..stop of batch `step` have arrived."""
        batch = self._sizes(step)
        if not 0 <= stop <= batch // self._world:
            raise ValueError(f"row {stop} lies outside the local batch of {batch // self._world}")
        needed = [int(np.searchsorted(places, stop)) for places in self._places(batch)]
        self._pump(lambda: [n for n, need in enumerate(needed) if self._done[step][n] < need])

    def _places(self, batch: int) -> list[np.ndarray]:
        """For each worker the places that it fills of a global batch of that size, in its order, which is theirs."""
        if batch not in self._known_places:
            self._known_places = {batch: [np.array([p for _, p in plan.places(batch)]) for plan in self._plans]}
        return self._known_places[batch]

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
        for reason, count in report.broken.items():
            if reason == SEEN + TRUNCATED:
                self.truncated += count
                continue
            own, name = (self.seen, reason.removeprefix(SEEN)) if reason.startswith(SEEN) else (self.broken, reason)
            own[name] += count
        if report.positions is not None:
            self._ends[report.step].update(report.positions)
        elif report.step >= 0:
            self._done[report.step][number] = report.done


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
