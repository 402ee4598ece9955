"""The files of a folder or an archive (.tar, .tar.gz, .tgz, .zip), by their names within it. No archive is unpacked into files.

Of a packed tar, single files cannot be read, so its plain tar is kept in the user's cache.
"""

import errno
import fcntl
import hashlib
import os
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path, PurePosixPath

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.terminal import say
from clipscale.data.sample import MAX_IMAGE_BYTES
from clipscale.data.shards.access import user_cache
from clipscale.data.shards.tar import unpacked
from clipscale.eval.sets.item import ImageRef
from clipscale.eval.sets.shards import plain_members

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip")
MOST_FILES = 1 << 22
"""Files of a folder or an archive; ImageNet's training set has 1.3 million."""
SPARE = 1 << 30
"""Bytes that a plain copy leaves free on its disk."""
_ENTRY = 46
"""Bytes of the smallest entry of a zip's directory."""
_UNREADABLE = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, OSError)
Tree = dict[str, ImageRef]


def is_archive(path: Path) -> bool:
    return path.name.endswith(ARCHIVES)


def stem(path: Path) -> str:
    """The name of an archive, or of any other path, without its ending."""
    return next((path.name.removesuffix(end) for end in ARCHIVES if path.name.endswith(end)), path.name)


@lru_cache(maxsize=8)
def contents(path: Path) -> Tree:
    """The files of a folder, an archive or a .gz, by their names within it. Raises UserError."""
    try:
        if path.is_dir():
            return _of_folder(path)
        if path.name.endswith(".zip"):
            return _of_zip(path)
        if path.name.endswith((".gz", ".tgz")):
            plain = _plain_copy(path)
            return _of_tar(plain) if is_archive(path) else {path.stem: ImageRef(plain)}
        return _of_tar(path) if path.name.endswith(".tar") else {path.name: ImageRef(path)}
    except _UNREADABLE as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"eval.sets: cannot read {path} ({' '.join(str(error).split())[:300]}); fetch it again")


def _of_folder(root: Path) -> Tree:
    """Links to files out of the folder are left out, and links to folders are not followed."""
    found, own = Tree(), files.own_root(root)
    for folder, _, names in os.walk(root):
        for name in names:
            file = Path(folder, name)
            if not file.is_symlink() or files.inside(file, own):
                _add(found, file.relative_to(root).as_posix(), ImageRef(file))
    return found


def _of_tar(path: Path) -> Tree:
    found = Tree()
    with files.opened(path) as tar:
        for name, size in plain_members(tar, any_size=True):
            _add(found, name, ImageRef(path, tar.tell(), size))
    return found


def _of_zip(path: Path) -> Tree:
    found = Tree()
    with files.opened(path) as file:
        end = zipfile._EndRecData(file)  # type: ignore[attr-defined]
        if end and end[5] > MOST_FILES * _ENTRY:  # ZipFile makes an object of each entry of its directory
            raise ValueError(f"its directory has {end[5]} bytes, more than {MOST_FILES * _ENTRY}")
    with files.opened(path) as file, zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            if member.flag_bits & 1:
                raise ValueError(f"{member.filename} needs a password; unpack it there")
            if member.is_dir():
                continue
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(f"{member.filename} is packed by method {member.compress_type}; unpack it there")
            file.seek(member.header_offset)
            head = file.read(30)
            if len(head) < 30 or not head.startswith(b"PK\3\4"):
                raise zipfile.BadZipFile(f"{member.filename} has no header")
            start = member.header_offset + 30 + sum(struct.unpack("<HH", head[26:30]))
            forms = (inflated,) if member.compress_type == zipfile.ZIP_DEFLATED else ()
            _add(found, member.filename, ImageRef(path, start, member.compress_size, forms))
    return found


def _add(found: Tree, name: str, ref: ImageRef) -> None:
    place = PurePosixPath(name)
    if not place.name.startswith(".") and "__MACOSX" not in place.parts:  # of macOS, beside each file
        found[str(place)] = ref
    if len(found) > MOST_FILES:
        raise ValueError(f"it has more than {MOST_FILES} files")


def inflated(data: bytes) -> bytes:
    """The content of a zip's deflated member. Raises OSError, also for more than MAX_IMAGE_BYTES."""
    decoder = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        content = decoder.decompress(data, MAX_IMAGE_BYTES)
    except zlib.error as error:
        raise OSError(f"damaged ({error})") from error
    if not decoder.eof:
        raise OSError(f"damaged, or more than {MAX_IMAGE_BYTES} bytes")
    return content


def _plain_copy(path: Path) -> Path:
    """The content of a packed file, in the user's cache. The first process writes it, others wait. Raises UserError and OSError."""
    about = path.stat()
    key = hashlib.blake2b(f"{path.resolve()}\0{about.st_size}\0{about.st_mtime_ns}".encode(), digest_size=8).hexdigest()
    cache = user_cache()
    copy = cache / "eval" / f"{key}-{stem(path)}"
    try:
        folder = files.inner_folder(cache, "eval")
        with files.open_lock(folder / f"{key}.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not copy.is_file():
                with files.replacing(copy) as out:
                    for piece in _unpacked(path):
                        if shutil.disk_usage(folder).free < SPARE + len(piece):
                            raise OSError(errno.ENOSPC, f"{SPARE >> 20} MiB of its disk stay free")
                        out.write(piece)
                say(f"{path}: its content is kept in {copy}")
    except OSError as error:
        raise UserError(
            f"eval.sets: the content of {path} cannot be kept in {copy.parent} ({error.strerror or error}); free space there, or name "
            "another folder with the environment variable XDG_CACHE_HOME"
        ) from error
    return copy


def _unpacked(path: Path) -> Iterator[bytes]:
    """Raises UserError."""
    try:
        with files.opened(path) as source:
            stream, _ = unpacked(source)
            while piece := stream.read(1 << 20):
                yield piece
    except _UNREADABLE as error:
        raise _unreadable(path, error) from error
