"""Counts the samples of shards, and builds the order that the counts allow."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from clipscale.common.errors import UserError
from clipscale.config.data import DataConfig
from clipscale.data.order import Epochs, Mixed, Order, Resampled, default_streams, streams_fit
from clipscale.data.shards import index
from clipscale.data.shards.addresses import is_local, scheme_of
from clipscale.data.shards.subset import Subset, subset_of

log = logging.getLogger(__name__)

SCAN_AT_MOST = 256
"""Shards that are scanned to count their samples if no counts are recorded; more would delay the start of a run."""


def recorded_counts(urls: Sequence[str], subset: Subset | None = None) -> list[int | None]:
    """Samples per shard by an index, `sizes.json` (webdataset) or `NNNNN_stats.json` (img2dataset); None: unknown."""
    entries, stale = index.current(urls, subset.name if subset else "")
    if stale:
        what = f"the index of {len(stale)} of {len(urls)} shards is out of date (first: {stale[0]})"
        log.warning(f"{what}: they have changed; counting them without it, run `clipscale data index` again")
    _warn_of_damage(entries, len(urls))
    if subset:  # only its own index has those
        return [entries[url].samples if url in entries else None for url in urls]
    folders = {os.path.dirname(url) for url in urls if is_local(url)}  # noqa: PTH120 (as it is named)
    sizes = {folder: _json(Path(folder) / "sizes.json") for folder in folders}

    def recorded(url: str) -> int | None:
        if url in entries:
            return entries[url].samples
        if not is_local(url):
            return None
        folder, leaf = os.path.split(url)
        value = sizes[folder].get(leaf)
        if value is None:
            value = _json(Path(folder) / f"{leaf.split('.')[0]}_stats.json").get("successes")
        return value if isinstance(value, int) and value >= 0 else None

    with ThreadPoolExecutor(16) as pool:  # waits on the file system, seldom on the processor
        return list(pool.map(recorded, urls))


def _warn_of_damage(entries: Mapping[str, index.Entry], count: int) -> None:
    damaged = [(url, entry.reason) for url, entry in entries.items() if entry.reason]
    if damaged:
        url, reason = damaged[0]
        what = f"{len(damaged)} of {count} shards are damaged (first: {url}, {reason})"
        log.warning(f"{what}: what lies behind the damage is left out; `clipscale data check` shows it all")


def _json(path: Path) -> dict[str, Any]:
    """The object in a json file; empty if there is no such file or it is damaged."""
    try:
        value = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s cannot be read (%s); counting without it", path, error)
        return {}
    return value if isinstance(value, dict) else {}


def scan_counts(urls: Sequence[str], subset: Subset | None = None) -> list[int]:
    """Samples per local shard from its tar headers, or of a subset; an index in the user's cache remembers them. A
    damaged shard counts the samples before the damage."""
    name = subset.name if subset else ""
    scan = subset.scan if subset else index.scan_shard
    try:
        dict(index.update_indexes(urls, beside=False, subset=name, scan=scan))
        entries, _ = index.current(urls, name)
    except UserError as error:
        log.warning("counts are not remembered: %s", error)
        entries = {url: scan(url) for url in urls}
    _warn_of_damage(entries, len(urls))
    return [entries[url].samples if url in entries else 0 for url in urls]


def build_order(
    config: DataConfig,
    urls: Sequence[str],
    source_of: Sequence[int] | None,
    batch: int,
    world: int,
    seed: int,
    position: dict[str, Any] | None,
) -> Order:
    """The order of all samples, and the number of shard streams.

    Exact epochs where every shard's samples are known. Else shards are drawn with replacement, or mixed by
    `data.weights`; `source_of` is each shard's source. Raises UserError.
    """
    if config.order == "epochs" and source_of is not None:
        raise UserError("data.weights and data.order=epochs exclude each other; weights need data.order=resampled")
    epochs = config.order == "epochs" or (config.order == "auto" and source_of is None)
    subset, listed = subset_of(config.only_keys), f"data.only_keys={config.only_keys}"
    if subset and (others := [url for url in urls if scheme_of(url) == "pipe"]):
        raise UserError(f"{listed}: {others[0]} is no tar file; leave its samples out yourself")
    counts = recorded_counts(urls, subset)
    if epochs:
        counts = _scanned(config, urls, counts)
    known = [count for count in counts if count is not None]
    complete = len(known) == len(counts)
    if complete and not sum(known):
        wanted = "uids of the samples' json" if subset and subset.by_uid else "keys of samples"
        remedy = f"{listed} must have {wanted}" if subset else "check that they are image-text tar files"
        raise UserError(f"data.train={config.train}: the {len(urls)} shards hold no sample; {remedy}")
    if epochs and complete:
        return Epochs(tuple(known), batch, _stream_count(config, batch, world, sum(known), position), seed)
    if epochs:
        what = f"the samples of {len(urls)} shards are not known"
        log.warning(f"{what}: shards are drawn with replacement (data.order=resampled)")
    streams = _stream_count(config, batch, world, None, position)
    if source_of is None:
        weights = [float(count) for count in known] if complete else [1.0] * len(counts)
        return Resampled(tuple(np.cumsum(weights).tolist()), tuple(counts), streams, seed)
    assert config.weights is not None and config.train is not None
    for number, weight in enumerate(config.weights):
        if weight and not any(source == number and count != 0 for source, count in zip(source_of, counts)):
            raise UserError(f"data.train: {config.train[number]} has data.weights={weight:g} and holds no sample")
    return Mixed(tuple(map(float, config.weights)), tuple(source_of), tuple(counts), streams, seed)


def _scanned(config: DataConfig, urls: Sequence[str], counts: list[int | None]) -> list[int | None]:
    """The counts, with those of local shards that nothing records: they are scanned, unless they are too many."""
    unknown = [url for url, count in zip(urls, counts) if count is None]
    if unknown and all(map(is_local, unknown)) and (config.order == "epochs" or len(urls) <= SCAN_AT_MOST):
        scanned = dict(zip(unknown, scan_counts(unknown, subset_of(config.only_keys))))
        return [scanned[url] if count is None else count for url, count in zip(urls, counts)]
    if unknown and config.order == "epochs":
        listed = f" with only_keys={config.only_keys}" if config.only_keys else ""
        remedy = f"run `clipscale data index` on the shards{listed}, or take data.order=resampled"
        raise UserError(f"data.order=epochs: the samples in {unknown[0]} are not known; {remedy}")
    return counts


def _stream_count(
    config: DataConfig, batch: int, world: int, total: int | None, position: dict[str, Any] | None
) -> int:
    if position is not None:
        streams = int(position["streams"])
        if streams_fit(streams, batch, total):
            return streams
        log.warning(
            f"the checkpoint's {streams} shard streams do not fit this batch and data; its position is given up"
        )
    streams = config.shard_streams or default_streams(batch, world, total)
    if not streams_fit(streams, batch, total):
        size = f"the batch of {batch}" if streams > batch else f"the {total} samples in data.train"
        raise UserError(f"data.shard_streams={streams}: too many for {size}; take fewer, fewer processes or more data")
    return streams
