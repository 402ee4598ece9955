"""The verbs `clipscale data index` and `stats`: they take shards as plain arguments, and print counts and paths."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from clipscale.common.errors import UserError
from clipscale.common.hardware import cores
from clipscale.common.terminal import say
from clipscale.common.units import format_bytes
from clipscale.config.data import TableConfig
from clipscale.config.tools import IndexSettings, StatsSettings
from clipscale.data.shards import index, listing
from clipscale.data.shards.addresses import is_local, scheme_of
from clipscale.data.shards.counts import recorded_counts, scan_counts


def expanded(sources: Sequence[str], allow_pipe: bool = False, table: TableConfig | None = None) -> list[str]:
    """The shards that the arguments name, each once. Raises UserError."""
    if not sources:
        raise UserError("no shards given; for example: clipscale data index '/data/{00000..00099}.tar'")
    listed = [listing.expand(source, allow_pipe, setting="shards", table=table) for source in sources]
    return list(dict.fromkeys(url for urls in listed for url in urls))


@contextmanager
def progress(urls: Sequence[str]) -> Iterator[Callable[[int], None]]:
    """A bar on stderr that counts shards and bytes; call what it yields with the size of each finished shard."""
    total = sum(Path(url).stat().st_size for url in urls if is_local(url) and Path(url).exists())
    columns = BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(TextColumn("{task.description}"), *columns, console=Console(stderr=True)) as bar:
        task, numbers = bar.add_task(f"0 of {len(urls)} shards", total=total or None), count(1)
        yield lambda size: bar.update(task, advance=size, description=f"{next(numbers)} of {len(urls)} shards")


def make_index(sources: Sequence[str], settings: IndexSettings) -> int:
    """Index the shards. Status 1 where one is damaged or cannot be read."""
    urls = [url for url in expanded(sources) if scheme_of(url) not in index.NO_FILE]
    outcomes: dict[str, index.Outcome] = {}
    with progress(urls) as advance:

        def done(url: str, outcome: index.Outcome) -> None:
            advance(outcome.size if isinstance(outcome, index.Entry) else 0)
            outcomes[url] = outcome

        workers = settings.workers or cores()
        index.update_indexes(urls, workers=workers, force=settings.force, done=done)
    if not urls:
        say("tables and pipes have no index; their rows are counted as they are")
        return 0
    entries, _ = index.current(urls)
    samples = sum(entry.samples for entry in entries.values())
    read = sum(isinstance(outcome, index.Entry) for outcome in outcomes.values())
    unchanged = sum(outcome is None for outcome in outcomes.values())
    say(f"{samples} samples in {len(entries)} shards; {read} indexed now, {unchanged} unchanged")
    damage = [
        f"not indexed: {url}: {outcome}"
        if isinstance(outcome, str)
        else f"{outcome.reason} after {outcome.samples} samples: {outcome.detail}"
        for url, outcome in outcomes.items()
        if isinstance(outcome, str) or (outcome and outcome.reason)
    ]
    for line in damage:
        say(line)
    for place in sorted({str(index.writable_path(index.folder_of(url))) for url in urls}):
        say(f"  {place}")
    return 1 if damage else 0


def show_stats(sources: Sequence[str], settings: StatsSettings) -> int:
    """Print what the indexes say about the shards. Local shards without one have their headers read."""
    urls = expanded(sources)
    entries, _ = index.current(urls)
    missing = [url for url in urls if url not in entries and is_local(url)]
    if missing:
        scan_counts(missing)
        entries, _ = index.current(urls)
    rows = sum(filter(None, recorded_counts([url for url in urls if scheme_of(url) == "table"])))
    counts = [entry.samples for entry in entries.values()] or [0]
    size = format_bytes(sum(entry.size for entry in entries.values()))
    say(f"{sum(counts) + rows} samples in {len(entries)} shards of {min(counts)} to {max(counts)}, {size}")
    if rows:
        say(f"{rows} of them are rows of tables")
    elif len(entries) < len(urls):
        say(f"{len(urls) - len(entries)} of {len(urls)} shards are not counted; run `clipscale data index` on them")
    for url, entry in entries.items():
        if entry.reason:
            say(f"{entry.reason}: {url}")
    return 0
