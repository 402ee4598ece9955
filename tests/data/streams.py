"""Opening a stream over test shards and reading what it gives."""

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from clipscale.data.batch import sample_id
from clipscale.data.config import DataConfig
from clipscale.data.stream import TrainStream
from tests.data.files import SIDE, Letters


def open_stream(
    folder: Path | str, /, *, batch: int, rank: int = 0, world: int = 1, tokenizer: Any = None, **options: Any
) -> TrainStream:
    seed, position = options.pop("seed", 0), options.pop("position", None)
    kept = {name: options.pop(name) for name in ("sizes", "tier", "chunk", "folder", "device") if name in options}
    side = options.pop("side", SIDE)
    config = DataConfig(**{"train": [str(folder)], "workers": 0, "shuffle": 8, **options})
    return TrainStream(
        config,
        image_size=side,
        tokenizer=tokenizer or Letters(),
        batch=batch,
        rank=rank,
        world=world,
        seed=seed,
        position=position,
        **kept,
    )


def contents(stream: TrainStream, steps: int) -> list[tuple[list[int], bytes, bytes]]:
    """Of each of the next batches: ids, pixels, tokens."""
    found = []
    for _ in range(steps):
        batch = stream.next_batch()
        pixels, tokens = batch.pixels(0, len(batch)), batch.tokens(0, len(batch))
        found.append((batch.ids().tolist(), pixels.numpy().tobytes(), tokens.numpy().tobytes()))
    return found


def ids(stream: TrainStream, steps: int) -> list[list[int]]:
    return [found[0] for found in contents(stream, steps)]


def flat(batches: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


def all_ids(paths: list[Path], sizes: list[int]) -> Counter[int]:
    return Counter(sample_id(str(path), f"{path.stem}{i:04d}") for path, size in zip(paths, sizes) for i in range(size))
