"""Keeps a second run out of a run's folder: rank 0 holds a lock on it for the run's life."""

import contextlib
import fcntl
import json
import logging
import os
import socket
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from clipscale import checkpoint
from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.launch import heartbeat, processes

log = logging.getLogger(__name__)

FILE = "run.lock"
SAME_HOST_S = 10.0
"""Wait for a run on this machine that is about to end. Its lock ends with the process, so a longer wait is for a run that goes on."""
OTHER_HOST_S = 120.0
"""The same for another machine, whose lock on NFS outlives a crash by the server's lease, usually 90 s."""
HEARTBEAT_S = 5.0
"""Interval at which a holder touches the file where the file system has no flock. Without three of them the holder counts as dead."""


class RunLock:
    """The lock of a run folder: `flock` on RUN/run.lock, which the kernel releases when the process ends, however it ends.

    The file names host, process and start for the message. Without `flock`, a holder is alive while its process is, on this machine, or
    while it touches the file, on another.
    """

    def __init__(self, run: Path, setting: str = "run") -> None:
        """`setting` names the folder in messages."""
        self.run, self.setting, self.held = run, setting, False
        self._ended = threading.Event()
        self._touched, self._seen = 0, 0.0  # time of the file's last change, and when it was first seen here

    def enter(self) -> None:
        """Make the folder, take the lock and remove what a dead run left: half-written files, heartbeats. Raises UserError."""
        checkpoint.make_folder(self.run)
        self.acquire()
        checkpoint.remove_temporary(self.run)
        heartbeat.clear(self.run)

    def acquire(self) -> None:
        """Take the lock, if need be after a short wait for its holder. Raises UserError if another run keeps it."""
        with files.reported(self.setting, self.run / FILE, f"choose another {self.setting}=NAME"):
            self._file = files.open_lock(self.run / FILE)
        started, announced = time.monotonic(), False
        while self._taken():
            holder = self._holder()
            here = holder.get("host") == socket.gethostname()
            who = f"process {holder.get('pid', '?')} on {holder.get('host', 'an unknown host')}, since {holder.get('since', '?')}"
            limit = SAME_HOST_S if here else OTHER_HOST_S
            if time.monotonic() - started > limit:
                self._file.close()
                folder = f"{self.setting}={self.run}"
                raise UserError(f"{folder} is in use by {who}; stop that run, or choose another {self.setting}=NAME")
            if not announced:
                text = "%s=%s is in use by %s; waiting up to %.0f s for its end"
                log.warning(text, self.setting, self.run, who, limit)
                announced = True
            time.sleep(min(0.2, limit))
        self.held = True
        record = {"host": socket.gethostname(), "pid": os.getpid(), "started": processes.started(os.getpid())}
        self._write(json.dumps(record | {"since": f"{datetime.now():%Y-%m-%d %H:%M:%S}"}))

    def release(self) -> None:
        """Give the lock back. Safe without a lock."""
        if self.held:
            self._ended.set()
            self._write("")
            self._file.close()
            self.held = False

    def _taken(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        except OSError:  # a file system without flock
            if self._alive():
                return True
            threading.Thread(target=self._beat, daemon=True).start()
            return False

    def _alive(self) -> bool:
        """Whether the process of the record lives. Looks for a change of the file where that process is on another machine."""
        holder = self._holder()
        if not holder:
            return False
        if holder.get("host") == socket.gethostname():
            return processes.state(holder.get("pid", 0), holder.get("started", 0.0)) != processes.DEAD
        touched = (self.run / FILE).stat().st_mtime_ns
        if touched != self._touched:
            self._touched, self._seen = touched, time.monotonic()
        return time.monotonic() - self._seen < 3 * HEARTBEAT_S

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError):
                os.utime(self.run / FILE)

    def _holder(self) -> dict[str, Any]:
        try:
            record = files.read_json(self.run / FILE)
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
            self._file.truncate(0)
            self._file.seek(0)
            self._file.write(text.encode())
            self._file.flush()
