"""`clipscale data index` and `clipscale data stats`: from words on the command line to an index, and from an index to a table."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from clipscale.data import index, shards
from clipscale.data.sources import Access, is_local
from clipscale.errors import UserError


@dataclass
class IndexSettings:
    """`clipscale data index SHARD...`: note counts, places, sizes and checksums beside the shards."""

    cache: str | None = None
    """Folder for the index instead of the shards' own; where those cannot be written or are remote, the user's cache folder is taken."""
    checksum: bool = True
    """Read everything, for a checksum; false: the headers alone."""
    workers: int | None = None
    """Processes; null: one a core."""
    force: bool = False
    """Read the unchanged shards again too."""
    allow_pipe: bool = False
    """Permit `pipe:` addresses, which run a shell command."""


@dataclass
class StatsSettings:
    """`clipscale data stats SHARD...`: samples and bytes, from the index."""

    cache: str | None = None
    """Folder where the index lies if not beside the shards."""
    json: bool = False
    """Print JSON."""


def named(sources: Sequence[str], allow_pipe: bool = False) -> list[str]:
    """The shards that words on the command line name, each once. Raises UserError."""
    if not sources:
        raise UserError("no shards given; for example: clipscale data index '/data/{00000..00099}.tar'")
    return list(dict.fromkeys(url for source in sources for url in shards.expand(source, allow_pipe, setting="shards")))


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def progress(console: Console) -> Progress:
    """A bar that counts bytes and names shards."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def make_index(sources: Sequence[str], settings: IndexSettings) -> int:
    """Index the shards; status 1 where one is damaged or cannot be read."""
    urls = [url for url in named(sources, settings.allow_pipe) if not url.startswith("pipe:")]
    total = sum(os.path.getsize(url) for url in urls if is_local(url) and os.path.exists(url))  # noqa: PTH110, PTH202 (fast)
    damaged: list[tuple[str, index.Entry]] = []
    count = 0
    with progress(Console(stderr=True)) as bar:
        task = bar.add_task(f"0 of {len(urls)} shards", total=total or None)

        def done(url: str, size: int, entry: index.Entry | None) -> None:
            nonlocal count
            count += 1
            bar.update(task, advance=size, description=f"{count} of {len(urls)} shards")
            if entry is not None and entry.reason:
                damaged.append((url, entry))

        tally = index.update(
            urls,
            place=lambda folder: index.place_for(folder, settings.cache),
            access=Access(cache=None),
            checksum=settings.checksum,
            workers=settings.workers or cores(),
            force=settings.force,
            done=done,
        )
    entries, _ = index.current(urls, settings.cache)
    samples = sum(entry.samples for entry in entries.values())
    print(f"{samples} samples in {len(entries)} shards; {tally.read} indexed now, {tally.kept} unchanged")
    for url, entry in damaged:
        print(f"{entry.reason} after {entry.samples} samples: {entry.detail or url}")
    for url, why in (tally.failed or {}).items():
        print(f"not indexed: {url}: {why}")
    for place in sorted({str(index.place_for(index.folder_of(url), settings.cache)) for url in urls}):
        print(f"  {place}")
    return 1 if damaged or tally.failed else 0


def show_stats(sources: Sequence[str], settings: StatsSettings) -> int:
    """Print what the indexes say of the shards; local shards without one have their headers read."""
    urls = named(sources)
    entries, _ = index.current(urls, settings.cache)
    missing = [url for url in urls if url not in entries and is_local(url)]
    if missing:
        shards.scanned_counts(missing, settings.cache)
        entries, _ = index.current(urls, settings.cache)
    members: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for entry in entries.values():
        for extension, (number, size) in entry.totals.items():
            members[extension] += number
            sizes[extension] += size
    found = {
        "shards": len(urls),
        "indexed": len(entries),
        "samples": sum(entry.samples for entry in entries.values()),
        "bytes": sum(entry.size for entry in entries.values()),
        "samples_per_shard": [
            min((entry.samples for entry in entries.values()), default=0),
            max((entry.samples for entry in entries.values()), default=0),
        ],
        "damaged": {url: entry.reason for url, entry in entries.items() if entry.reason},
        "members": {name: {"count": members[name], "bytes": sizes[name]} for name in sorted(members)},
    }
    if settings.json:
        print(json.dumps(found))
        return 0
    low, high = found["samples_per_shard"]  # type: ignore[misc]
    print(f"{found['samples']} samples in {len(entries)} shards of {low} to {high}, {_size(found['bytes'])}")
    if len(entries) < len(urls):
        print(f"{len(urls) - len(entries)} of {len(urls)} shards are not counted; run `clipscale data index` on them")
    table = Table("member", "samples that have it", "bytes", "mean")
    for name in sorted(members):
        table.add_row(name, str(members[name]), _size(sizes[name]), _size(sizes[name] / max(members[name], 1)))
    Console().print(table)
    for url, reason in found["damaged"].items():  # type: ignore[attr-defined]
        print(f"{reason}: {url}")
    return 0


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
