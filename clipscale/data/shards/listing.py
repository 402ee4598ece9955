"""Lists the shards that a setting names.

Expands braces, `::` and `${NAME}` as webdataset does, whose own function would load torch before a mistyped path is
reported.
"""

import glob
import importlib.util
import logging
import os
import re
from pathlib import Path

from braceexpand import braceexpand

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.config.data import DataConfig, TableConfig
from clipscale.data.shards.access import Access, as_path, is_local, leaf_of, scheme_of
from clipscale.data.shards.remote_object import in_thread

log = logging.getLogger(__name__)

TABLES = (".csv", ".tsv", ".parquet")
LISTING_S = 600.0
"""Time limit for listing a remote folder."""
LONGEST_SOURCE = 1 << 13
"""Characters of a path, pattern or address. Linux allows 4,096 bytes for a path."""
MOST_SHARDS = 1 << 20
"""Shards that a source may name: twice LAION-5B's. Expanding the braces for so many takes seconds."""
MOST_BRACES = 64
MOST_LIST_BYTES, LONGEST_LINE = 1 << 28, 1 << 16
"""Size of a list of shards, and of its lines."""
EXTRAS = {"s3": ("s3fs", "s3"), "s3a": ("s3fs", "s3"), "gs": ("gcsfs", "gs"), "gcs": ("gcsfs", "gs")}
"""Scheme -> the package that reads it, and this project's extra that installs the package."""
_FILE = re.compile(r"^file:(//)?", re.IGNORECASE)


def access_of(config: DataConfig) -> Access:
    """How the shards are read, by these settings."""
    waits = config.retries, config.wait_s
    return Access(config.cache, config.cache_bytes, *waits, pipes=config.allow_pipe, root=config.table.root)


def list_shards(config: DataConfig) -> tuple[list[str], list[int] | None]:
    """Every shard of every source, and the number of its source (None: no weights). Raises UserError."""
    if not config.train:
        raise UserError("data.train is not set; give shards, for example data.train='/data/{00000..00099}.tar'")
    sources = [config.train] if isinstance(config.train, str) else list(config.train)
    listed = [expand(source, config.allow_pipe, table=config.table) for source in sources]
    urls = [url for source in listed for url in source]
    if config.weights is None:
        return urls, None
    weights = list(config.weights)
    if len(weights) != len(sources):
        raise UserError(f"data.weights={weights}: {len(weights)} weights for {len(sources)} sources in data.train")
    if min(weights) < 0 or sum(weights) <= 0:
        raise UserError(f"data.weights={weights}: must be non-negative and not all zero")
    return urls, [number for number, source in enumerate(listed) for _ in source]


def check_local(config: DataConfig) -> None:
    """Raise UserError for a source on this machine that names no shard. Asks no server, loads no torch, and warns of nothing."""
    for source in config.train or []:
        path = Path(os.path.expanduser(source.removeprefix("@")))  # noqa: PTH111 (a pattern)
        if len(source) > LONGEST_SOURCE or not is_local(source):
            continue
        if source.startswith("@") or path.is_dir():
            empty = not path.exists() or not (path.stat().st_size if path.is_file() else any(path.iterdir()))
        else:
            empty = not any(os.path.lexists(name) or glob.glob(name) for name in _braces(str(path), "data.train"))  # noqa: PTH207
        if empty:
            expand(source, table=config.table)


def expand(
    source: str, allow_pipe: bool = False, *, setting: str = "data.train", table: TableConfig | None = None
) -> list[str]:
    """The shards that one source names: a brace list, a glob, a folder of shards or pictures, a table, `@FILE` with a
    source a line, or a URL (`::` joins several). The names of files are paths, whatever they look like.

    Warns of missing local shards of a brace list, and leaves them out: downloads have gaps. Raises UserError if no
    shard is left, or for `pipe:` without `allow_pipe`.
    """
    try:
        return _expand(source, allow_pipe, setting, table)
    except (OSError, ValueError, RecursionError) as error:  # a name that no file can have
        raise UserError(f"{setting}={source[:200]!r} cannot be read ({str(error)[:200]})") from error


def _expand(source: str, allow_pipe: bool, setting: str, table: TableConfig | None) -> list[str]:
    if len(source) > LONGEST_SOURCE:
        raise UserError(f"{setting}={source[:200]!r}...: a source has at most {LONGEST_SOURCE} characters")
    if source.startswith("@"):
        return _from_list(Path(source[1:]).expanduser(), allow_pipe, setting, table)
    if _FILE.match(source) or is_local(source) or (scheme_of(source) == "pipe" and os.path.lexists(source)):
        pattern = os.path.expanduser(_FILE.sub("", source))  # noqa: PTH111 (a pattern, not yet a path)
        found = _local(as_path(pattern), setting, table)
    else:
        addresses = _braces(source, setting)
        if not allow_pipe and any(scheme_of(address) == "pipe" for address in addresses):
            remedy = "set data.allow_pipe=true if you wrote it yourself"
            raise UserError(f"{setting}={source!r}: `pipe:` runs a shell command; {remedy}")
        found = [url for address in addresses for url in _remote(address, setting)]
    if not found:
        remedy = "give a tar file, a brace list, a glob, a folder, a table or @FILE"
        raise UserError(f"{setting}={source!r} matches no shard; {remedy}")
    return [url for name in found for url in _table_shards(name, table, setting)]


def _local(source: str, setting: str, table: TableConfig | None) -> list[str]:
    """The files of this machine that a brace list, glob or folder names."""
    if os.path.isdir(source):  # noqa: PTH112 (False for what no file can be named)
        found = sorted(as_path(str(p)) for p in Path(source).glob("*.tar*") if p.is_file())
        if not found:
            from clipscale.data.shards import tables

            found = tables.folder_shards(source, table or TableConfig(), setting)
        return found
    patterns = _braces(source, setting)
    named = [as_path(name) for pattern in patterns for name in (sorted(glob.glob(pattern)) or [pattern])]  # noqa: PTH207 (absolute)
    folders = {folder: _names(folder) for folder in {os.path.dirname(name) for name in named}}  # noqa: PTH120 (as it is named)
    found = [name for name in named if os.path.basename(name) in folders[os.path.dirname(name)]]  # noqa: PTH119, PTH120
    present = set(found)
    if found and (missing := [name for name in named if name not in present]):
        counts = f"{len(missing)} of {len(named)} shards do not exist (first: {missing[0]})"
        log.warning("%s: %s; going on without them", setting, counts)
    return found


def _names(folder: str) -> set[str]:
    """The names in a folder. Asking for each file alone is slow on network file systems."""
    try:
        return set(os.listdir(folder or "."))  # noqa: PTH208 (names only, fast)
    except (OSError, ValueError):
        return set()


def _table_shards(name: str, table: TableConfig | None, setting: str) -> list[str]:
    """A table's virtual shards; any other shard is itself."""
    if scheme_of(name) == "table" or not leaf_of(name).endswith(TABLES):
        return [name]
    from clipscale.data.shards import tables  # loads what decodes pictures, which listing tar files does not need

    return tables.table_shards(name, table or TableConfig(), setting)


def _braces(source: str, setting: str) -> list[str]:
    """Expands braces and `${NAME}` (environment variable WDS_NAME), and splits at `::`."""
    try:
        filled = re.sub(r"\$\{(\w+)\}", lambda name: os.environ["WDS_" + name[1]], source)
        if sum(map(_expansions, filled.split("::"))) > MOST_SHARDS:
            raise ValueError(f"it stands for more than {MOST_SHARDS} shards")
        return [url for part in filled.split("::") for url in braceexpand(part)]
    except (ValueError, KeyError, RecursionError) as error:  # unbalanced braces; a variable that is not set
        raise UserError(f"{setting}={source[:200]!r} cannot be expanded: {error}") from error


def _expansions(pattern: str) -> int:
    """A bound on the names that a brace list stands for, before it is expanded: the product of its ranges and alternatives."""
    count, open_braces = 1, list[tuple[int, int]]()  # where each begins, and the commas in it
    for at in re.finditer(r"\\.|[{},]", pattern, re.DOTALL):
        if at[0] == "{":
            open_braces.append((at.end(), 0))
        elif at[0] == "," and open_braces:
            open_braces[-1] = (open_braces[-1][0], open_braces[-1][1] + 1)
        elif at[0] == "}" and open_braces:
            start, commas = open_braces.pop()
            ends = re.fullmatch(r"(-?\d+)\.\.(-?\d+)(?:\.\.-?\d+)?\n?", pattern[start : at.start()])
            count *= 1 + commas + (abs(int(ends[2]) - int(ends[1])) if ends else 0)
        if len(open_braces) > MOST_BRACES or count > MOST_SHARDS:
            raise ValueError(f"it stands for more than {MOST_SHARDS} shards, or has over {MOST_BRACES} nested braces")
    return count


def _remote(url: str, setting: str) -> list[str]:
    """The objects that a pattern (`s3://bucket/*.tar`) or folder (`s3://bucket/set/`) names, or the address itself."""
    _require(url, setting)
    if scheme_of(url) in ("http", "https", "pipe") or not (re.search(r"[*?\[]", url) or url.endswith("/")):
        return [url]
    from fsspec.core import url_to_fs

    pattern = url + "*.tar*" if url.endswith("/") else url
    try:
        system, path = url_to_fs(pattern)
        listed = [str(system.unstrip_protocol(name)) for name in in_thread(lambda: system.glob(path)).result(LISTING_S)]
    except Exception as error:  # each library behind fsspec has its own
        raise UserError(f"{setting}={url!r} cannot be listed ({type(error).__name__}: {error})") from error
    # a server chooses these names: they must not lead to another file system, as fsspec's `::` does
    found = sorted(name for name in listed if "::" not in name and scheme_of(name) == scheme_of(url))
    if not found:
        raise UserError(f"{setting}={url!r} matches no shard")
    return found


def _require(url: str, setting: str) -> None:
    """Raise UserError, naming what to install, unless addresses of this scheme can be read."""
    scheme = scheme_of(url)
    if scheme in ("", "pipe", "http", "https"):
        return
    if scheme == "table":
        raise UserError(f"{setting}={url!r}: addresses of rows are made by clipscale itself; give the table's path")
    package, extra = EXTRAS.get(scheme, ("", ""))
    if package and importlib.util.find_spec(package) is None:
        need = f"addresses need the package {package}; pip install 'clipscale[{extra}]'"
        raise UserError(f"{setting}={url!r}: {scheme}: {need}")
    from fsspec import get_filesystem_class

    try:
        get_filesystem_class(scheme)
    except ValueError as error:
        known = "there are https:, s3:, gs:, hf: and local paths"
        raise UserError(f"{setting}={url!r}: no reader for {scheme}: addresses; {known}") from error
    except ImportError as error:
        raise UserError(f"{setting}={url!r}: {error}") from error


def _from_list(path: Path, allow_pipe: bool, setting: str, table: TableConfig | None) -> list[str]:
    """The shards that the lines of a list name; empty lines and remarks name none."""
    urls: list[str] = []
    for line in files.lines(path, LONGEST_LINE + 1, MOST_LIST_BYTES):
        if len(line) > LONGEST_LINE:
            raise ValueError(f"a line has more than {LONGEST_LINE} bytes")
        text = line.decode().strip()
        if text.startswith("@"):
            raise UserError(f"{setting}='@{path}': {text[:200]!r} is a list in a list; write its lines here")
        if text and not text.startswith("#"):
            urls += expand(text, allow_pipe, setting=setting, table=table)
        if len(urls) > MOST_SHARDS:
            raise UserError(f"{setting}='@{path}' lists more than {MOST_SHARDS} shards; make them larger")
    if not urls:
        raise UserError(f"{setting}='@{path}' lists no shard; write one address a line")
    return urls
