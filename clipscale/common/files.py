"""Files that are written as a whole or not at all, and read with one line where they are damaged."""

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from clipscale.common.errors import UserError


@contextmanager
def replacing(path: Path, *, sync: bool = False) -> Iterator[BinaryIO]:
    """A new file, open for writing bytes. It becomes `path` at the end, and disappears after an exception.

    With `sync` the bytes are on the disk before the file has its name.
    """
    temporary = path.with_name(f".{path.name[:40]}-{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
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


def sync_folder(folder: Path) -> None:
    """Put a rename on the disk."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write_text(path: Path, text: str, *, errors: str = "strict") -> None:
    """Write a file as a whole or not at all, as UTF-8."""
    with replacing(path) as file:
        file.write(text.encode("utf-8", errors))


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON with a final newline, as a whole or not at all."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def parse_json(text: str | bytes) -> Any:
    """The value of JSON text. Raises ValueError, also for text that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(path: str | Path) -> Any:
    """The value in a JSON file. Raises OSError and ValueError."""
    return parse_json(Path(path).read_bytes())


def read_tree(path: str | Path) -> dict[str, Any]:
    """The settings in a YAML file, or the object in a JSON file. Raises OSError and ValueError."""
    text = Path(path).read_text(encoding="utf-8")
    try:
        tree = parse_json(text) if str(path).endswith(".json") else yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    if not isinstance(tree, dict):
        raise ValueError("it holds no names and values")
    return tree


@contextmanager
def reported(what: str, path: str | Path, remedy: str) -> Iterator[None]:
    """Report that a file cannot be read or written as a UserError: `WHAT: PATH (why); REMEDY`."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{what}: {path} ({getattr(error, 'strerror', None) or error}); {remedy}") from error
