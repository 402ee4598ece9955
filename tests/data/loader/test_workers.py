"""Worker processes: an error instead of a hang, nothing left behind, and the batch memory they write to."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from clipscale.common.errors import UserError
from clipscale.data.loader.stream import TrainStream
from tests.data.files import SIDE, Letters, sample, write_shards, write_tar
from tests.data.streams import content, contents, open_stream, processes_of

pytestmark = pytest.mark.timeout(60)


class Acting(Letters):
    """A tokenizer that does something for every piece of a batch, in its worker."""

    def __init__(self, act: Callable[..., object], *arguments: object) -> None:
        self.act, self.arguments, self.pieces = act, arguments, 0

    def __call__(self, texts: list[str]) -> torch.Tensor:
        if len(texts) > 1:
            self.pieces += 1
            self.act(self.pieces, *self.arguments)
        return super().__call__(texts)


def stick(pieces: int) -> None:
    time.sleep(60 * (pieces > 1))


def fail(pieces: int, error: type[Exception]) -> None:
    raise error("not in the vocabulary")


def slow(pieces: int) -> None:
    """So that a kill comes in the midst of a batch."""
    time.sleep(0.02)


def test_a_silent_worker_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, [50])
    with open_stream(tmp_path, batch=4, workers=1, tokenizer=Acting(stick), timeout_s=30.0) as stream:
        stream.next_batch().pixels(0, 4)
        stream._assembler.workers._timeout_s = 1.0  # not from the start: importing torch can take as long
        pid = processes_of(stream)[0].pid
        with pytest.raises(UserError, match=rf"timeout_s=1.*worker 0 \(process {pid}\) of rank 0"):
            stream.next_batch().pixels(0, 4)
    assert not psutil.pid_exists(pid)


def killed(stream: TrainStream, number: int) -> int:
    """Kill one of the stream's worker processes; returns its number."""
    victim = processes_of(stream)[number]
    os.kill(victim.pid, signal.SIGKILL)
    victim.join(10)
    return int(victim.pid)


@pytest.mark.parametrize("backend", ["host", "disk", "encoded"])
def test_a_killed_worker_is_replaced_and_no_byte_differs(
    tmp_path: Path, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One is killed in the first epochs, and one later in the midst of a batch of which rows have arrived."""
    for shard in range(2):
        good = [sample(f"{shard}{i:04d}", i) for i in range(120)]
        # every seventh lacks its picture
        write_tar(tmp_path / f"{shard}.tar", [member for i, s in enumerate(good) for member in s[i % 7 == 0 :]])
    options: dict[str, Any] = {"batch": 200, "shard_streams": 2, "chunk": 10, "tokenizer": Acting(slow)}
    with open_stream(tmp_path, **options, backend=backend, workers=0) as stream:
        whole, position = contents(stream, 6), stream.position()
        contents(stream, 1)
        counts = stream.broken
    with open_stream(tmp_path, **options, backend=backend, workers=2) as stream:
        batches = contents(stream, 1)
        victim = killed(stream, 1)
        batches += contents(stream, 3)
        batch = stream.next_batch()
        batch.tokens(0, 3)
        killed(stream, 0)
        batches += [content(batch), *contents(stream, 1)]
        assert stream.position() == position
        stream._assembler.finish(6)  # which is filled already
        assert stream.broken == counts
    assert batches == whole
    message = f"data worker 1 (process {victim}) of rank 0 was killed by SIGKILL; another one goes on where it was"
    assert message in caplog.text


def test_a_second_death_in_an_epoch_ends_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first one is noticed when the batch that it has not filled is waited for: later than the next one, which lies
    ready."""
    write_shards(tmp_path, [500])
    with open_stream(tmp_path, batch=10, workers=2) as stream:
        contents(stream, 1)
        killed(stream, 1)
        while "data worker 1" not in caplog.text:
            contents(stream, 1)
        victim = killed(stream, 0)
        message = rf"0 \(process {victim}\).*killed by SIGKILL, the second death.*in epoch 0"
        with pytest.raises(UserError, match=message):
            contents(stream, 10)


@pytest.mark.parametrize("error", [KeyError, ConnectionResetError])
def test_a_bug_in_a_worker_arrives_with_its_traceback(tmp_path: Path, error: type[Exception]) -> None:
    """Of an error, too, that would mean that the run is gone if it came from the pipe to it."""
    write_shards(tmp_path, [50])
    with (
        open_stream(tmp_path, batch=4, workers=1, tokenizer=Acting(fail, error)) as stream,
        pytest.raises(RuntimeError, match=rf"(?s)Traceback.*raise error.*{error.__name__}.*not in the vocabulary"),
    ):
        contents(stream, 1)


def test_sigterm_leaves_workers_at_work_and_closing_ends_them(tmp_path: Path) -> None:
    """The run saves at SIGTERM, which a scheduler sends to all processes: it must finish its step first, with
    samples."""
    write_shards(tmp_path, [50])
    with open_stream(tmp_path, batch=400, workers=2) as stream:
        workers = [psutil.Process(process.pid) for process in processes_of(stream)]
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
        for _ in range(3):
            stream.next_batch().ids()
        stream.next_batch()
        begun = time.monotonic()
    assert time.monotonic() - begun < 5
    assert not any(worker.is_running() and worker.status() != "zombie" for worker in workers)


# -- the batch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_an_old_batch_is_refused_and_bad_rows_too(tmp_path: Path, workers: int) -> None:
    write_shards(tmp_path, [50])
    with open_stream(tmp_path, batch=8, workers=workers) as stream:
        old = stream.next_batch()
        assert len(old) == 8 and old.pixels(2, 5).shape == (3, 3, SIDE, SIDE) and old.pixels(0, 8).dtype == torch.uint8
        assert old.tokens(0, 8).shape == (8, 8) and old.tokens(0, 8).dtype == torch.int32
        with pytest.raises(ValueError, match="outside"):
            old.pixels(0, 9)
        stream.next_batch()
        with pytest.raises(RuntimeError, match="no longer valid"):
            old.pixels(0, 1)


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_a_held_batch_keeps_its_pixels_in_memory_that_is_allocated_once(tmp_path: Path, buffers: int) -> None:
    write_shards(tmp_path, [50])
    places = set()
    with open_stream(tmp_path, batch=8, workers=2, buffers=buffers) as stream:
        for _ in range(6):
            pixels = stream.next_batch().pixels(0, 8)
            before = pixels.clone()
            time.sleep(0.02)
            assert torch.equal(pixels, before)
            places.add(pixels.data_ptr())
    assert len(places) == buffers
