"""Opens the training data of a run: lists and orders its shards, and starts the workers of a `TrainStream`."""

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from torch import Tensor

from clipscale.common.cpu import cores_of_rank
from clipscale.common.ranks import OnRank0, in_this_process
from clipscale.common.signals import no_poll
from clipscale.config.data import DataConfig
from clipscale.data.filters import parse_selection
from clipscale.data.loader.batch_filler import open_filler
from clipscale.data.loader.host_batch import BatchLayout, check_memory, create_arena
from clipscale.data.loader.position import DataPosition, StreamPosition
from clipscale.data.loader.shard_reader import OrderedShards
from clipscale.data.loader.shard_stream import WorkerSpec
from clipscale.data.loader.stream import TrainStream
from clipscale.data.loader.workers import InProcessWorker, Workers, start_workers
from clipscale.data.order import BatchShare
from clipscale.data.shards.counts import build_order
from clipscale.data.shards.features import TeacherFeatures
from clipscale.data.shards.listing import list_shards
from clipscale.data.shards.subset import subset_of
from clipscale.data.tokenizer import Padding
from clipscale.data.train_transform import TrainTransform

log = logging.getLogger(__name__)

# A worker reports after this many samples: enough to tokenise together, few enough for the first chunk to start early.
SAMPLES_PER_REPORT = 64
# A worker sends at most about this many reports of a batch. More could fill the pipe, and block the worker, while the
# training process computes.
MAX_REPORTS = 64


def order_shards(
    config: DataConfig,
    share: BatchShare,
    seed: int,
    position: DataPosition | None = None,
    on_rank0: OnRank0 = in_this_process,
    limit_streams: Callable[[int], int] = lambda num_streams: num_streams,
    teachers: tuple[TeacherFeatures, ...] = (),
) -> OrderedShards:
    """List, count and order the training data. Takes as many shard streams as `position` has, if they fit.

    `on_rank0` counts every shard's samples on one rank. `limit_streams(n)`: the largest divisor of n that
    also divides the batch of every stage. `teachers`: their features lie beside the samples. Raises UserError.
    """
    urls, source_of = list_shards(config, on_rank0)
    earlier_streams = position.num_streams if position else None
    order = build_order(config, urls, source_of, share, seed, earlier_streams, on_rank0)
    if config.shard_streams is None:
        num_streams = limit_streams(order.num_streams)
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
    pin_memory: bool = False,
    free_bytes: int | None = None,
) -> TrainStream:
    """Open the stream of batches over `shards`, at the start or at the run's `position`.

    `image_size`: the side of the model's pictures in pixels. `pin_memory`: page-lock the batch memory. `free_bytes`:
    see `check_memory`. Raises UserError for settings or shards that cannot work.
    """
    selection = parse_selection(config, first_caption_only=bool(shards.teachers))
    empty_tokens, other_tokens = (np.asarray(tokenizer([text]))[0] for text in ("", "a"))
    start_by_stream = start_positions(shards, position, share)
    num_workers = worker_count(config, len(start_by_stream))
    layout = layout_of(config, share.local_batch, image_size, len(empty_tokens), num_workers, shards.teachers)
    memory_line = check_memory(layout, free_bytes)
    arena = create_arena(layout)
    num_fillers = max(1, num_workers)
    spec = WorkerSpec(
        shards=shards,
        subset=subset_of(config),
        repeats_samples=bool(config.sample_weights),
        timeout_s=config.timeout_s,
        transform=TrainTransform(image_size, config.augment),
        tokenizer=tokenizer,
        padding=Padding.from_tokens(empty_tokens, other_tokens),
        selection=selection,
        start_by_stream=start_by_stream,
        share=share,
        samples_per_report=max(SAMPLES_PER_REPORT, share.local_batch // (num_fillers * MAX_REPORTS)),
    )
    # Workers take streams in turn, so that all of them fill the batch from its first rows on.
    streams = list(start_by_stream.items())
    specs = [replace(spec, start_by_stream=dict(streams[number::num_fillers])) for number in range(num_fillers)]
    readers: Workers | InProcessWorker
    if num_workers:
        readers = start_workers(specs, arena, config.timeout_s)
    else:
        readers = InProcessWorker(open_filler(specs[0], arena, no_poll))
    stream = TrainStream(specs, arena, readers, start_by_stream, memory_line)
    stream.request_first()
    if pin_memory:
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
    num_workers: int,
    teachers: tuple[TeacherFeatures, ...] = (),
) -> BatchLayout:
    """The batch memory of a rank with `samples` samples in its local batch."""
    return BatchLayout(
        slots=config.buffers if num_workers else 1,
        samples=samples,
        image_size=image_size,
        context_length=context_length,
        text_layout=config.text_layout,
        teachers=teachers,
    )
