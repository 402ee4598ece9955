"""Notes which tests run which lines, in every process of theirs: `make mutants` chooses tests by it.

A note is written when a line first runs, so that a process that is killed has noted too.
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

# The environment variable that names the test: its processes inherit it.
TEST = "TEST_THAT_RUNS"


def note_lines(wanted: Mapping[str, Collection[int]], notes: Path) -> None:
    """In this process and its forks: append a note for each of these lines, by its file, and line 0 for any function
    of that file. What a module or a class runs is left out, as it runs on import."""
    file = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    noted = set[tuple[str, str, int]]()
    lines_of: dict[CodeType, set[int]] = {}

    def note(path: str, line: int) -> None:
        key = os.environ.get(TEST, ""), path, line
        if key not in noted:
            noted.add(key)
            os.write(file, (json.dumps(key) + "\n").encode())

    def on_line(frame: FrameType, event: str, _: Any) -> Callable:
        if event == "line" and frame.f_lineno in lines_of[frame.f_code]:
            note(frame.f_code.co_filename, frame.f_lineno)
        return on_line

    def on_call(frame: FrameType, event: str, _: Any) -> Callable | None:
        code = frame.f_code
        if code.co_filename not in wanted or not code.co_flags & CO_OPTIMIZED:
            return None
        if code not in lines_of:
            lines_of[code] = {line for _, _, line in code.co_lines() if line}.intersection(wanted[code.co_filename])
        note(code.co_filename, 0)
        return on_line if lines_of[code] else None

    threading.settrace(on_call)
    sys.settrace(on_call)
