"""Sends a signal to a run that waits, checks how soon the run reacts, and holds pictures back."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from clipscale.eval.sets.item import ImageRef
from clipscale.run.train_loop import TrainLoop

# Within which a signal is heard under any load; docs/runs.md has times that were measured, of about a second at most.
# What does not hear it takes 60 s.
HEARD_S = 30.0


@contextmanager
def signalled(ready: Callable[[], bool], number: int = signal.SIGTERM) -> Iterator[None]:
    """Send this process the signal when it has been `ready` for half a second.

    Asserts that the run inside drops its step and saves within HEARD_S.
    """
    sent: list[float] = []
    heard: list[float] = []
    save = TrainLoop.save_at_once

    def save_at_once(run: TrainLoop) -> None:
        heard.append(time.monotonic())
        save(run)

    def send() -> None:
        while not ready():
            time.sleep(0.01)
        time.sleep(0.5)
        sent.append(time.monotonic())
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    with mock.patch.object(TrainLoop, "save_at_once", save_at_once):
        try:
            yield
        finally:
            assert sent and heard, "it ended before"
            assert heard[0] - sent[0] < HEARD_S
    thread.join()


class SilentPictures:
    """The storage of an evaluation's pictures: it stops answering `when`, and a reading waits then."""

    def __init__(self, when: Callable[[], bool]) -> None:
        self.when = when
        self.waits, self.ended = threading.Event(), threading.Event()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        read = ImageRef.read

        def silent(image: ImageRef) -> bytes:
            if self.when():
                self.waits.set()
                self.ended.wait()
            return read(image)

        with mock.patch.object(ImageRef, "read", silent):
            try:
                yield
            finally:
                self.ended.set()
