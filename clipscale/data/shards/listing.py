"""Shards as files: which ones a setting names, and how many samples each holds."""

import glob
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from braceexpand import braceexpand

from clipscale.config.data import TableConfig
from clipscale.data.shards import index, indexing
from clipscale.data.shards.access import is_local, leaf_of, own_cache, require, scheme_of
from clipscale.data.shards.reader import ReadProblem, read_shard
from clipscale.errors import UserError

log = logging.getLogger(__name__)

TABLES = (".csv", ".tsv", ".parquet")
SCAN_AT_MOST = 256
"""Shards whose headers are read to count samples when nothing else tells; more than that would delay the start of a run."""


# -- which shards ------------------------------------------------------------------------------------------------------


def expand(
    source: str, allow_pipe: bool = False, *, setting: str = "data.train", table: TableConfig | None = None
) -> list[str]:
    """The shards that one source names: a brace list, a glob, a folder of shards or of pictures, a table, `@FILE` with a
    source a line, or a URL (`::` joins several).

    Local shards that a brace list names but that do not exist are left out with a warning (downloads have gaps).
    Raises UserError if nothing is left, or for `pipe:` without `allow_pipe`.
    """
    if source.startswith("pipe:") or "::pipe:" in source:
        if not allow_pipe:
            raise UserError(
                f"{setting}={source!r}: `pipe:` runs a shell command; set data.allow_pipe=true if you wrote it yourself"
            )
        return _braces(source, setting)
    if source.startswith("@"):
        return _from_list(Path(source[1:]).expanduser(), allow_pipe, setting, table)
    if source.startswith("file:"):
        source = re.sub(r"^file:(//)?", "", source)
    if not is_local(source):
        listed = [url for address in _braces(source, setting) for url in _listed(address, setting)]
        return [url for name in listed for url in _parts(name, table, setting)]
    source = os.path.expanduser(source)  # noqa: PTH111 (a pattern, not yet a path)
    if Path(source).is_dir():
        found = sorted(str(p) for p in Path(source).glob("*.tar*") if p.is_file())
        missing: list[str] = []
        if not found:
            from clipscale.data.shards import tables

            found = tables.shards_of_folder(source, table or TableConfig(), setting)
    else:
        named = [name for pattern in _braces(source, setting) for name in (sorted(glob.glob(pattern)) or [pattern])]  # noqa: PTH207 (absolute)
        missing = _absent(named)
        gone = set(missing)
        found = [name for name in named if name not in gone]
    if not found:
        raise UserError(
            f"{setting}={source!r} matches no shard; give a tar file, a brace list, a glob, a folder, a table or @FILE"
        )
    if missing:
        log.warning(
            "%s: %d of %d shards do not exist (first: %s); going on without them",
            setting,
            len(missing),
            len(named),
            missing[0],
        )
    return [url for name in found for url in _parts(name, table, setting)]


def _parts(name: str, table: TableConfig | None, setting: str) -> list[str]:
    """A shard itself, or a table's virtual shards."""
    if scheme_of(name) == "table" or not leaf_of(name).endswith(TABLES):
        return [name]
    from clipscale.data.shards import (
        tables,  # brings in what decodes pictures, for which listing tar files need not wait
    )

    return tables.shards_of(name, table or TableConfig(), setting)


def _braces(source: str, setting: str) -> list[str]:
    """Braces and `${NAME}` (environment variable WDS_NAME, as webdataset has it) resolved, `::` taken apart."""
    try:
        filled = re.sub(r"\$\{(\w+)\}", lambda name: os.environ["WDS_" + name[1]], source)
        return [url for part in filled.split("::") for url in braceexpand(part)]
    except (ValueError, KeyError) as error:  # unbalanced braces; a variable that is not set
        raise UserError(f"{setting}={source!r} cannot be expanded: {error}") from error


def _listed(url: str, setting: str) -> list[str]:
    """The objects that a remote pattern (`s3://bucket/*.tar`) or folder (`s3://bucket/set/`) names; another address is itself."""
    require(url, setting)
    if scheme_of(url) in ("http", "https", "pipe") or not (re.search(r"[*?\[]", url) or url.endswith("/")):
        return [url]
    from fsspec.core import url_to_fs

    pattern = url + "*.tar*" if url.endswith("/") else url
    try:
        system, path = url_to_fs(pattern)
        found = sorted(str(system.unstrip_protocol(name)) for name in system.glob(path))
    except Exception as error:  # each library behind fsspec has its own
        raise UserError(f"{setting}={url!r} cannot be listed ({type(error).__name__}: {error})") from error
    if not found:
        raise UserError(f"{setting}={url!r} matches no shard")
    return found


def _from_list(path: Path, allow_pipe: bool, setting: str, table: TableConfig | None) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{setting}='@{path}': the list cannot be read ({error})") from error
    urls = [
        url
        for line in lines
        if line and not line.startswith("#")
        for url in expand(line, allow_pipe, setting=setting, table=table)
    ]
    if not urls:
        raise UserError(f"{setting}='@{path}' lists no shard; write one address a line")
    return urls


def _absent(names: Sequence[str]) -> list[str]:
    """The names that do not exist; one listing a folder, since a question a file is slow on network file systems."""
    listings: dict[str, set[str]] = {}
    absent = []
    for name in names:
        folder, leaf = os.path.split(name)
        if folder not in listings:
            try:
                listings[folder] = set(os.listdir(folder or "."))  # noqa: PTH208 (names only, fast)
            except OSError:
                listings[folder] = set()
        if leaf not in listings[folder]:
            absent.append(name)
    return absent


# -- how many samples --------------------------------------------------------------------------------------------------


def noted_counts(urls: Sequence[str], cache: str | None = None) -> list[int | None]:
    """Samples per shard as noted in an index, in `sizes.json` (webdataset) or in `NNNNN_stats.json` (img2dataset); None: not noted."""
    entries, stale = index.current(urls, cache)
    if stale:
        log.warning(
            "the index of %d of %d shards is out of date (first: %s): they have changed since; counting them without it, "
            "run `clipscale data index` again",
            len(stale),
            len(urls),
            stale[0],
        )
    _tell_damaged(entries, len(urls))
    sizes: dict[str, dict[str, int]] = {}
    for folder in {os.path.split(url)[0] for url in urls if is_local(url)}:
        path = Path(folder) / "sizes.json"
        sizes[folder] = _json(path) if path.is_file() else {}

    def noted(url: str) -> int | None:
        if url in entries:
            return entries[url].samples
        if scheme_of(url) == "table":
            from clipscale.data.shards.tables import rows_of

            return rows_of(url)
        if not is_local(url):
            return None
        folder, leaf = os.path.split(url)
        value = sizes[folder].get(leaf)
        if value is None:
            stats = Path(folder) / f"{leaf.split('.')[0]}_stats.json"
            value = _json(stats).get("successes") if stats.is_file() else None
        return value if isinstance(value, int) and value >= 0 else None

    with ThreadPoolExecutor(16) as pool:  # waits on the file system, seldom on the processor
        return list(pool.map(noted, urls))


def _tell_damaged(entries: Mapping[str, index.Entry], count: int) -> None:
    damaged = [(url, entry.reason) for url, entry in entries.items() if entry.reason]
    if damaged:
        log.warning(
            "%d of %d shards are damaged (first: %s, %s): what lies behind the damage is left out; `clipscale data check` shows it all",
            len(damaged),
            count,
            *damaged[0],
        )


def _json(path: Path) -> dict[str, int]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        log.warning("%s cannot be read (%s); counting without it", path, error)
        return {}
    return value if isinstance(value, dict) else {}


def scanned_counts(urls: Sequence[str], cache: str | None = None) -> list[int]:
    """Samples per local shard from its tar headers, remembered in an index in the cache folder.

    A shard that cannot be read counts what could be read. The processes of one machine take turns, so that one of them scans.
    """
    found: dict[str, index.Entry] = {}
    try:
        indexing.update(
            urls, place=lambda folder: indexing.place_for(folder, cache or str(own_cache())), checksum=False
        )
        found, _ = index.current(urls, cache)
        _tell_damaged(found, len(urls))
    except UserError as error:
        log.warning("counts are not remembered: %s", error)
    return [found[url].samples if url in found else count_samples(url) for url in urls]


def count_samples(path: str) -> int:
    """Samples in a local shard, as `read_shard` groups them, from its headers alone."""
    problem = ReadProblem()
    samples = sum(1 for _ in read_shard(path, problem, want=lambda _: False))
    if problem.reason:
        log.warning("%s after %d samples: %s", problem.reason, samples, problem.detail)
    return samples
