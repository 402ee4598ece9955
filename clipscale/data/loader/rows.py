"""Image rows of a batch: what they are, the memory they wait in, and how those come back that wait encoded or on disk.

C: channels, S: side in pixels, D: width of stored features.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from clipscale.config.data import DataConfig
from clipscale.data.decode import IMAGE_TYPES, Colour, TrainTransform
from clipscale.data.features import StoredFeatures
from clipscale.data.loader.host_batch import Arena, Layout, Slot
from clipscale.data.loader.memory import fitted, picture_bytes
from clipscale.data.loader.offload import Prefetcher, Transform, tier_of
from clipscale.data.loader.workers import Loaded, Workers
from clipscale.data.shards.access import Access

LOADERS = 4
"""Threads that decode the chunks of offload=encoded where there are no worker processes to do it."""


class Kind(NamedTuple):
    """What a row is made of, and how."""

    transform: Transform
    members: tuple[str, ...]
    """Of a sample; the first that is there goes to `transform`."""
    shape: tuple[int, ...]
    """(C, S, S), or (D,)."""
    dtype: str


def row_kind(config: DataConfig, side: int, stored: StoredFeatures | None) -> Kind:
    """Stored features, or pictures of `side` pixels as the settings ask."""
    if stored:
        return Kind(stored, (stored.member,), (stored.width,), stored.dtype)
    return Kind(train_transform(config, side), IMAGE_TYPES, (3, side, side), "uint8")


def train_transform(config: DataConfig, side: int) -> TrainTransform:
    """From picture bytes to `side` pixels as the settings ask."""
    augment = config.augment
    (least, most), (narrow, wide) = augment.scale, augment.ratio
    colour = None
    if any(augment.jitter) or augment.greyscale:
        colour = Colour(augment.jitter, augment.jitter_probability if any(augment.jitter) else 0.0, augment.greyscale)
    return TrainTransform(
        side,
        (least, most),
        (narrow, wide),
        augment.flip,
        config.max_pixels,
        fast=config.decode == "fast",
        colour=colour,
    )


def arena_for(
    layout: Layout, urls: Sequence[str], members: Sequence[str], access: Access, *, free: int | None, pin: bool
) -> tuple[Arena, str]:
    """The batches' memory, with `pin` page-locked where that can be, and a line that states it. Raises UserError for too little of it."""
    size = picture_bytes(urls, members, layout, access) if layout.encoded else None
    layout, said = fitted(layout, size, free)
    arena = Arena(layout)
    if pin and torch.cuda.is_available():
        arena.pin()
    return arena, f"{said}; {arena.pin_failure}" if arena.pin_failure else said


class Stopwatch:
    """Seconds spent within it, added up."""

    def __init__(self) -> None:
        self._begun = self._seconds = 0.0

    def __enter__(self) -> None:
        self._begun = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._seconds += time.monotonic() - self._begun

    def take(self) -> float:
        """The sum since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class Returning:
    """Rows that wait encoded or on disk, brought back into `window`: by the workers that decode, else by threads of this process."""

    def __init__(
        self,
        arena: Arena,
        transform: Transform,
        workers: Workers | None,
        pump: Callable[[Callable[[], list[int]]], None],
        waited: Stopwatch,
        *,
        copy: bool,
    ) -> None:
        """`pump` hears the workers until those that its argument names are none."""
        self._arena, self._pump, self._waited = arena, pump, waited
        self._workers = workers if arena.layout.tier == "encoded" else None
        self._missing: dict[int, list[int]] = {}
        self._ticket = 0
        self._threads: ThreadPoolExecutor | None = None
        if not self._workers:
            self._threads = ThreadPoolExecutor(1 if arena.layout.tier == "disk" else LOADERS, "load")
            self._tier = tier_of(arena, transform, (0, arena.layout.samples))
        begin = self._by_workers if self._workers else self._by_threads
        self.window = Prefetcher(arena.window, begin, copy=copy)

    def note(self, number: int, loaded: Loaded) -> None:
        """Worker `number` has done its share of what it was asked for."""
        self._missing[loaded.ticket].remove(number)

    def close(self) -> None:
        """End the threads."""
        if self._threads:
            self._threads.shutdown(cancel_futures=True)

    def _by_workers(self, slot: Slot, start: int, stop: int, buffer: int) -> Callable[[], None]:
        assert self._workers
        self._ticket = ticket = self._ticket + 1
        self._missing[ticket] = list(range(len(self._workers)))
        self._workers.load(ticket, slot.number, start, stop, buffer)

        def wait() -> None:
            self._pump(lambda: self._missing[ticket])
            del self._missing[ticket]

        return wait

    def _by_threads(self, slot: Slot, start: int, stop: int, buffer: int) -> Callable[[], None]:
        assert self._threads
        rows = self._arena.window[buffer, : stop - start]
        parts = [part for part in np.array_split(rows, self._threads._max_workers) if len(part)]
        firsts = accumulate((len(part) for part in parts), initial=start)
        futures = [self._threads.submit(self._tier.load, slot, first, part) for first, part in zip(firsts, parts)]

        def wait() -> None:
            with self._waited:
                for future in futures:
                    future.result()

        return wait
