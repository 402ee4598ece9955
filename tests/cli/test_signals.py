"""Signals while a command begins, before its work hears them, and while it ends."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.eval.sets import classification_set
from tests.support.interpreter import interpreted

INTERRUPTED = """\
import os, signal, sys
from clipscale.__main__ import main
class AtTheImport:
    def find_spec(self, name, *_):
        if name == "clipscale.cli.main":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, AtTheImport())
main()
"""


def test_ctrl_c_during_the_imports_says_nothing() -> None:
    done = interpreted(INTERRUPTED)
    assert (done.returncode, done.stdout + done.stderr) == (-signal.SIGINT, "")


STOPPED_AT_TORCH = """\
import os, signal, sys
from clipscale.__main__ import main
class AtTheImport:
    def find_spec(self, name, *_):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, AtTheImport())
sys.argv[1:] = {}
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("words", "stopped"),
    [
        (
            "train run=a data.train={shards} device=cpu plan=false data.workers=0",
            "stopped by SIGTERM outside a step: there was",
        ),
        ("plan model=vit-b32 hardware=a100-80g", "stopped by SIGTERM"),
        pytest.param("eval model.weights=none eval.sets={sets}", "stopped by SIGTERM", marks=pytest.mark.slow),
    ],
)
def test_a_command_says_that_it_loads_torch_and_a_signal_is_answered_there(
    shards: str, tmp_path: Path, words: str, stopped: str
) -> None:
    """Without a terminal. Lines of a run's log are on stdout, those of other commands on stderr."""
    typed = words.format(shards=shards, sets=classification_set(tmp_path / "birds")).split()
    done = interpreted(f"import os; os.chdir({str(tmp_path)!r})\n" + STOPPED_AT_TORCH.format(typed))
    assert done.returncode == 143, done
    first, line = (done.stdout + done.stderr).splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d loading torch \.\.\.", first) and line.startswith(stopped)
    assert bool(done.stdout) == (typed[0] == "train"), "what machines read stays as it is"


STOPPED_AT_THE_LINE = """\
import os, signal, sys
from clipscale.__main__ import main
class Output:
    def __init__(self, stream):
        self.stream = stream
    def __getattr__(self, name):
        return getattr(self.stream, name)
    def write(self, text):
        self.stream.write(text)
        self.stream.flush()
        if "loading torch" in text:
            os.kill(os.getpid(), signal.SIGTERM)
sys.stdout, sys.stderr = Output(sys.stdout), Output(sys.stderr)
sys.argv[1:] = {}
sys.exit(main())
"""


def test_a_signal_at_the_line_that_says_that_torch_is_loaded() -> None:
    done = interpreted(STOPPED_AT_THE_LINE.format(["plan", "model=vit-b32"]))
    assert done.returncode == 143, done
    assert "stopped by SIGTERM" in done.stderr.splitlines()[-1]


SIGNAL_AT_THE_END = """\
import atexit, os, signal, sys
from clipscale.__main__ import main
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
sys.argv[1:] = [{!r}]
sys.exit(main())
"""


@pytest.mark.parametrize(("word", "status"), [("--version", 0), ("tran", 2)])
def test_a_signal_while_the_interpreter_ends_leaves_the_status(word: str, status: int) -> None:
    assert interpreted(SIGNAL_AT_THE_END.format(word)).returncode == status


# Each process that imports it leaves a file with its number. The import lasts a minute.
SLOW_TORCH = """\
import os, pathlib, time
pathlib.Path(f"imports-{os.getpid()}").touch()
time.sleep(60)
"""


def is_running(process: str) -> bool:
    """Whether there is a process of this number that has not ended."""
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_start_hears_a_signal_while_the_server_of_its_workers_loads_torch(
    shards: str, tmp_path: Path, number: signal.Signals
) -> None:
    """With its plan and its data workers, as they are by default. No process outlives it."""
    (tmp_path / "torch.py").write_text(SLOW_TORCH)
    command = [sys.executable, "-m", "clipscale", "train", "run=a", f"data.train={shards}", "device=cpu"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    while not (importing := [*tmp_path.glob("imports-*")]) and process.poll() is None:
        time.sleep(0.05)
    time.sleep(0.3)  # the start waits for the planner's process
    process.send_signal(number)
    try:
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 128 + number, err
    assert err.splitlines()[-1].startswith("stopped"), err
    for file in importing:
        until = time.monotonic() + 5
        while is_running(file.name.removeprefix("imports-")):
            assert time.monotonic() < until, "the server is still there"
            time.sleep(0.05)
