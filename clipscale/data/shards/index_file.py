"""The SQLite file of an index. It may come with a stranger's shards, so it is trusted with nothing.

Another schema than ours is not read: a view computes rows without end. Rows and time have limits, and SQLite's journal
of a file that came is never followed: it can name files that SQLite deletes.
"""

import fcntl
import logging
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from clipscale.common import files
from clipscale.common.errors import UserError

log = logging.getLogger(__name__)

SCHEMA = """CREATE TABLE IF NOT EXISTS shards (name TEXT PRIMARY KEY, size INT, stamp TEXT, samples INT,
            sha256 TEXT, totals TEXT, reason TEXT, detail TEXT, places BLOB)"""
"""`stamp` is the version, `places` the offsets. The long column is last: SQLite reads the others without it."""
LONGEST_VALUE = 1 << 26
"""Bytes of the longest value. A shard of ten million samples has about 30 MB of offsets."""
MOST_BYTES = 1 << 30
"""Bytes that one question may return, with ROW_BYTES for each row: more than two million shards of one folder."""
ROW_BYTES = 256
"""What a row takes in memory beside its texts."""
MOST_S = 120.0
"""Seconds that one question may take. A million entries take about five."""


def query(path: Path, question: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    """The rows that answer an SQL query; none if there is no such file. Warns of a damaged file and ignores it."""
    if not path.is_file():
        return []
    try:
        with closing(_open(path)) as base:
            return list(_bounded(base.execute(question, values)))
    except (sqlite3.Error, OSError, ValueError) as error:
        log.warning("%s: the index cannot be read (%s); going on without it", path, error)
        return []


def _open(path: Path) -> sqlite3.Connection:
    """Open for reading, without the journals beside it. Raises sqlite3.Error, and ValueError for another schema than ours."""
    base = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
    try:
        end = time.monotonic() + MOST_S
        base.set_progress_handler(lambda: time.monotonic() > end, 10_000)
        base.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)
        base.execute("PRAGMA trusted_schema = OFF")
        found = base.execute("SELECT sql FROM sqlite_master WHERE sql NOT NULL")
        if [str(text).split() for (text,) in found] != [SCHEMA.replace("IF NOT EXISTS ", "").split()]:
            raise ValueError("it holds something else than one table of shards")
        return base
    except BaseException:
        base.close()
        raise


def _bounded(rows: Iterator[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """The rows while they fit MOST_BYTES: pages of a small file that name each other hold rows without end."""
    total = 0
    for row in rows:
        total += ROW_BYTES + sum(len(value) for value in row if isinstance(value, str | bytes))
        if total > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES} bytes of entries")
        yield row


@contextmanager
def draft(path: Path) -> Iterator[sqlite3.Connection]:
    """A copy of an index that replaces it at the end; an earlier run's draft is continued. Locks out other processes.

    Raises UserError if it cannot be written.
    """
    own = path.with_name(f".{path.name}.draft")
    try:
        with closing(files.open_lock(path.with_name(f".{path.name}.lock"))) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("%s: another process is writing it; waiting", path)
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:
                what = "this file system has no locks"
                log.warning("%s: %s (%s); do not index the same folder twice at once", path, what, error)
            files.remove_leftovers(path.parent)
            _begin(own, [own, path])
            with closing(sqlite3.connect(own, isolation_level=None)) as base:
                yield base
            own.replace(path)
    except (OSError, sqlite3.Error) as error:
        raise UserError(f"{path}: cannot be written ({error}); choose another place with cache=") from error


def _begin(draft: Path, sources: Sequence[Path]) -> None:
    """Make a draft with the rows of the first readable source. Its file is new, and no journal that came lies beside it."""
    for source in sources:
        if source.is_file() and not source.is_symlink():
            try:
                _copy(source, draft)
                break
            except (sqlite3.Error, ValueError) as error:
                log.warning("%s: damaged (%s); indexing anew", source, error)
    else:
        _copy(None, draft)
    for suffix in ("-journal", "-wal", "-shm"):
        draft.with_name(draft.name + suffix).unlink(missing_ok=True)


def _copy(source: Path | None, path: Path) -> None:
    """Write the rows of an index to a new one at `path`. Raises sqlite3.Error and ValueError for damage."""
    with files.replacing(path) as file, closing(sqlite3.connect(file.name)) as base:
        base.execute(SCHEMA)
        if source is not None:
            with closing(_open(source)) as old:
                if old.execute("PRAGMA quick_check(1)").fetchall() != [("ok",)]:
                    raise ValueError("its pages do not fit together")
                rows = old.execute("SELECT * FROM shards")
                base.executemany("INSERT INTO shards VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        base.commit()
