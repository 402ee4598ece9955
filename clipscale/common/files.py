"""Files that are written as a whole or not at all, and one line about those that cannot be."""

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import platformdirs
import yaml

from clipscale.common.errors import UserError

LEFT_BY_SYSTEMS = {"__MACOSX", "@eaDir", "Thumbs.db", "desktop.ini", "lost+found"}
"""Names of what nobody put into a folder; so are all that begin with a dot."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file, open for writing bytes. It becomes `path` at the end, and disappears after an exception. Its
    permissions are those of any new file, also if a library has put another in its place."""
    temporary = path.with_name(f".{path.name[:40]}-{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            temporary.chmod(os.fstat(file.fileno()).st_mode & 0o777)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def user_cache() -> Path:
    """The user's cache folder (XDG_CACHE_HOME is honoured)."""
    return Path(platformdirs.user_cache_dir("clipscale", appauthor=False))


def sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def read_json(path: Path) -> Any:
    return json.loads(path.read_bytes())  # in the encoding that its first bytes tell


def visible(folder: Path) -> list[Path]:
    """What lies in a folder, sorted, without what systems and notebooks leave there."""
    return sorted(path for path in folder.iterdir() if path.name[0] != "." and path.name not in LEFT_BY_SYSTEMS)


def folders(folder: Path) -> list[Path]:
    """The `visible` folders in a folder."""
    return [path for path in visible(folder) if path.is_dir()]


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def write_text(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))  # names of files may hold bytes that are no UTF-8


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")


@contextmanager
def reported(what: str, path: str | Path, remedy: str) -> Iterator[None]:
    """Report that a file cannot be read or written as a UserError: `WHAT: PATH (why); REMEDY`."""
    try:
        yield
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise UserError(f"{what}: {path} ({getattr(error, 'strerror', None) or error}); {remedy}") from error
