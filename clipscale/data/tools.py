"""`clipscale data index`, `check` and `stats`: from words on the command line to an index, and from shards to tables and pages."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from clipscale.config.data import TableConfig
from clipscale.config.tools import CheckSettings, IndexSettings, StatsSettings
from clipscale.data.shards import index, indexing
from clipscale.data.shards import listing as shards
from clipscale.data.shards.access import Access, is_local, scheme_of
from clipscale.errors import UserError
from clipscale.hardware import cores
from clipscale.units import format_bytes


def named(sources: Sequence[str], allow_pipe: bool = False, table: TableConfig | None = None) -> list[str]:
    """The shards that words on the command line name, each once. Raises UserError."""
    if not sources:
        raise UserError("no shards given; for example: clipscale data index '/data/{00000..00099}.tar'")
    return list(
        dict.fromkeys(
            url for source in sources for url in shards.expand(source, allow_pipe, setting="shards", table=table)
        )
    )


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
    urls = [url for url in named(sources, settings.allow_pipe) if scheme_of(url) not in index.NO_FILE]
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

        tally = indexing.update(
            urls,
            place=lambda folder: indexing.place_for(folder, settings.cache),
            access=Access(cache=None),
            checksum=settings.checksum,
            workers=settings.workers or cores(),
            force=settings.force,
            done=done,
        )
    if not urls:
        print("tables and pipes have no index; their rows are counted as they are")
        return 0
    entries, _ = index.current(urls, settings.cache)
    samples = sum(entry.samples for entry in entries.values())
    print(f"{samples} samples in {len(entries)} shards; {tally.read} indexed now, {tally.kept} unchanged")
    for url, entry in damaged:
        print(f"{entry.reason} after {entry.samples} samples: {entry.detail or url}")
    for url, why in (tally.failed or {}).items():
        print(f"not indexed: {url}: {why}")
    for place in sorted({str(indexing.place_for(index.folder_of(url), settings.cache)) for url in urls}):
        print(f"  {place}")
    return 1 if damaged or tally.failed else 0


def check_shards(sources: Sequence[str], settings: CheckSettings) -> int:
    """Read everything; status 1 where something is broken."""
    # here and not above: what decodes pictures, for which `data index` need not wait
    from clipscale.data import check, checkpage, filters

    urls = named(sources, settings.allow_pipe, settings.table)
    chosen = filters.selection(settings.caption_key, settings.captions, (), settings.filter, "")
    out = Path(settings.out).expanduser()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out={settings.out}: cannot be written ({error.strerror}); choose another folder") from error
    task = check.Task(
        chosen,
        settings.max_pixels,
        settings.max_bytes,
        settings.pictures,
        settings.seed,
        settings.near_duplicates,
        Access(),
        settings.cache,
    )
    found = check.Findings()
    with progress(Console(stderr=True)) as bar:
        total = sum(os.path.getsize(url) for url in urls if is_local(url) and os.path.exists(url))  # noqa: PTH110, PTH202 (fast)
        line = bar.add_task(f"0 of {len(urls)} shards", total=total or None)
        for _, one in check.surveyed(urls, task, settings.workers or cores()):
            found.add(one, settings.pictures)
            bar.update(line, advance=one.size, description=f"{found.shards} of {len(urls)} shards")
    repeated = check.duplicates(found)
    summary = check.summary(found, repeated)
    (out / "check.json").write_text(json.dumps(summary, indent=1) + "\n")
    (out / "check.html").write_text(checkpage.page(found, summary, f"{len(urls)} shards: {sources[0]}"))
    surplus = [name for groups in repeated.values() for group in groups for name in group[1:]]
    (out / "duplicates.txt").write_text(
        "".join(f"{name}\n" for name in dict.fromkeys(surplus)), errors="surrogateescape"
    )
    checkpage.show(summary)
    print(f"{out}/check.html, check.json, duplicates.txt")
    return 1 if check.is_broken(found) else 0


def show_stats(sources: Sequence[str], settings: StatsSettings) -> int:
    """Print what the indexes say of the shards; local shards without one have their headers read."""
    urls = named(sources)
    entries, _ = index.current(urls, settings.cache)
    missing = [url for url in urls if url not in entries and is_local(url)]
    if missing:
        shards.scanned_counts(missing, settings.cache)
        entries, _ = index.current(urls, settings.cache)
    rows = sum(count or 0 for url, count in zip(urls, shards.noted_counts(urls)) if scheme_of(url) == "table")
    members: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for entry in entries.values():
        for extension, (number, size) in entry.totals.items():
            members[extension] += number
            sizes[extension] += size
    found: dict[str, Any] = {
        "shards": len(urls),
        "indexed": len(entries),
        "samples": sum(entry.samples for entry in entries.values()) + rows,
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
    low, high = found["samples_per_shard"]
    print(f"{found['samples']} samples in {len(entries)} shards of {low} to {high}, {format_bytes(found['bytes'])}")
    if rows:
        print(f"{rows} of them are rows of tables")
    elif len(entries) < len(urls):
        print(f"{len(urls) - len(entries)} of {len(urls)} shards are not counted; run `clipscale data index` on them")
    table = Table("member", "samples that have it", "bytes", "mean")
    for name in sorted(members):
        table.add_row(
            name, str(members[name]), format_bytes(sizes[name]), format_bytes(sizes[name] / max(members[name], 1))
        )
    Console().print(table)
    for url, reason in found["damaged"].items():
        print(f"{reason}: {url}")
    return 0
