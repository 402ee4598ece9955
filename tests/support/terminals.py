"""Commands on a terminal of 100 columns."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path

# Longer than any wait of a command that works, and shorter than a test may take.
TIMEOUT_S = 300.0


def on_terminal(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], *typed: tuple[str, str]
) -> tuple[int, str]:
    """The exit status of a command and all that it has written. `typed`: once a pattern is found, a text is typed."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**environment, "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        start_new_session=True,
    )
    os.close(theirs)
    output = ""
    left = [*typed]
    answered = 0
    while part := read(ours, TIMEOUT_S):
        output += part
        if left and re.search(left[0][0], plain(output[answered:])):
            answered = len(output)
            os.write(ours, left.pop(0)[1].encode())
    os.close(ours)
    return process.wait(60), output


def read(terminal: int, timeout_s: float) -> str:
    ready, _, _ = select.select([terminal], [], [], timeout_s)
    assert ready, f"nothing was written for {timeout_s} s"
    try:
        return os.read(terminal, 1 << 16).decode(errors="replace")
    except OSError:  # the other side has closed it
        return ""


def plain(output: str) -> str:
    """The text without colours, bells and moves of the cursor."""
    return re.sub(r"\x1b\[[?\d;]*\w|\x07", "", output)


def screen(output: str) -> list[str]:
    """The lines that are left in the end."""
    return [line.rpartition("\x1b[K")[2].strip("\r") for line in output.split("\n")]
