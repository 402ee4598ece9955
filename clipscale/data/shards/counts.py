"""Counts the samples of shards, and builds the order that the counts allow."""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from clipscale.common.errors import UserError
from clipscale.common.ranks import OnRank0, in_this_process
from clipscale.config.data import DataConfig
from clipscale.data.addresses import is_local
from clipscale.data.hashing import utf8
from clipscale.data.order import BatchShare, Epochs, Order, Resampled, WeightedSources, default_streams, streams_fit
from clipscale.data.shards import index
from clipscale.data.shards.requests import SourceError
from clipscale.data.shards.subset import Subset, subset_of
from clipscale.data.shards.unusable import RULE

log = logging.getLogger(__name__)
Counts = list[int | None]
# At most this many shards without an index are scanned for their counts: more would delay the start of a run.
SCAN_AT_MOST = 256
# Most bytes that are read to count samples before a run is planned.
MAX_COUNTED_BYTES = 2**26


def count_samples(urls: Sequence[str], subset: Subset | None = None, *, scan_at_most: float = math.inf) -> Counts:
    """The number of samples of each shard, or of its samples in a subset; None if unknown. See `shard_entries`."""
    return _counts_of(shard_entries(urls, subset, scan_at_most=scan_at_most))


def _counts_of(entries: Sequence[index.IndexEntry | None]) -> Counts:
    return [None if entry is None else entry.samples for entry in entries]


def shard_entries(
    urls: Sequence[str], subset: Subset | None = None, *, scan_at_most: float = math.inf
) -> list[index.IndexEntry | None]:
    """The entry of each shard, or of its samples in a subset, from the indexes; None if unknown. Warns of shards that
    have changed or are damaged.

    Also reads the shards that no index has, if they are at most `scan_at_most` and all local, and writes their counts
    to an index in the user's cache. In a damaged shard the samples before the damage count.
    """
    state = index.read_entries(urls, subset)
    if state.stale:
        problem = f"the index of {len(state.stale)} of {len(urls)} shards is out of date (first: {min(state.stale)})"
        log.warning(f"{problem}: they have changed; run `clipscale data index` again")
    if outdated := state.by_earlier_rule:
        problem = f"the index of {len(outdated)} of {len(urls)} shards (first: {outdated[0]}) is an earlier version's"
        log.warning(
            f"{problem}, which counts no links and takes repeated members for one; run `clipscale data index` again"
        )
    entries = state.entries
    unknown = [url for url in urls if url not in entries]
    if len(unknown) <= scan_at_most and all(map(is_local, unknown)):
        for url, outcome in _scanned(unknown, subset):
            if isinstance(outcome, str):  # the shard cannot be opened
                outcome = index.IndexEntry(
                    name=index.name_in_index(url),
                    size=0,
                    version="",
                    samples=0,
                    reason="unreadable_shard",
                    detail=f"{url}: {outcome}",
                    weight=0.0,
                )
            if outcome is not None:
                entries[url] = outcome._replace(offsets=None)
        # Another process may have written an entry since the look-up: such a shard is not scanned again.
        if since := [url for url in unknown if url not in entries]:
            entries |= index.read_entries(since, subset).entries
    damaged = [url for url in urls if url in entries and entries[url].reason]
    if damaged:
        first = f"{damaged[0]}, {why_damaged(damaged[0], entries[damaged[0]])}"
        problem = f"{len(damaged)} of {len(urls)} shards are damaged (first: {first})"
        log.warning(f"{problem}: what lies behind the damage is left out; `clipscale data check` shows it all")
    return [entries.get(url) for url in urls]


def count_if_quick(config: DataConfig, urls: Sequence[str] | None) -> int | None:
    """The samples of an epoch of local shards; None where it has no length (`data.weights`, `data.order=resampled`).

    Also None if too many or too large shards have no index, or one of these cannot be read.

    Writes no index and logs no warning: the run does both later.
    """
    if not urls or config.weights is not None or config.order == "resampled":
        return None
    subset = subset_of(config)
    entries = index.read_entries(urls, subset).entries
    unknown = [url for url in urls if url not in entries]
    with suppress(OSError, SourceError):  # the run warns of a shard that cannot be read, and goes on
        if len(unknown) > SCAN_AT_MOST or sum(Path(url).stat().st_size for url in unknown) > MAX_COUNTED_BYTES:
            return None
        for url in unknown:
            entries[url] = index.scan_shard(url, subset)
        return round(sum(entries[url].expected_samples for url in urls))
    return None


def why_damaged(url: str, entry: index.IndexEntry) -> str:
    """The reason and the detail, without the shard's name."""
    return f"{entry.reason}: {entry.detail.removeprefix(f'{utf8(url)}: ')}"


def _counted(urls: Sequence[str], entries: Sequence[index.IndexEntry | None]) -> tuple[Counts, float, str]:
    """Each shard's number of samples, the known shards' samples in an average epoch, and what is wrong with the first
    damaged shard. The last one is empty if no shard is damaged."""
    expected = sum(entry.expected_samples for entry in entries if entry)
    damage = ""
    for url, entry in zip(urls, entries):
        if entry and entry.reason:
            damage = f"{url}: {why_damaged(url, entry)}"
            break
    return _counts_of(entries), expected, damage


def _scanned(urls: Sequence[str], subset: Subset | None) -> Iterator[tuple[str, index.Outcome]]:
    try:
        yield from index.update_indexes(urls, subset, in_folder=False)
    except UserError as error:
        log.warning("counts are not remembered: %s", error)
        yield from ((url, index.scan_changed(subset, url)) for url in urls)


def build_order(
    config: DataConfig,
    urls: Sequence[str],
    source_of: Sequence[int] | None,
    share: BatchShare,
    seed: int,
    num_streams: int | None = None,
    on_rank0: OnRank0 = in_this_process,
) -> Order:
    """The order of all samples. `num_streams`: the checkpoint's number of shard streams, used if it fits.

    Exact epochs if every shard's samples are known. Otherwise shards are drawn with replacement, or mixed by
    `data.weights`; `source_of` is each shard's source. `on_rank0` counts the samples. Raises UserError.
    """
    if config.order == "epochs" and source_of is not None:
        raise UserError("data.weights and data.order=epochs exclude each other; weights need data.order=resampled")
    epochs = config.order != "resampled" and source_of is None
    scan_at_most: float = SCAN_AT_MOST if epochs else 0
    if config.order == "epochs":
        scan_at_most = math.inf
    subset = subset_of(config)
    counts, expected, damage = on_rank0(lambda: _counted(urls, shard_entries(urls, subset, scan_at_most=scan_at_most)))
    known_counts = [count for count in counts if count is not None]
    unknown = len(urls) - len(known_counts)
    if not unknown and not sum(known_counts):
        listed = f" that {subset.file.setting} lists" if subset else ""
        problem = f"the {len(urls)} shards hold no sample{listed}; {damage or RULE}"
        raise UserError(f"data.train={config.train}: {problem}; `clipscale data check` shows what they hold")
    if epochs and not unknown:
        num_streams = _streams(config, share, sum(known_counts), num_streams)
        return Epochs(tuple(known_counts), share.global_batch, num_streams, seed, expected)
    if epochs:
        listed = f" {subset.file.setting.removeprefix('data.')}" if subset else ""
        problem = (
            f"the samples of {unknown} of {len(urls)} shards are not known: run `clipscale data index SHARDS{listed}`"
        )
        if config.order == "epochs":
            raise UserError(f"data.order=epochs: {problem}, or take data.order=resampled")
        log.warning(f"{problem}; shards are drawn with replacement (data.order=resampled)")
    num_streams = _streams(config, share, None, num_streams)
    if source_of is None:
        usable = [shard for shard, count in enumerate(counts) if count != 0]
        return Resampled(tuple(usable), tuple(counts), num_streams, seed)
    assert config.weights is not None and config.train is not None
    filled = {source for source, count in zip(source_of, counts) if count != 0}
    for number, weight in enumerate(config.weights):
        if weight and number not in filled:
            raise UserError(f"data.train: {config.train[number]} has data.weights={weight:g} and holds no sample")
    return WeightedSources(tuple(map(float, config.weights)), tuple(source_of), tuple(counts), num_streams, seed)


def _streams(config: DataConfig, share: BatchShare, samples: int | None, earlier: int | None) -> int:
    """The number of shard streams: the checkpoint's (`earlier`) if it fits, else the setting, else the default."""
    global_batch = share.global_batch
    if earlier is not None and streams_fit(earlier, global_batch, samples):
        return earlier
    num_streams = config.shard_streams or default_streams(global_batch, share.world_size, samples)
    if not streams_fit(num_streams, global_batch, samples):
        size = f"the batch of {global_batch}" if num_streams > global_batch else f"the {samples} samples in data.train"
        raise UserError(
            f"data.shard_streams={num_streams}: too many for {size}; take fewer, fewer processes or more data"
        )
    return num_streams
