"""Worker processes: an error instead of a hang, nothing left behind, and the batch memory they write to."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
import torch

from clipscale.common.errors import LoaderError, UserError
from clipscale.common.signals import SIGNALS
from clipscale.data.filters import Selection
from clipscale.data.loader.stream import TrainStream
from clipscale.data.loader.workers import Workers
from clipscale.data.sample import RawSample
from tests.data.files import Letters, picture, write_shards, write_tar
from tests.data.streams import contents, open_stream, processes_of
from tests.support.forked_processes import forks

HERE = {"PYTHONPATH": str(Path(__file__).parents[3])}


class Acting(Letters):
    """A tokenizer that does something for every piece of a batch, in its worker."""

    def __init__(self, act: Callable[..., object], *arguments: object) -> None:
        self.act = act
        self.arguments = arguments
        self.pieces = 0

    def __call__(self, texts: list[str]) -> torch.Tensor:
        if len(texts) > 1:
            self.pieces += 1
            self.act(self.pieces, *self.arguments)
        return super().__call__(texts)


def stick(pieces: int) -> None:
    time.sleep(60 * (pieces > 1))


def fail(pieces: int, error: type[Exception]) -> None:
    if pieces > 1:
        raise error("not in the vocabulary")


def test_a_silent_worker_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, [50])
    with open_stream(tmp_path, batch=4, workers=1, tokenizer=Acting(stick), timeout_s=30.0) as stream:
        stream.next_batch().pixels(0, 4)
        assert isinstance(stream.workers, Workers)
        stream.workers.timeout_s = 2.0  # not from the start: importing torch can take as long
        pid = processes_of(stream)[0].pid
        calls = []
        stream.set_poll(lambda: calls.append(time.monotonic()))
        with pytest.raises(UserError, match=rf"timeout_s=2.*worker 0 \(process {pid}\) of rank 0"):
            stream.next_batch().pixels(0, 4)
    assert len(calls) > 4, "a few times a second"
    assert not psutil.pid_exists(pid)


def note_parallelism(pieces: int, file: Path) -> None:
    file.write_text(os.environ.get("TOKENIZERS_PARALLELISM", ""))


def test_tokenizers_of_transformers_start_no_threads_in_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    write_shards(tmp_path, [8])
    noting = Acting(note_parallelism, tmp_path / "noted")
    with open_stream(tmp_path / "00000.tar", batch=4, workers=1, tokenizer=noting) as stream:
        stream.next_batch().lengths()
    assert (tmp_path / "noted").read_text() == "false"


VICTIM = "000000007"


class Deadly(Selection):
    """One sample kills its process, as a decoder that takes all memory does."""

    def sameness_key(self, sample: RawSample, captions: Sequence[str], own: str) -> int:
        if sample.key == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        return 0


def test_what_kills_a_worker_is_named_and_can_be_left_out(tmp_path: Path) -> None:
    """A sample that no decoder survives must not end every start of a run."""
    write_shards(tmp_path, [50])
    options = {"batch": 5, "workers": 2, "shard_streams": 2, "selection": Deadly}
    name = f"00000.tar/{VICTIM}"
    line = rf"data worker [01] \(process \d+\) of rank 0 was killed by SIGKILL, at sample {name} "
    line += rf"\(data.filter='sample!={name}' "
    with open_stream(tmp_path, **options) as stream, pytest.raises(LoaderError, match=line):
        contents(stream, 10)
    with open_stream(tmp_path, filter=[f"sample!={name}"], **options) as stream:
        contents(stream, 10)
        assert stream.broken == {"filter_sample": 1}


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_names_and_texts_that_are_no_utf8_are_read_and_resumed(tmp_path: Path, workers: int) -> None:
    """The folder, shards and members have such names. A caption that is no UTF-8 is left out and counted."""
    folder = Path(f"{tmp_path}/caf\udce9")
    folder.mkdir()
    texts = {f"\udcff{number:04d}": "words" for number in range(20)} | {"lone": "lone \ud800"}
    members = [
        member
        for key, text in texts.items()
        for member in ((f"{key}.png", picture()), (f"{key}.json", json.dumps({"alt": text, "\ud801": 0}).encode()))
    ]
    for name in ("caf\udce8", "caf\udce9"):
        write_tar(folder / f"{name}.tar", members)
    options = {
        "batch": 8,
        "captions": ["json:alt"],
        "filter": [r"sample!=caf\udce9.tar/\udcff0003"],
        "workers": workers,
    }
    with open_stream(folder, **options) as stream:
        expected = contents(stream, 10)
        position = stream.position()
        expected += contents(stream, 10)
        assert stream.epoch_samples == 42, "counts are remembered under both names"
        assert set(stream.broken) == {"caption_not_utf8", "filter_sample"}
    with open_stream(folder, position=position, **options) as stream:
        assert contents(stream, 10) == expected[10:]


@pytest.mark.parametrize("error", [KeyError, ConnectionResetError])
def test_a_bug_in_a_worker_arrives_with_its_traceback(
    tmp_path: Path, error: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    """The positions that a save needs arrive, too. A ConnectionResetError from the pipe to the run would mean that the
    run is gone; one from a worker's own code does not."""
    write_shards(tmp_path, [50])
    with open_stream(tmp_path, batch=4, workers=0) as stream:
        expected = contents(stream, 1), stream.position()
    with open_stream(tmp_path, batch=4, workers=1, tokenizer=Acting(fail, error)) as stream:
        stream.defer_failures()
        processes_of(stream)[0].join()  # now all that it has sent is there
        assert (contents(stream, 1), stream.position()) == expected
        contents(stream, 1)
        with pytest.raises(LoaderError, match=error.__name__):
            stream.raise_failure()
    printed = capsys.readouterr().err
    assert "Traceback" in printed and f"raise error({chr(34)}not in the vocabulary" in printed


SIGNALLED = """\
import os, signal, sys, psutil
from tests.data.streams import open_stream
if __name__ == "__main__":
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
    for number in numbers:
        signal.signal(number, lambda *_: None)  # where a run saves and ends
    with open_stream(sys.argv[1], batch=400, workers=2) as stream:
        stream.next_batch().lengths()
        children = psutil.Process().children(recursive=True)
        print(*(child.pid for child in children), flush=True)
        for number in numbers:
            os.killpg(0, number)
            stream.next_batch().lengths()
        assert len(children) == 4, children
        assert all(child.status() != "zombie" for child in children), children
"""


@pytest.mark.slow
@pytest.mark.timeout(300)  # five processes that load torch, at low priority on a busy machine
def test_workers_outlive_signals_to_all_processes_and_not_their_run(tmp_path: Path) -> None:
    """A scheduler signals all processes, and the run must finish its step first, with samples.

    The processes that start workers and track semaphores stay as well, so nothing is printed at the end.
    """
    write_shards(tmp_path, [50])
    (tmp_path / "main.py").write_text(SIGNALLED)
    command = [sys.executable, str(tmp_path / "main.py"), str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, start_new_session=True, env=os.environ | HERE)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert_gone([*map(int, ran.stdout.split())])


def assert_gone(pids: list[int]) -> None:
    """Wait until the processes are gone, for 20 seconds at most."""
    deadline = time.monotonic() + 20
    while left := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def die_with_workers(folder: Path, sends: Connection) -> None:
    with open_stream(folder, batch=400, workers=2) as stream:
        stream.next_batch().lengths()
        sends.send([process.pid for process in processes_of(stream)])
        os.kill(os.getpid(), signal.SIGKILL)


def test_workers_end_with_a_run_that_is_killed(tmp_path: Path) -> None:
    write_shards(tmp_path, [50])
    receives, sends = forks().Pipe(duplex=False)
    run = forks().Process(target=die_with_workers, args=(tmp_path, sends))
    run.start()
    pids = receives.recv()
    run.join()
    assert len(pids) == 2
    assert_gone(pids)


LEFT_OPEN: list[TrainStream] = []


def block_signals(pieces: int) -> None:
    """Block the signals that a program's worker inherits blocked from its server."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def end_with_an_open_stream(folder: Path, sends: Connection) -> None:
    LEFT_OPEN.append(open_stream(folder, batch=4, workers=1, tokenizer=Acting(block_signals)))
    LEFT_OPEN[0].next_batch().lengths()
    sends.send([process.pid for process in processes_of(LEFT_OPEN[0])])


def test_a_program_that_leaves_its_stream_open_ends_and_its_workers_too(tmp_path: Path) -> None:
    write_shards(tmp_path, [50])
    receives, sends = forks().Pipe(duplex=False)
    run = forks().Process(target=end_with_an_open_stream, args=(tmp_path, sends))
    run.start()
    pids = receives.recv()
    run.join(20)
    ended = run.exitcode
    run.kill()
    assert ended == 0, "it waits for its workers"
    assert_gone(pids)
