"""A heartbeat of every rank: RUN/ranks/00003.json says where it is. When ranks lose each other, these files name the one that failed first.

Clocks of machines differ and jump, so a rank is silent when the number of its beats has not changed for a while by the reader's own clock.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from clipscale.common import files
from clipscale.common.errors import LostRankError, StoppedError, UserError, lost_rank
from clipscale.common.terminal import printable, say
from clipscale.config.redact import redact
from clipscale.launch.processes import ALIVE, DEAD, STOPPED, started, state

if TYPE_CHECKING:
    from clipscale.distributed.world import World

FOLDER = "ranks"
BEAT_S = 5.0
"""Between two beats; a sixth of the time-out where that is less."""
MISSED = 3
"""A rank is silent after so many beats without a new one."""
SIZE = 4096
"""Bytes of a record, padded with spaces. It is written in place, so that a full disk takes it."""


@dataclass(frozen=True)
class Beat:
    """Where a rank is."""

    rank: int
    host: str
    pid: int
    started: float
    """Of the process; see processes.py."""
    space: str
    """Of process numbers: containers of one host may each count their own."""
    number: int = 0
    place: int = 0
    """Phases begun so far. All ranks go through the same ones, so a lower number is behind."""
    phase: str = "start"
    step: int = 0
    since_s: float = 0.0
    """Since it last moved: to another phase or chunk."""
    time: str = ""
    """For people."""
    failure: str = ""
    """The error that has ended it."""
    lost: bool = False
    """The error only says that another rank does not answer."""

    @property
    def where(self) -> tuple[str, str]:
        """The rank, and the place of its last beat."""
        of_step = f" of step {self.step}" if self.step else ""
        return f"rank {self.rank} on {self.host} (process {self.pid})", f"in {self.phase}{of_step}"


def own_beat(rank: int) -> Beat:
    """The first beat of this process."""
    space = ""
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 (no path)
    return Beat(rank, socket.gethostname(), os.getpid(), started(os.getpid()), space)


def path_of(run: Path, rank: int) -> Path:
    """The record of a rank."""
    return run / FOLDER / f"{rank:05d}.json"


def clear(run: Path) -> None:
    """Remove the records of an earlier start. The caller holds the run's lock."""
    for path in (run / FOLDER).glob("*.json"):
        path.unlink(missing_ok=True)


def read(run: Path) -> list[Beat]:
    """The last beats of all ranks, in their order. Damaged records are left out."""
    found = []
    for path in sorted((run / FOLDER).glob("*.json")):
        with suppress(OSError, ValueError, TypeError):
            beat = Beat(**files.read_json(path, most=SIZE))
            if all(isinstance(number, int) for number in (beat.rank, beat.number, beat.place, beat.step)):
                found.append(beat)
    return found


def where(run: Path | None, rank: int) -> str:
    """` on HOST in PHASE of step N`, of a rank that has ended; empty where it is not known."""
    found = [beat for beat in (read(run) if run else []) if beat.rank == rank]
    return f" on {found[0].host} {found[0].where[1]}" if found else ""


def first_cause(beats: Sequence[Beat], states: dict[int, str], silent: set[int]) -> tuple[Beat, str] | None:
    """The rank that failed first and a line about it; None where all ranks live and are at the same place.

    `states`: of the processes that can be seen from here. `silent`: ranks whose beats have stopped. Ranks that have only lost another one
    are no cause.
    """
    candidates = [beat for beat in beats if not beat.lost]
    failed = [beat for beat in candidates if beat.failure]
    gone = [beat for beat in candidates if states.get(beat.rank, ALIVE) != ALIVE or beat.rank in silent]
    behind = [beat for beat in candidates if beat.place < max(one.place for one in beats)]
    stuck = candidates if len(candidates) < len(beats) else []  # the others have given up waiting
    for group in (failed, gone, behind, stuck):
        if group:
            beat = min(group, key=lambda one: (one.place, one.rank))
            more = len({one.rank for one in group if one.host == beat.host}) - 1
            others = f"; {more} more of this machine as well" if more else ""
            return beat, _line(beat, states.get(beat.rank), beats, beat in gone) + others
    return None


def _line(beat: Beat, found: str | None, beats: Sequence[Beat], gone: bool) -> str:
    who, where = beat.where
    if beat.failure:
        return f"{who} failed {where}: {beat.failure}"
    if found == DEAD:
        return f"{who} has died, last seen {where}; the machine may be out of memory"
    if found == STOPPED:
        return f"{who} is stopped {where}, by SIGSTOP or a debugger"
    if gone and not found:
        return f"{who} does not answer, last seen {where}; its machine or the network may be down"
    ahead = max(beats, key=lambda one: one.place)
    return f"{who} hangs {where}, for {beat.since_s:.0f} s; others wait for it {ahead.where[1]}"


class Heartbeat:
    """Around the whole work of a rank: writes its beats, and explains the loss of another rank as a LostRankError that names it."""

    def __init__(self, run: Path, world: "World", timeout_s: float) -> None:
        """`timeout_s`: how long ranks wait for each other."""
        self.run, self.world, self._timeout_s = run, world, timeout_s
        self.interval = min(BEAT_S, timeout_s / 6)
        self.detail: Callable[[], str] = str
        """What else this rank does at the moment."""
        self._own, self._moved = own_beat(world.rank), time.monotonic()
        """Where this rank is, and since when."""
        self._number, self._writing = 0, threading.Lock()
        self._seen: dict[int, tuple[int, float]] = {}
        """Of every rank: the number of the last beat, and when it was first seen."""
        self._gone: set[int] = set()
        """Ranks that have died, are stopped or silent."""
        self._warned, self._ended = False, threading.Event()
        self._thread = threading.Thread(target=self._go, name="heartbeat", daemon=True)

    def enter(self, phase: str, step: int, *, beat: bool = False) -> None:
        """This rank begins a phase of a step, counted from 1; all ranks begin the same ones. `beat`: the record says so at once."""
        self._own = replace(self._own, phase=phase, step=step, place=self._own.place + 1)
        self.move()
        if beat:
            self._write()

    def move(self) -> None:
        """This rank goes on within its phase."""
        self._moved, self._warned = time.monotonic(), False

    def check(self) -> None:
        """Outside of collectives, where a slow disk may take longer, raises RuntimeError after the time-out if a rank is gone."""
        if self._gone and time.monotonic() - self._moved > self._timeout_s:
            raise RuntimeError("Timed out waiting for a rank that does not answer")

    def __enter__(self) -> "Heartbeat":
        with suppress(OSError):  # a full disk: only the names would be missing
            files.inner_folder(self.run, FOLDER)
        self._write()
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raises LostRankError in the place of an error that says no more than that another rank does not answer."""
        lost = self.world.size > 1 and isinstance(error, Exception) and lost_rank(error)
        failed = isinstance(error, Exception) and not isinstance(error, StoppedError)
        if lost or (failed and (self.world.size > 1 or not isinstance(error, UserError))):
            failure = printable(redact(f"{type(error).__name__}: {error}").partition("\n")[0])[:400]
            self._own = replace(self._own, failure=failure, lost=lost)
            self._write()
        line = self.cause() if lost else ""
        self._ended.set()
        self._thread.join(self.interval)  # its disk may hang
        if not self._own.failure:
            with suppress(OSError):  # other ranks' records are in the folder
                path_of(self.run, self.world.rank).unlink(missing_ok=True)
                (self.run / FOLDER).rmdir()
        if lost:
            survivors = [beat.rank for beat in read(self.run) if beat.lost]
            raise LostRankError(line, first=self.world.rank == min(survivors, default=self.world.rank)) from error

    def cause(self) -> str:
        """A line about the rank that failed first, after a wait for beats where nothing shows it at once."""
        self._look()
        begun, late, found = time.monotonic(), False, None
        while not late:
            time.sleep(min(0.5, self.interval))  # the records of ranks that fail now
            late = time.monotonic() - begun > (MISSED + 0.5) * self.interval
            found = self._look()
            if found and (found[0].failure or found[0].rank in self._gone):
                break
        if found:
            return found[1]
        hosts = sorted({beat.host for beat in read(self.run)})
        between = f" between {', '.join(hosts)}" if len(hosts) > 1 else ""
        return (
            f"all ranks live and wait for each other {self._now().where[1]}: the network{between} may be down, or "
            f"launch.timeout_s={self._timeout_s:g} is too short ({self._own.failure})"
        )

    def _look(self) -> tuple[Beat, str] | None:
        """Read all records."""
        beats, now = read(self.run), time.monotonic()
        for beat in beats:
            if self._seen.get(beat.rank, (-1, 0.0))[0] != beat.number:
                self._seen[beat.rank] = beat.number, now
        near = [beat for beat in beats if (beat.host, beat.space) == (self._own.host, self._own.space)]
        states = {beat.rank: state(beat.pid, beat.started) for beat in near}
        silent = {rank for rank, (_, at) in self._seen.items() if now - at > MISSED * self.interval}
        self._gone = {rank for rank, found in states.items() if found != ALIVE} | silent
        return first_cause(beats, states, silent)

    def _go(self) -> None:
        while not self._ended.wait(self.interval):
            self._write()
            if self.world.size > 1 and not self._own.failure:
                self._watch(time.monotonic() - self._moved)

    def _watch(self, quiet_s: float) -> None:
        """Warn of a rank that holds all up, before the time-out ends the run. Reads the records only where this rank waits for long."""
        if quiet_s < self._timeout_s / 3:
            return
        found = self._look()
        if self._warned or found is None or quiet_s < 2 / 3 * self._timeout_s or found[0].rank == self.world.rank:
            return
        self._warned = True
        if self.world.rank == min(set(self._seen) - self._gone - {found[0].rank}, default=-1):
            say(f"warning: {found[1]}; after launch.timeout_s={self._timeout_s:g} the run ends", error=True)

    def _now(self) -> Beat:
        own, doing = self._own, self.detail()
        since_s, at = round(time.monotonic() - self._moved, 1), f"{datetime.now():%Y-%m-%d %H:%M:%S}"
        phase = f"{own.phase} ({doing})" if doing else own.phase
        return replace(own, number=self._number, phase=phase, since_s=since_s, time=at)

    def _write(self) -> None:
        with self._writing, suppress(OSError):  # a full disk, a folder that is gone: training does not depend on it
            self._number += 1
            with files.open_lock(path_of(self.run, self.world.rank)) as file:
                file.write(json.dumps(asdict(self._now()), ensure_ascii=False).encode("utf-8", "replace").ljust(SIZE))
