"""Lists the shards that a setting names.

Expands braces and `::` as webdataset does, whose own function would load torch before a mistyped path is
reported.
"""

import glob
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

from braceexpand import braceexpand

from clipscale.common.errors import UserError
from clipscale.config.data import DataConfig
from clipscale.data.shards.addresses import head_of, is_local, scheme_of

log = logging.getLogger(__name__)

TABLES = (".csv", ".tsv", ".parquet")
SCHEMES = ("http", "https", "s3", "gs", "hf")
"""Of the addresses that are read. fsspec knows others, some of which read this machine's files."""
PATTERN = re.compile(r"[*?\[]|/(?:$|[,}])")
"""In a brace list of objects, what makes an address name several: a pattern, or a folder."""
NOTHING = "matches no shard; give a tar file, a brace list, a glob, a folder or @FILE"


def list_shards(config: DataConfig) -> tuple[list[str], list[int] | None]:
    """Every shard of every source, and the number of its source (None: no weights). Raises UserError."""
    if not config.train:
        raise UserError("data.train is not set; give shards, for example data.train='/data/{00000..00099}.tar'")
    config.check_weights()
    listed = [expand(source, config.allow_pipe) for source in config.train]
    urls = [url for source in listed for url in source]
    if config.weights is None:
        return urls, None
    return urls, [number for number, source in enumerate(listed) for _ in source]


def local_shards(config: DataConfig) -> list[str] | None:
    """The shards of all sources; None: some are not on this machine. Asks no server and loads no torch.

    Raises UserError for a source on this machine that names no shard.
    """
    shards = []
    for source in config.train or []:
        shards += _present(source, config.allow_pipe, "data.train")[0] if is_local(source) else [source]
    return shards if all(map(is_local, shards)) else None


def expand(source: str, allow_pipe: bool = False, *, setting: str = "data.train") -> list[str]:
    """The shards that one source names: a brace list, a glob, a folder of shards, `@FILE` with an address or path a
    line, or a URL (`::` joins several).

    Warns of missing local shards, and leaves them out: downloads have gaps. Raises UserError if no shard is left, or
    for `pipe:` without `allow_pipe`.
    """
    if not is_local(source):
        return [url for part in source.split("::") for url in _remote(part, allow_pipe, setting)]
    present, missing = _present(source, allow_pipe, setting)
    if missing:
        counts = f"{len(missing)} of {len(missing) + len(present)} shards do not exist (first: {min(missing)})"
        log.warning("%s: %s; going on without them", setting, counts)
    return present


def _present(source: str, allow_pipe: bool, setting: str) -> tuple[list[str], list[str]]:
    """The shards that a list or a source on this machine names: those that exist, and those that do not."""
    if source.startswith("@"):
        names = _from_list(Path(source[1:]).expanduser(), allow_pipe, setting)
    else:
        names = _local(source, setting)
    present = _existing(names)
    if not present:
        raise UserError(f"{setting}={source!r} {NOTHING}")
    return present, sorted(set(names).difference(present))


def _local(source: str, setting: str) -> list[str]:
    """The files of this machine that a brace list, glob or folder names, whether they exist or not."""
    if source.endswith(TABLES):
        raise UserError(f"{setting}={source!r}: a table; make shards of it: clipscale data pack {source} out=DIR")
    source = os.path.expanduser(source)  # noqa: PTH111 (a pattern, not yet a path)
    if os.path.isdir(source):  # noqa: PTH112
        prefix = str(Path(source) / "_")[:-1]
        return sorted(prefix + leaf for leaf in _leaves(source) if ".tar" in leaf)
    patterns = _braces(source, setting)
    if not glob.has_magic(source):
        return patterns
    listed = [sorted(glob.glob(name)) if glob.has_magic(name) else [name] for name in patterns]  # noqa: PTH207
    return [name for names in listed for name in names]


def _existing(names: Sequence[str]) -> list[str]:
    """The addresses, and the paths that exist. Asking for each file alone is slow on network file systems."""
    leaves: dict[str, set[str] | None] = {}  # by their folders; None: of an address
    present = []
    for name in names:
        head = head_of(name)
        if head not in leaves:
            leaves[head] = _leaves(head if head.endswith("/") else ".") if is_local(name) else None
        folder = leaves[head]
        if folder is None or name.rpartition("/")[2] in folder:
            present.append(name)
    return present


def _leaves(folder: str) -> set[str]:
    try:
        return set(os.listdir(folder))  # noqa: PTH208 (names only, fast)
    except OSError:
        return set()


def _braces(source: str, setting: str) -> list[str]:
    try:
        parts = source.split("::")
        return [url for part in parts for url in braceexpand(part, escape="\\" in part)]  # looking for it takes long
    except ValueError as error:  # unbalanced braces
        raise UserError(f"{setting}={source!r} cannot be expanded: {error}") from error


def _check_address(url: str, allow_pipe: bool, setting: str) -> None:
    """Raise UserError for an address that is not read."""
    scheme = scheme_of(url)
    if scheme == "pipe":
        if not allow_pipe:
            remedy = "set data.allow_pipe=true if you wrote it yourself"
            raise UserError(f"{setting}={url!r}: `pipe:` runs a shell command; {remedy}")
    elif scheme not in SCHEMES or "::" in url:
        raise UserError(f"{setting}={url[:200]!r} is neither a path nor one of {', '.join(SCHEMES)}:")


def _remote(source: str, allow_pipe: bool, setting: str) -> list[str]:
    """The addresses of a brace list, with the objects in the place of a pattern (`s3://bucket/*.tar`) or folder
    (`s3://bucket/set/`) that names them."""
    _check_address(source, allow_pipe, setting)
    scheme = scheme_of(source)
    urls = _braces(source, setting)
    if scheme in ("http", "https", "pipe"):
        return urls
    from fsspec.core import get_filesystem_class, url_to_fs

    names = []
    try:
        get_filesystem_class(scheme)
        if not PATTERN.search(source):
            return urls
        for url in urls:
            if not PATTERN.search(url):
                names.append(url)
                continue
            system, path = url_to_fs(url + "*.tar*" if url.endswith("/") else url)
            names += sorted(str(system.unstrip_protocol(name)) for name in system.glob(path))
    except Exception as error:  # each library behind fsspec has its own; a missing one is named
        raise UserError(f"{setting}={source!r} cannot be listed ({type(error).__name__}: {error})") from error
    # a server chooses these names: they must not lead to another file system, as fsspec's `::` does
    safe = [name for name in names if "::" not in name and scheme_of(name) == scheme]
    if not safe:
        raise UserError(f"{setting}={source!r} {NOTHING}")
    return safe


def _from_list(path: Path, allow_pipe: bool, setting: str) -> list[str]:
    """The addresses and paths that the lines of a list name; empty lines and remarks name none."""
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"{setting}='@{path}' cannot be read ({error})") from error
    names = [line for line in lines if line and not line.startswith("#")]
    for name in names:
        if not is_local(name):
            _check_address(name, allow_pipe, f"{setting}=@{path}")
    return names
