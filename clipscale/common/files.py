"""Files in folders that may come from a stranger, where every name may be a link, a FIFO or a device.

A file is written under a random name in the same folder and renamed when it is complete. Only regular files are read.
"""

import errno
import fcntl
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from clipscale.common.errors import UserError

SMALL = 1 << 24
"""Bytes of the largest description or record that is read as a whole. Ours take kilobytes. JSON takes ten times as much as objects."""
MOST_YAML = 1 << 18
"""Bytes of a run's settings, which take about ten kilobytes. PyYAML takes up to 8 s for them."""
MOST_PARTS = 1 << 22
"""Lists and objects of JSON text, brackets in its texts included: 64 bytes for two characters. Karpathy's COCO captions have 2 million."""
MOST_VALUES = 3 << 22
"""Commas of JSON text. A value with its name takes 160 bytes, so they take 2 GiB. Karpathy's COCO captions have 10 million."""
_TEMPORARY = re.compile(r"^\..*-[0-9a-f]{16}\.tmp$", re.DOTALL)


# -- writing -----------------------------------------------------------------------------------------------------------


@contextmanager
def replacing(path: Path, *, sync: bool = False) -> Iterator[BinaryIO]:
    """A new file, open for writing bytes; `name` is its path. It becomes `path` at the end and disappears after an exception.

    A link at `path` is replaced, never followed. The umask decides on the permissions. With `sync` the bytes are on the
    disk before the file has its name. Raises OSError.
    """
    temporary = path.with_name(f".{path.name[:40]}-{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb", opener=_not_followed) as file:
            with suppress(OSError):  # a file system without locks: `remove_leftovers` cannot tell, and leaves the file
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        temporary.replace(path)
        if sync:
            sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _not_followed(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def sync_folder(folder: Path) -> None:
    """Put a rename on the disk, where the file system can."""
    with suppress(OSError):
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def write_text(path: Path, text: str, *, errors: str = "strict") -> None:
    """Write a file as a whole or not at all, as UTF-8; see `replacing`."""
    with replacing(path) as file:
        file.write(text.encode("utf-8", errors))


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON with a final newline; see `replacing`."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def remove_leftovers(folder: Path) -> None:
    """Remove files that `replacing` has left in the folder because its process was killed. Files still being written stay."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if _TEMPORARY.match(path.name):
            with suppress(OSError), opened(path) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def inner_folder(root: Path, *names: str) -> Path:
    """Make the folder `root`, and in it the folders `names`, one in another. Returns the last one.

    `root` may be a link, since the user names it. Those inside may not: a stranger would choose where files go. Raises OSError.
    """
    root.mkdir(parents=True, exist_ok=True)
    for name in names:
        root = root / name
        if root.is_symlink():
            raise OSError(errno.ELOOP, f"{name} in it is a symbolic link; remove the link", str(root))
        root.mkdir(exist_ok=True)
    return root


def open_lock(path: Path) -> BinaryIO:
    """A file for `flock`, made if there is none, neither truncated nor reached through a link. Open for reading and writing.

    Raises OSError for anything but a regular file with one name.
    """
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    about = os.fstat(number)
    if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
        os.close(number)
        raise OSError(errno.EINVAL, "the lock is no regular file, or one with a second name; remove it", str(path))
    return open(number, "r+b")  # noqa: PTH123 (a descriptor)


# -- reading -----------------------------------------------------------------------------------------------------------


def opened(path: str | Path, *, most: int | None = None, follow: bool = True, buffering: int = -1) -> BinaryIO:
    """A regular file, open for reading. A FIFO or device is refused without waiting for it, a link unless `follow`.

    Raises OSError, also for more than `most` bytes.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    number = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    about = os.fstat(number)
    problem: OSError | None = None
    if stat.S_ISDIR(about.st_mode):
        problem = IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    elif not stat.S_ISREG(about.st_mode):
        problem = OSError(errno.EINVAL, "it is no regular file", str(path))
    elif most is not None and about.st_size > most:
        problem = _too_large(path, most)
    if problem:
        os.close(number)
        raise problem
    return open(number, "rb", buffering=buffering)  # noqa: PTH123 (a descriptor; the caller closes)


def _too_large(path: str | Path, most: int) -> OSError:
    return OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))


def read_bytes(path: str | Path, most: int = SMALL) -> bytes:
    """A regular file's content. Raises OSError, also for more than `most` bytes."""
    parts, left = [], most + 1
    with opened(path, most=most) as file:
        while data := file.read(min(left, 1 << 20)):  # the size of a file in /proc is not known
            parts.append(data)
            left -= len(data)
            if left <= 0:
                raise _too_large(path, most)
    return b"".join(parts)


def read_text(path: str | Path, most: int = SMALL, *, errors: str = "strict") -> str:
    """A regular file's text, which is UTF-8. Raises OSError, and ValueError for other bytes."""
    return read_bytes(path, most).decode("utf-8", errors)


def lines(path: str | Path, longest: int, most: int | None = None) -> Iterator[bytes]:
    """A regular file's lines; of a longer one, `longest` bytes at a time. Raises OSError, also for more than `most` bytes."""
    with opened(path, most=most) as file:
        yield from iter(partial(file.readline, longest), b"")


def parse_json(text: str | bytes, most_parts: int = MOST_PARTS) -> Any:
    """The value of JSON text. Raises ValueError for all text that is none, or of too many or too deeply nested parts."""
    parts = text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")
    if parts > most_parts:
        raise ValueError(f"it has more than {most_parts} lists and objects")
    if (text.count(",") if isinstance(text, str) else text.count(b",")) > MOST_VALUES:
        raise ValueError(f"it has more than {MOST_VALUES} values")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(path: str | Path, most: int = SMALL, most_parts: int = MOST_PARTS) -> Any:
    """The value in a JSON file. Raises OSError and ValueError."""
    return parse_json(read_bytes(path, most), most_parts)


def own_root(folder: str | Path) -> Path:
    """The folder in which files that came with `folder` lie: itself, or for a snapshot of the Hugging Face cache the
    repository's folder, since a snapshot consists of links to its `blobs`.
    """
    real = Path(os.path.realpath(folder))
    repository = real.parent.parent
    return repository if real.parent.name == "snapshots" and (repository / "blobs").is_dir() else real


def inside(path: str | Path, root: str | Path) -> bool:
    """Whether a path, all links followed, leads into the folder `root`."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


class _Plain(yaml.SafeLoader):
    """YAML without aliases: a few lines of them stand for trees of any size."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("it holds aliases")
        return super().compose_node(parent, index)


def parse_yaml(text: str) -> Any:
    """The value of YAML text without aliases. Raises ValueError."""
    try:
        return yaml.load(text, Loader=_Plain)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error


def read_tree(path: str | Path) -> dict[str, Any]:
    """The settings in a YAML file, or the object in a JSON file, with texts for keys. Raises OSError and ValueError."""
    tree = read_json(path) if str(path).endswith(".json") else parse_yaml(read_text(path, MOST_YAML))
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ValueError("it holds no names and values")
    return tree


@contextmanager
def reported(what: str, path: str | Path, remedy: str) -> Iterator[None]:
    """Report that a file cannot be read or written as a UserError: `WHAT: PATH (why); REMEDY`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {path} ({error.strerror or error}); {remedy}") from error
    except ValueError as error:
        raise UserError(f"{what}: {path} ({error}); {remedy}") from error
