"""Opens streams over test shards, and reads their batches."""

import json
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from clipscale.config.data import DataConfig
from clipscale.data.addresses import basename
from clipscale.data.filters import Selection, parse_selection
from clipscale.data.hashing import hash64
from clipscale.data.loader import open_stream as loader
from clipscale.data.loader.batch_filler import Report, open_filler
from clipscale.data.loader.host_batch import Arena, HostBatch
from clipscale.data.loader.position import DataPosition, merge_positions
from clipscale.data.loader.shard_reader import OrderedShards, ShardReader
from clipscale.data.loader.shard_stream import WorkerSpec
from clipscale.data.loader.stream import TrainStream
from clipscale.data.loader.workers import Workers
from clipscale.data.order import BatchShare, Segment
from clipscale.data.sample import RawSample
from clipscale.data.shards.reader import ReadFailure, read_shard
from clipscale.data.shards.store import Store
from clipscale.data.shards.subset import Subset
from tests.data.files import SIDE, Letters


def sample_id(url: str, key: str) -> int:
    """A number for a sample, whatever its shard's folder."""
    return hash64(f"{basename(url)}/{key}") >> 1


class Known(Selection):
    """Samples' keys are their ids."""

    def sameness_key(self, sample: RawSample, caption: str, own: str) -> int:
        return sample_id(sample.url, sample.key)


def read(url: Path | str, **options: Any) -> tuple[list[RawSample], ReadFailure]:
    """A shard's samples, and what was wrong with it."""
    problem = ReadFailure()
    return list(read_shard(str(url), problem, **options)), problem


def open_stream(
    folder: Path | str, /, *, batch: int, rank: int = 0, world_size: int = 1, tokenizer: Any = None, **options: Any
) -> TrainStream:
    seed = options.pop("seed", 0)
    position = options.pop("position", None)
    side = options.pop("side", SIDE)
    gpu = options.pop("gpu", False)
    kind = options.pop("selection", Selection if "same" in options else Known)
    config = DataConfig(**{"train": [str(folder)], "workers": 0, "shuffle": 8, **options})
    share = BatchShare(batch, rank, world_size)
    with mock.patch.object(
        loader, "parse_selection", lambda config, **given: kind(**vars(parse_selection(config, **given)))
    ):
        shards = loader.order_shards(config, share, seed, position)
        return loader.open_stream(
            config, share, side, tokenizer or Letters(), shards, position=position, pin_memory=gpu
        )


def contents(stream: TrainStream, steps: int) -> list[tuple[list[int], bytes, bytes]]:
    """Returns keys (samples' ids, where nothing else is said), pixels and tokens of each of the next batches."""
    return [content(stream.next_batch()) for _ in range(steps)]


def content(batch: HostBatch) -> tuple[list[int], bytes, bytes]:
    """The keys, pixels and tokens of a batch."""
    pixels = torch.cat([batch.pixels(row, row + 1).clone() for row in range(len(batch))])
    tokens = batch.tokens(0, batch.num_texts)
    return batch.sameness_keys().tolist(), pixels.numpy().tobytes(), tokens.numpy().tobytes()


def ids(stream: TrainStream, steps: int) -> list[list[int]]:
    return [actual[0] for actual in contents(stream, steps)]


def processes_of(stream: TrainStream) -> list[Any]:
    """The stream's worker processes."""
    assert isinstance(stream.workers, Workers)
    return stream.workers.processes


def flat(batches: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


def all_ids(paths: list[Path], sizes: list[int]) -> Counter[int]:
    return Counter(sample_id(str(path), f"{path.stem}{i:04d}") for path, size in zip(paths, sizes) for i in range(size))


def positions(streams: list[TrainStream]) -> DataPosition:
    """The streams' position, as a checkpoint would hold it."""
    merged = merge_positions([stream.position() for stream in streams])
    return DataPosition.from_state_dict(json.loads(json.dumps(merged.state_dict())))


class OneSegment:
    """An order whose first epoch is one segment. Each later epoch is its first sample."""

    streams = 1

    def __init__(self, segment: Segment, seed: int) -> None:
        self.segment = segment
        self.seed = seed

    def segments(self, stream: int, epoch: int, skip: int = 0) -> Iterator[Segment]:
        yield replace(self.segment, start=0, stop=1) if epoch else self.segment


def items_of(
    segment: Segment,
    url: str,
    *,
    window: int = 256,
    seed: int = 0,
    size_limits: Any = None,
    subset: Subset | None = None,
    use: Callable[[Any], Any] = lambda item: item,
) -> list[Any]:
    """Every item of a shard's segment in its order, or what `use` makes of it."""
    shards = OrderedShards((url,), OneSegment(segment, seed), window)
    items = []
    reader = ShardReader(shards, 0, (0, 0), size_limits, Store(), subset)
    for _, item in reader.items:
        if reader.epoch:
            reader.items.close()
            break
        items.append(use(item))
    return items


class WorkersInThisProcess:
    """Stands for the worker processes: does their work in this process, piece by piece.

    A random number says which worker is next.
    """

    def __init__(self, random: random.Random, specs: Sequence[WorkerSpec], arena: Arena, *_: object) -> None:
        self._random = random
        self.fillers = [open_filler(spec, arena, lambda: None) for spec in specs]
        self._steps: list[deque[int]] = [deque() for _ in specs]
        self._reports: list[Iterator[Report]] = [iter(()) for _ in specs]

    def __len__(self) -> int:
        return len(self.fillers)

    def fill(self, step: int) -> None:
        for steps in self._steps:
            steps.append(step)

    def receive(self, needed: Sequence[int], poll: Callable[[], None] = lambda: None) -> list[tuple[int, Report]]:
        """Some reports, of workers that may be ahead of what is needed or behind it."""
        actual = []
        while needed and not actual:
            number = self._random.randrange(len(self))
            report = next(self._reports[number], None)
            if report is None and self._steps[number]:
                self._reports[number] = self.fillers[number].fill(self._steps[number].popleft())
                report = next(self._reports[number])
            assert report or any(self._steps[n] or n != number for n in needed), "no worker has anything left to report"
            actual += [(number, report)] if report else []
        return actual

    def close(self) -> None:
        for filler in self.fillers:
            filler.close()


@contextmanager
def inline_workers(seed: int) -> Iterator[None]:
    """Streams that are opened here have no processes, but their workers' division of the work."""
    chosen = random.Random(seed)
    with mock.patch(
        "clipscale.data.loader.open_stream.start_workers", lambda *given: WorkersInThisProcess(chosen, *given)
    ):
        yield
