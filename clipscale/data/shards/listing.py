"""Lists the shards that a setting names.

Expands braces and `::` as webdataset does. webdataset's own function imports torch: a mistyped path would be reported
late.
"""

import glob
import logging
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path, PurePath

from braceexpand import braceexpand

from clipscale.common import files
from clipscale.common.errors import UserError, to_user_error
from clipscale.common.ranks import OnRank0, in_this_process
from clipscale.common.remote import within_time
from clipscale.config.data import DataConfig
from clipscale.data.addresses import as_path, basename, dirname, is_local, scheme_of
from clipscale.data.shards.requests import UNKNOWN_HOST
from clipscale.data.shards.store import probe_objects

log = logging.getLogger(__name__)

# A function that gets a line for the user.
Notify = Callable[[str], object]

TABLE_SUFFIXES = (".csv", ".tsv", ".parquet", ".jsonl", ".ndjson", ".json")
# Endings of shards' names.
SHARD_SUFFIXES = (".tar", ".tar.gz", ".tgz")
# Ending of a file beside an unfinished download, which may have its full size already.
DOWNLOADING = ".aria2"
# A run checks whether about this many addresses exist; other missing ones are found when they are read.
MAX_CHECKED_URLS = 256
# Seconds that a listing may take: a million objects take minutes.
LISTING_S = 900.0
# Schemes of addresses that are read. fsspec knows others, some of which read this machine's files.
SCHEMES = ("http", "https", "s3", "gs", "hf")
# Matches the scheme of a file's URL, up to its path.
FILE_SCHEME = re.compile(r"^file:(?://(?:localhost)?(?=/))?")
# Matches an address in a shell command.
ADDRESS = re.compile(rf"\b(?:{'|'.join(SCHEMES)})://[^\s'\"|;]+")
# Matches, in an address of a brace list, what makes it name several objects: a pattern, or the end of a folder.
PATTERN = re.compile(r"[*?\[]|/(?:$|[,}])")
NO_SHARD = "matches no shard; give a tar file, a brace list, a glob, a folder of .tar, .tar.gz or .tgz, or @FILE"


def list_shards(config: DataConfig, on_rank0: OnRank0 = in_this_process) -> tuple[list[str], list[int] | None]:
    """Every shard of every source, and the number of its source (None without weights). Raises UserError.

    Missing shards and other files are left out with a warning. `on_rank0`: see `OnRank0`.
    """
    notes: list[str] = []
    listed = [
        (url, number) for number, source in enumerate(config.train or []) for url in expand(source, notify=notes.append)
    ]
    gone = {*on_rank0(lambda: _missing([url for url, _ in listed], notes))}
    present = [(url, number) for url, number in listed if url not in gone]
    return [url for url, _ in present], None if config.weights is None else [number for _, number in present]


def local_shards(config: DataConfig) -> list[str] | None:
    """The shards of all sources; None if some are remote. Contacts no server and imports no torch.

    Raises UserError for a local source that names no shard.
    """
    shards = []
    for source in config.train or []:
        names = [] if source.startswith("@") else split_sources(source)
        for name in names:
            check_address(name, "data.train")
        shards += expand(source, notify=lambda line: None) if all(map(is_local, names)) else names
    return shards if all(map(is_local, shards)) else None


def _missing(urls: Sequence[str], notes: Iterable[str]) -> list[str]:
    """Log the notes; returns the addresses at which there is no shard, among about MAX_CHECKED_URLS that are checked.

    Raises UserError if none of these exists.
    """
    for line in notes:
        log.warning("%s", line)
    remote = [url for url in urls if scheme_of(url) in SCHEMES]
    asked = remote[:: -(-len(remote) // MAX_CHECKED_URLS) or 1]
    failed = probe_objects(asked)
    missing = [url for url, error in failed.items() if error.reason in ("missing_shard", UNKNOWN_HOST)]
    if missing:
        problem = f"{len(missing)} of {len(asked)} shards do not exist (first: {missing[0]}, {failed[missing[0]]})"
        if len(missing) == len(asked):
            raise UserError(f"data.train: {problem}")
        log.warning("data.train: %s; continuing without them", problem)
    return missing


def expand(source: str, *, setting: str = "data.train", notify: Notify = log.warning) -> list[str]:
    """The shards that one source names. A source is one of these:

    - a brace list, a glob, a folder of shards, or a URL; `::` joins several;
    - `@FILE`, with an address or a path on each line.

    Leaves out missing local shards, since downloads have gaps, and a folder's other files. Calls `notify` with a line
    about each of both. Raises UserError if no shard is left, and for an address with a scheme that is not in SCHEMES.
    """
    if source.startswith("@"):
        names = _from_list(Path(source[1:]).expanduser(), setting)
    else:
        names = []
        for name in split_sources(source):
            names += _local(name, setting, notify) if is_local(name) else _remote(name, setting, notify)
    present = _existing(names)
    if not present and os.path.isdir(source):  # noqa: PTH112
        raise UserError(
            f"{setting}={source!r}: a folder without shards ({', '.join(SHARD_SUFFIXES)}); make some of its pictures "
            f"and captions: {packing_command(source)}"
        )
    if not present:
        raise UserError(f"{setting}={source!r} {NO_SHARD}")
    missing = set(names).difference(present)
    if missing:
        counts = f"{len(missing)} of {len(names)} shards do not exist"
        notify(f"{setting}: {counts} (first: {min(missing)}); continuing without them")
    return present


def split_sources(source: str) -> list[str]:
    """The paths and addresses that `::` joins, still with braces and stars. A source that exists is one path, whatever
    its name."""
    source = os.path.expanduser(source)  # noqa: PTH111 (a pattern, not yet a path)
    if os.path.exists(source):  # noqa: PTH110
        return [as_path(source)]
    names = [FILE_SCHEME.sub("", name) for name in source.split("::")]
    return [as_path(name) if os.path.exists(name) else name for name in names]  # noqa: PTH110


def _shards(names: Iterable[str], folder: str, notify: Notify) -> list[str]:
    """The shards among the names in a folder, sorted. `notify` names files that only look like shards: indexes,
    checksums, unfinished downloads."""
    like = {name for name in names if any(suffix in name.lower() for suffix in SHARD_SUFFIXES)}
    shards = {
        name
        for name in like
        if name.lower().endswith(SHARD_SUFFIXES)
        and name + DOWNLOADING not in like
        and not basename(name).startswith(".")
    }
    if like > shards:
        by_suffix = Counter(PurePath(name).suffix for name in like - shards)
        counts = ", ".join(f"{count} {suffix}" for suffix, count in sorted(by_suffix.items()))
        notify(f"{folder}: {by_suffix.total()} files beside the shards are not shards, and left out: {counts[:200]}")
    return sorted(shards)


def _local(source: str, setting: str, notify: Notify) -> list[str]:
    """The local paths that a brace list, glob or folder names, whether they exist or not.

    A source that exists is taken as it is, even with braces and stars in its name. What a folder's listing finds are
    paths. The names of a brace list may turn out to be addresses.
    """
    if source.lower().endswith(TABLE_SUFFIXES):
        raise UserError(f"{setting}={source!r}: a table; make shards of it: {packing_command(source)}")
    if os.path.isdir(source):  # noqa: PTH112
        prefix = str(Path(source) / "_")[:-1]
        return _shards([as_path(prefix + leaf) for leaf in _leaves(source)], source, notify)
    if os.path.exists(source):  # noqa: PTH110
        return [source]
    folder = dirname(source)
    while folder and not os.path.isdir(folder):  # noqa: PTH112
        folder = dirname(folder.rstrip("/"))
    names = []
    for name in _braces(source[len(folder) :], f"{setting}={source!r}"):
        if glob.has_magic(name):
            matches = glob.glob(name, root_dir=folder or None, recursive=True)  # noqa: PTH207
            names += [as_path(folder + match) for match in sorted(matches)]
        else:
            names.append(folder + name)
            check_address(names[-1], setting)
    return names


def packing_command(source: str) -> str:
    """The command that makes shards of a table or a folder of pictures."""
    return f"clipscale data pack {shlex.quote(source)} out=DIR"


def _existing(names: Sequence[str]) -> list[str]:
    """The addresses, and the paths that exist. Lists folders: asking for each file is slow on network file systems."""
    heads = {dirname(name) for name in names if is_local(name)}
    leaves = {head: _leaves(head or ".") for head in heads}
    return [name for name in names if not is_local(name) or name.rpartition("/")[2] in leaves[dirname(name)]]


def _leaves(folder: str) -> set[str]:
    try:
        return set(os.listdir(folder))  # noqa: PTH208 (names only, fast)
    except OSError:
        return set()


def _braces(source: str, subject: str) -> list[str]:
    try:
        return [*braceexpand(source, escape="\\" in source)]  # braceexpand is slow when it looks for escapes
    except ValueError as error:  # unbalanced braces
        raise UserError(f"{subject} cannot be expanded: {error}") from error


def check_address(url: str, setting: str) -> None:
    """Raise UserError for what is neither a path nor an address with one of SCHEMES."""
    if scheme_of(url) == "pipe":
        raise UserError(
            f"{setting}={url[:200]!r}: no command is run; give what it reads, {setting}='{address_in_command(url)}'"
        )
    if not is_local(url) and (scheme_of(url) not in SCHEMES or "::" in url):
        raise UserError(f"{setting}={url[:200]!r} is neither a path nor one of {', '.join(SCHEMES)}:; a file is ./NAME")


def address_in_command(command: str) -> str:
    """The address, or else the last path, in a webdataset's command such as `pipe:aws s3 cp s3://b/0.tar -`."""
    if address := ADDRESS.search(command):
        return address[0]
    words = command.removeprefix("pipe:").split()[1:]
    paths = [word.strip("'\"") for word in words if not word.startswith("-") and re.search(r"[./]", word)]
    return paths[-1] if paths else "SHARDS"


def _remote(source: str, setting: str, notify: Notify) -> list[str]:
    """The addresses of a brace list. A pattern (`s3://bucket/*.tar`) or a folder (`s3://bucket/set/`) in it is replaced
    by the objects that it names."""
    check_address(source, setting)
    scheme = scheme_of(source)
    urls = _braces(source, f"{setting}={source!r}")
    if scheme in ("http", "https"):
        return urls
    from fsspec.core import get_filesystem_class, url_to_fs

    names = []
    with to_user_error(f"{setting}={source!r} cannot be listed"):
        get_filesystem_class(scheme)
        for url in urls:
            if not PATTERN.search(url):
                names.append(url)
                continue
            check_server_answers(url)
            system, path = url_to_fs(url + "*.t*" if url.endswith("/") else url)
            listed = within_time(partial(system.glob, path), f"the list of {url}", LISTING_S)
            objects = sorted(str(system.unstrip_protocol(name)) for name in listed)
            names += _shards(objects, url, notify) if url.endswith("/") else objects
    # a server chooses these names: they must not lead to another file system, as fsspec's `::` does
    return [name for name in names if "::" not in name and scheme_of(name) == scheme]


def check_server_answers(url: str) -> None:
    """Ask for some object below a pattern or folder: a listing may take minutes, also of a server that answers.

    Raises SourceError for an unknown host, and as `probe_objects`.
    """
    some = PATTERN.split(url, maxsplit=1)[0].rstrip("/") + "/0.tar"
    error = probe_objects([some], f"a first answer, before {url} is listed").get(some)
    if error and error.reason == UNKNOWN_HOST:
        raise error


def _from_list(path: Path, setting: str) -> list[str]:
    """The addresses and paths in the lines of a list, without empty lines and comments."""
    with to_user_error(f"{setting}='@{path}' cannot be read"):
        text = files.read_text(path)
    names = [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]
    names = [FILE_SCHEME.sub("", name) for name in names]
    for name in names:
        check_address(name, f"{setting}=@{path}")
    return names
