"""Runs a command in this process under audit events, a memory limit and a clock, and says what is wrong with how it ended."""

import os
import re
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from clipscale.cli.main import main
from clipscale.data.shards.access import user_cache
from tests.security.limits import address_space
from tests.support.audit import heard

MOST_S, MOST_BYTES = 60.0, 2 << 30


class Watch:
    """What a command does beside its work, by Python's audit events: it starts programs, connects, or writes outside its folders."""

    def __init__(self) -> None:
        self.seen = list[str]()

    def hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if event in ("os.system", "os.exec", "os.posix_spawn", "socket.connect") or (
            event == "subprocess.Popen" and Path(str(arguments[0])).name not in PROGRAMS
        ):
            self.seen.append(f"{event} {arguments[:2]}")
        elif event == "open" and isinstance(arguments[0], str) and isinstance(arguments[2], int):
            path = os.path.realpath(arguments[0])
            if arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and not path.startswith(WRITABLE):
                self.seen.append(f"writes {path}")


PROGRAMS = ("git", "uname", "ldconfig", "nvidia-smi")
"""What `env.json` and torch ask."""
WRITABLE = (tempfile.gettempdir(), str(user_cache()), "/dev/", "/proc/")


def peak_bytes() -> int:
    """The most memory of this process since it was last asked, or now where the kernel does not say."""
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak


REFUSED_MEMORY = re.compile(r"MemoryError|[Oo]ut of memory|alloc", re.ASCII)
"""How Python, numpy, torch, pyarrow and the system call memory that RLIMIT_AS has refused."""


def attempt(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    """Run one command; what is wrong with how it ended, or nothing."""
    began = time.monotonic()
    peak_bytes()
    before = psutil.Process().memory_info().rss
    watch = Watch()
    try:
        with heard(watch.hear), address_space(MOST_BYTES):
            status = main(list(words))
    except BaseException as error:
        frames, trace = [], error.__traceback__
        while trace:
            frames.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
            trace = trace.tb_next
        return f"{type(error).__name__}: {str(error)[:100]!r} at {' '.join(frames[-4:])}"
    finally:
        shown = capsys.readouterr()
    lines = shown.err.strip("\n").split("\n")
    taken, grown = time.monotonic() - began, peak_bytes() - before
    if status not in (0, 1, 2) or "Traceback" in shown.err + shown.out:
        return f"status {status}: {shown.err[-300:]}"
    if status == 2 and (not lines[-1].startswith("error: ") or sum(line.startswith("error: ") for line in lines) != 1):
        return f"not one line: {shown.err[-300:]!r}"
    if not all(line.isprintable() for line in lines):
        return f"not printable: {shown.err[-300:]!r}"
    if REFUSED_MEMORY.search(shown.err):
        return f"asked for more than {MOST_BYTES} bytes: {shown.err[-300:]!r}"
    if watch.seen:
        return f"did {watch.seen}"
    if taken > MOST_S or grown > MOST_BYTES:
        return f"took {taken:.0f} s and {grown >> 20} MiB"
    return ""
