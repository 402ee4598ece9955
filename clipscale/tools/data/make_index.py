"""The verb `clipscale data index`, and the shards that tools take as plain arguments."""

from collections.abc import Sequence

from clipscale.common.cpu import cores
from clipscale.common.errors import UserError
from clipscale.common.terminal import print_line, tracked
from clipscale.common.text import counted
from clipscale.common.units import format_bytes
from clipscale.config.data import DataConfig
from clipscale.data.shards import index, listing
from clipscale.data.shards.subset import subset_of
from clipscale.tools.data.settings import IndexSettings


def expand_sources(sources: Sequence[str]) -> list[str]:
    """The shards that the arguments name, each once. Raises UserError."""
    if not sources:
        raise UserError("no shards given; for example: clipscale data index '/data/{00000..00099}.tar'")
    urls = (url for source in sources for url in listing.expand(source, setting="shards"))
    return list(dict.fromkeys(urls))


def main(sources: Sequence[str], settings: IndexSettings) -> int:
    """Index the shards, and print their samples and bytes. Returns 1 if one is damaged or cannot be read."""
    urls = expand_sources(sources)
    subset = subset_of(DataConfig(only_keys=settings.only_keys, sample_weights=settings.sample_weights))
    outcomes = dict(tracked(index.update_indexes(urls, subset, workers=cores()), "indexing shards", len(urls)))
    entries = index.read_entries(urls, subset).entries.values()
    samples = sum(entry.samples for entry in entries)
    size = sum(entry.size for entry in entries)
    print_line(f"{counted(samples, 'sample')} in {counted(len(entries), 'shard')}, {format_bytes(size)}")
    damage = [f"not indexed: {url}: {outcome}" for url, outcome in outcomes.items() if isinstance(outcome, str)]
    damage += [f"{entry.reason} after {entry.samples} samples: {entry.detail}" for entry in entries if entry.reason]
    for line in damage:
        print_line(line)
    return 1 if damage else 0
