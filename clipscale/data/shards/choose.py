"""From settings to an order: which shards, whether their samples are counted, and in how many shard streams they are read."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from clipscale.config.data import DataConfig
from clipscale.data.order import Epochs, Order, Resampled, default_streams, streams_fit
from clipscale.data.shards import listing as shards
from clipscale.errors import UserError

log = logging.getLogger(__name__)


def list_shards(config: DataConfig) -> tuple[list[str], list[float] | None]:
    """Every shard of every source, and per shard the share of its source's weight (None: no weights given). Raises UserError."""
    if not config.train:
        raise UserError("data.train is not set; give shards, for example data.train='/data/{00000..00099}.tar'")
    sources = [config.train] if isinstance(config.train, str) else list(config.train)
    listed = [shards.expand(source, config.allow_pipe, table=config.table) for source in sources]
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
    """Exact epochs where the samples can be counted, else shards drawn with replacement; and how many shard streams. Raises UserError."""
    counts = shards.noted_counts(urls, config.cache)
    if config.order == "epochs" and weights is not None:
        raise UserError("data.weights and data.order=epochs exclude each other; weights need data.order=resampled")
    wants_epochs = config.order == "epochs" or (config.order == "auto" and weights is None)
    if wants_epochs:
        unknown = [url for url, count in zip(urls, counts) if count is None]
        local = all(shards.is_local(url) for url in unknown)
        if unknown and local and (config.order == "epochs" or len(urls) <= shards.SCAN_AT_MOST):
            scanned = dict(zip(unknown, shards.scanned_counts(unknown, config.cache)))
            counts = [scanned[url] if count is None else count for url, count in zip(urls, counts)]
        elif unknown and config.order == "epochs":
            raise UserError(
                f"data.order=epochs: the samples in {unknown[0]} are not known; run `clipscale data index` on the shards, "
                "or take data.order=resampled"
            )
    known = [count for count in counts if count is not None]
    exact = wants_epochs and len(known) == len(counts)
    if wants_epochs and not exact:
        log.warning(
            "the samples of %d shards are not known: shards are drawn with replacement (data.order=resampled)",
            len(urls),
        )
    total = sum(known) if exact else None
    if len(known) == len(counts) and not sum(known):
        raise UserError(
            f"data.train={config.train}: the {len(urls)} shards hold no sample; check that they are image-text tar files"
        )
    streams = _stream_count(config, batch, world, total, position)
    if exact:
        return Epochs(tuple(known), batch, streams, seed)
    if weights is None:
        weights = [float(count) for count in known] if len(known) == len(counts) else [1.0] * len(counts)
    cumulative = np.cumsum(weights)
    return Resampled(tuple(cumulative.tolist()), tuple(counts), streams, seed)


def _stream_count(
    config: DataConfig, batch: int, world: int, total: int | None, position: dict[str, Any] | None
) -> int:
    if position is not None:
        streams = int(position["lanes"])
        if streams % world:
            raise UserError(
                f"resume: the checkpoint's data position has {streams} shard streams, which {world} processes cannot share; "
                f"resume with a number of processes that divides {streams}"
            )
        if streams_fit(streams, batch, total):
            return streams
        log.warning(
            "the checkpoint's %d shard streams do not fit this batch and data; its data position is given up", streams
        )
    streams = config.shard_streams or default_streams(batch, world, total)
    if streams % world:
        raise UserError(f"data.shard_streams={streams} is not a multiple of the {world} processes; take a multiple")
    if not streams_fit(streams, batch, total):
        size = f"the batch of {batch}" if streams > batch else f"the {total} samples in data.train"
        raise UserError(f"data.shard_streams={streams}: too many for {size}; take fewer, fewer processes or more data")
    return streams
