"""Writes files whole or not at all, reads them, turns their errors into one line, and finds and names folders."""

import fcntl
import json
import logging
import os
import re
import secrets
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar

import platformdirs
import yaml

from clipscale.common.errors import UserError, one_line
from clipscale.common.record import Record

log = logging.getLogger(__name__)
T = TypeVar("T")

# What a reader raises for a truncated, overwritten or foreign file, if it checks the form of what it reads. Our own
# mistakes raise other exceptions, so a file that raises one of these may be set aside.
DAMAGED = (OSError, ValueError, RecursionError, yaml.YAMLError)
# For files whose form no reader checks. Our own mistakes raise these, too, so the caller may only print a message, and
# must not set the file aside.
DAMAGED_OR_FOREIGN = (*DAMAGED, LookupError, TypeError, AttributeError, ArithmeticError)
# A safe loader. libyaml's, which PyYAML's wheels have, is ten times as fast as Python's.
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# Pattern of the end of an `unfinished_name`, after `.NAME`.
UNFINISHED_END = r"-[0-9a-f]{16}\.tmp"
# Names that operating systems put into folders. They are ignored, as hidden files are.
LEFT_BY_SYSTEMS = {"__MACOSX", "@eaDir", "Thumbs.db", "desktop.ini", "lost+found"}


# ---- write ----


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file for writing bytes. At the end it is renamed to `path`; after an exception it is removed.

    It has the permissions of any new file, even if a library has replaced it by another meanwhile.
    """
    temporary = path.with_name(unfinished_name(path.name[:40]))
    try:
        with temporary.open("xb") as file:
            yield file
            temporary.chmod(os.fstat(file.fileno()).st_mode & 0o777)
        sync(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))  # names of files may hold bytes that are no UTF-8


def write_json(path: Path, value: object) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")


def unfinished_name(name: str) -> str:
    """A name that no other file has, for a file that is not finished: `.NAME-HEX.tmp`."""
    return f".{name}-{secrets.token_hex(8)}.tmp"


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def locked(path: Path) -> Iterator[IO[str]]:
    """Wait for the lock of a file, and hold it. Makes the file. Without effect on a file system without locks."""
    with path.open("a") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file


# ---- read ----


def read_text(path: Path) -> str:
    """A text of the user's, in the encoding that its first bytes show, or else in UTF-8.

    Wrong bytes become lone surrogates, as in names of files. Raises OSError, and UnicodeError for damaged UTF-16.
    """
    with path.open("rb") as file:
        encoding = encoding_of(file.read(4))
    return path.read_text(encoding=encoding, errors="surrogateescape")


def encoding_of(start: bytes) -> str:
    """The encoding of a text: by its byte order mark, by the zero bytes of UTF-16 and UTF-32, else UTF-8."""
    return json.detect_encoding(start)


def read_json(path: Path) -> Any:
    return json.loads(path.read_bytes())  # json finds the encoding by the first bytes


def read_yaml(path: Path) -> Any:
    return parse_yaml(path.read_text(encoding="utf-8"))


def parse_yaml(text: str) -> Any:
    """The values of a YAML text. Raises YAMLError, ValueError or RecursionError if it is damaged."""
    try:
        try:
            return yaml.load(text, YAML_LOADER)
        except yaml.YAMLError:  # libyaml refuses escapes of bytes that are not UTF-8, as in names of files
            return yaml.safe_load(text)
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:  # for `!!bool x` and `!!timestamp x`
        raise ValueError(one_line(error)) from error


def read_record(path: Path) -> Record:
    """The values in a YAML or JSON file of a run, by name; empty if there is no file. Raises DAMAGED."""
    if not path.exists():
        return {}
    check_inside(path, path.parent)
    if path.stat().st_size > 1 << 22:
        raise ValueError("no file of at most 4 MiB")
    if path.suffix == ".json":
        content = read_json(path)
    else:
        depth = 0
        # libyaml is fast, and refuses the surrogates that stand for bytes of names that are not UTF-8.
        for event in yaml.parse(re.sub(rb"(?i)\\ud", rb"\\u0", path.read_bytes()), YAML_LOADER):
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            if depth > 100 or isinstance(event, yaml.AliasEvent):
                raise ValueError("aliases or lists of 100 levels, of which a run writes none, and which take minutes")
        content = read_yaml(path)
    return named_values(content)


def named_values(content: object) -> Record:
    """What a file holds, as values by name. Raises ValueError for anything else, and for names that are no texts."""
    if not isinstance(content, dict):
        raise ValueError("it holds no values with names")
    for name, value in content.items():
        if not isinstance(name, str):
            raise ValueError(f"{name!r} is no name")
        if isinstance(value, dict):
            named_values(value)
    return content


def check_inside(path: Path, folder: Path) -> None:
    """Raise ValueError for a path that leads out of the folder, and for a pipe or a device.

    Somebody may have sent the folder. Reading a pipe would wait.
    """
    if not path.resolve().is_relative_to(folder.resolve()) or (path.exists() and not path.is_file()):
        raise ValueError("no regular file, or one that leads out of its folder")


def wait_until_visible(path: Path, size: int, within_s: float) -> bool:
    """Wait at most this many seconds for a file of this size. Returns whether it is there.

    If another host has written it, a network file system may show the folder's earlier content for a while.
    """
    end = time.monotonic() + within_s
    while True:
        with suppress(OSError):
            list(path.parent.iterdir())  # asks the server again
            if path.stat().st_size == size:
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.2)


# ---- errors ----


@contextmanager
def damage_to_user_error(subject: str, path: str | Path, remedy: str) -> Iterator[None]:
    """Context of code that reads or writes a file: turns what DAMAGED_OR_FOREIGN has into a UserError.

    Its message: `SUBJECT: PATH (why); REMEDY`.
    """
    try:
        yield
    except DAMAGED_OR_FOREIGN as error:
        raise UserError(f"{subject}: {path} ({reason_of(error)}); {remedy}") from error


def reason_of(error: Exception) -> str:
    return getattr(error, "strerror", None) or one_line(error)


# ---- folders and names ----


def visible_entries(folder: Path) -> list[Path]:
    """The entries of a folder, sorted, without those that systems and notebooks leave there."""
    return sorted(path for path in folder.iterdir() if path.name[0] != "." and path.name not in LEFT_BY_SYSTEMS)


def folders(folder: Path) -> list[Path]:
    """The folders among a folder's `visible_entries`."""
    return [path for path in visible_entries(folder) if path.is_dir()]


def first_existing(path: Path) -> Path:
    """The path itself or the nearest of the folders above it that exists."""
    return next(each for each in (path, *path.absolute().parents) if each.exists())


def check_writable(folder: Path, key: str = "run") -> None:
    """Raise UserError for a folder that cannot be made or written. Leaves nothing. `key`: the setting that names it."""
    there = first_existing(folder)
    reason = ""
    if not there.is_dir():
        reason = "is a file"
    elif not os.access(there, os.W_OK | os.X_OK):
        reason = "cannot be written"
    else:
        try:  # /proc is writable by its permissions
            tempfile.TemporaryDirectory(prefix=".clipscale-", dir=there).cleanup()
        except OSError as error:
            reason = f"takes no folder: {error.strerror}"
    if reason:
        raise UserError(f"{key}={folder} cannot be written ({there} {reason}); choose another {key}=PATH")


def user_cache() -> Path:
    """The user's cache folder (XDG_CACHE_HOME is honoured)."""
    return Path(platformdirs.user_cache_dir("clipscale", appauthor=False))


def unused_path(folder: Path) -> Path:
    """The folder, or if it exists, the first free one with a number appended."""
    numbered = (folder.with_name(f"{folder.name}-{i}") for i in range(2, 10_000))
    return next(path for path in chain([folder], numbered) if not path.exists())


def file_name(text: str, most: int = 100) -> str:
    """A name of letters, digits and `_.,=+-`, of at most `most` characters: the text itself if possible.

    Otherwise it ends in the text's CRC-32, so that different texts have different names.
    """
    name = re.sub(r"[^A-Za-z0-9_.,=+-]+", "-", text).strip("-.")
    if name == text and len(name) <= most:
        return name
    return f"{name[: most - 9]}-{zlib.crc32(text.encode('utf-8', 'surrogatepass')):08x}"
