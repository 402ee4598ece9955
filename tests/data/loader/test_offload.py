"""The offload backends: the same pixels with each, the stated memory, and an error when a backend fails."""

import errno
import os
import resource
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from clipscale.common.errors import UserError
from clipscale.config.data import AugmentConfig
from clipscale.data.loader import memory
from clipscale.data.loader.host_batch import Layout, Offload, Slot
from clipscale.data.loader.prefetch import Prefetcher
from tests.data.files import Members, picture, sample, write_tar
from tests.data.streams import open_stream, processes_of

pytestmark = pytest.mark.timeout(60)
SIDE, BATCH, CHUNK = 16, 50, 12
BACKENDS = ["disk", "encoded"]
SLOT = Slot(0, {})


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures whose bytes are fewer and more than their pixels, and broken ones between them."""
    members: Members = []
    for i in range(120):
        if i % 9 == 4:
            members += [(f"{i}.jpg", picture(i, (40, 40), "JPEG")[:-300]), (f"{i}.txt", b"words")]
        elif i % 3:
            members += [(f"{i}.png", picture(i, (60, 37))), (f"{i}.txt", f"large {i}".encode())]
        else:
            members += sample(str(i), i)
    return write_tar(tmp_path_factory.mktemp("mixed") / "0.tar", members)


def passes(stream: Any, steps: int, again: int = 0) -> list[Any]:
    """As training asks: the chunks of a batch once, then once more from row `again` on."""
    found = []
    for _ in range(steps):
        batch = stream.next_batch()
        spans = [(start, min(start + CHUNK, len(batch))) for start in range(0, len(batch), CHUNK)]
        batch.expect([*spans, *(span for span in spans if span[0] >= again)])
        first = [batch.pixels(*span).clone() for span in spans]
        second = [batch.pixels(*span).clone() for span in spans if span[0] >= again]
        assert all(torch.equal(a, b) for a, b in zip(first[-len(second) :], second)), "the passes saw other pixels"
        found.append((torch.cat(first), batch.tokens(0, len(batch)).clone(), batch.ids().clone()))
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_pixels_are_those_of_host_in_both_passes(mixed: Path, tmp_path: Path, backend: str, workers: int) -> None:
    options: dict[str, Any] = {"batch": BATCH, "side": SIDE, "augment": AugmentConfig(scale=(0.3, 1.0), flip=0.5)}
    with open_stream(mixed, **options) as host:
        expected = passes(host, 6)
    kept = {"backend": backend, "chunk": CHUNK, "folder": str(tmp_path), "workers": workers}
    for again in (0, 2 * CHUNK, BATCH):
        with open_stream(mixed, **options, **kept) as stream:
            for step, (ours, theirs) in enumerate(zip(passes(stream, 6, again), expected)):
                for name, a, b in zip(("pixels", "tokens", "ids"), ours, theirs):
                    assert torch.equal(a, b), f"step {step}, {name}"
            assert stream.broken["unreadable_image"] >= host.broken["unreadable_image"] > 20
    with open_stream(mixed, **options, **kept) as stream:
        assert torch.equal(stream.next_batch().pixels(0, BATCH), expected[0][0]), "in one piece larger than a chunk"


# -- prefetching -------------------------------------------------------------------------------------------------------


def recorded() -> tuple[Prefetcher, list[tuple[str, int, int]]]:
    """A prefetcher whose rows are their own numbers, and the order in which they are begun and waited for."""
    buffers = np.zeros((30, 1), np.uint8)
    events: list[tuple[str, int, int]] = []

    def begin(slot: Slot, start: int, stop: int, at: int) -> Callable[[], None]:
        events.append(("begin", start, stop))

        def wait() -> None:
            buffers[at : at + stop - start, 0] = range(start, stop)
            events.append(("wait", start, stop))

        return wait

    return Prefetcher(buffers, 10, begin), events


def test_the_next_chunk_is_begun_before_it_is_asked_for_and_none_twice() -> None:
    prefetcher, events = recorded()
    spans = [(0, 10), (10, 20), (20, 30), (30, 35)]
    for step in range(3):
        prefetcher.open(SLOT)
        prefetcher.arrived(35)
        kept: list[int] = []
        prefetcher.expect(chain(spans, (span for _ in range(1) for span in spans[len(kept) :])))
        events.clear()
        held: list[tuple[torch.Tensor, list[int]]] = []
        for start, stop in [*spans, *spans[1:]]:  # the first chunk is kept, so the second pass begins with the second
            if not kept:
                kept.append(0)
            rows = prefetcher.rows(SLOT, start, stop)
            held.append((rows, list(range(start, stop))))
            for tensor, values in held[-2:]:
                assert tensor[:, 0].tolist() == values, "overwritten too early"
        begun = [event[1:] for event in events if event[0] == "begin"]
        assert begun.count((0, 10)) == 1, f"step {step}: {begun}"
        assert all(1 <= begun.count(span) <= 2 for span in spans), f"step {step}: {begun}"
        for span in spans[1:]:
            before = spans[spans.index(span) - 1]
            assert events.index(("begin", *span)) <= events.index(("wait", *before)) + 1, (
                "begun as soon as the one before is there"
            )


# -- memory ------------------------------------------------------------------------------------------------------------


def taken(stream: Any) -> int:
    """Bytes of memory behind the stream's arena."""
    return int(os.fstat(stream._arena._fd).st_blocks * 512)


def test_encoded_pictures_take_their_bytes_and_no_more(tmp_path: Path) -> None:
    data = picture(1, (400, 400), "JPEG", quality=95)
    members = [member for i in range(64) for member in ((f"{i}.jpg", data), (f"{i}.txt", b"a photograph"))]
    path = write_tar(tmp_path / "0.tar", members)
    sizes: dict[str, set[int]] = {}
    for backend in ("host", "encoded"):
        with open_stream(path, batch=64, side=224, backend=backend, chunk=1) as stream:
            for _ in range(3):
                stream.next_batch().pixels(0, 64)
                sizes.setdefault(backend, set()).add(taken(stream))
    (host,), (encoded,) = sizes.values()
    assert encoded < 64 * len(data) + host / 8 < host, f"{encoded} bytes for 64 times {len(data)}"


def test_what_does_not_fit_is_refused_with_what_to_do(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 100_000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for backend, remedy in (("host", "offload=encoded"), ("encoded", "offload=disk"), ("disk", "a smaller")):
        message = rf"offload={backend}: 1 x 50 samples need .*free for each of 4; take {remedy}"
        with pytest.raises(UserError, match=message):
            open_stream(mixed, batch=BATCH, side=64, backend=backend, chunk=CHUNK)


def test_pictures_larger_than_expected_end_the_run_instead_of_the_machine(tmp_path: Path, monkeypatch: Any) -> None:
    members: Members = []
    for i in range(64 * 4):  # the first ones are small
        data = picture(0, (8, 8)) if i < 64 else picture(i, (60, 60))
        members += [(f"{i}.png", data), (f"{i}.txt", b"words")]
    path = write_tar(tmp_path / "0.tar", members)
    layout = Layout(1, 256, (3, 64, 64), 8, offload=Offload("encoded", CHUNK))
    monkeypatch.setattr(memory, "free_memory", lambda: int((layout.memory_bytes() + 256 * 1000) / memory.MARGIN))
    stream = open_stream(path, batch=256, side=64, backend="encoded", chunk=CHUNK, shuffle=0, shard_streams=1)
    with pytest.raises(UserError, match=r"offload=encoded: the pictures of a batch are larger .* take offload=disk"):
        stream.next_batch().ids()


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.stat").write_text("anon 1000000\nfile 90000000\nshmem 500000\n")
    monkeypatch.setattr(memory, "_GROUP", tmp_path)
    assert memory.free_memory() == 3_500_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_memory() == pytest.approx(psutil.virtual_memory().available, rel=0.2)


# -- disk --------------------------------------------------------------------------------------------------------------


def test_disk_space_is_reserved_before_the_run(mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_stream(mixed, batch=BATCH, side=64, backend="disk", folder=str(tmp_path)) as stream:
        assert os.fstat(stream._arena.file).st_blocks * 512 >= BATCH * 3 * 64 * 64
        assert f"in {tmp_path}" in stream.memory

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        UserError, match=rf"offload_dir={tmp_path}: 0\.0 GiB .*No space left on device.*offload=encoded"
    ):
        open_stream(mixed, batch=BATCH, side=64, backend="disk", folder=str(tmp_path))
    with pytest.raises(UserError, match=r"offload_dir=/nowhere: .*No such file"):
        open_stream(mixed, batch=BATCH, side=64, backend="disk", folder="/nowhere")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_disk_that_fails_in_mid_run_ends_it_with_its_name(mixed: Path, tmp_path: Path, workers: int) -> None:
    message = rf"offload_dir={tmp_path}: the batch cannot be written there \(.*\); checkpoints are intact"
    with open_stream(mixed, batch=BATCH, side=64, backend="disk", folder=str(tmp_path), workers=workers) as stream:
        passes(stream, 1)
        pid = processes_of(stream)[0].pid if workers else os.getpid()
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        try:
            with pytest.raises(UserError, match=message):
                passes(stream, 4)
        finally:
            if not workers:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


# -- overlap -----------------------------------------------------------------------------------------------------------


class Gated:
    """A tokenizer that stops before its second piece of the first batch until the first chunk has been encoded."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, 0

    def __call__(self, texts: list[str]) -> torch.Tensor:
        if len(texts) > 1:
            self.calls += 1
            (self.folder / f"piece {self.calls} begun").touch()
            if self.calls == 2:
                until(self.folder / "first chunk encoded")
        return torch.zeros(len(texts), 8, dtype=torch.int64)


def until(path: Path) -> None:
    deadline = time.monotonic() + 40
    while not path.exists():
        assert time.monotonic() < deadline, f"waited in vain: {path.name}"
        time.sleep(0.01)


@pytest.mark.parametrize("backend", ["host", *BACKENDS])
def test_encoding_begins_before_the_batch_is_complete_and_loading_goes_on_under_the_second_pass(
    mixed: Path, tmp_path: Path, backend: str
) -> None:
    """Each side waits for the other at the point where they must overlap: without the overlap this comes to no end."""
    from clipscale.data.loader.to_device import ChunkLoader
    from clipscale.step.grad_cache import GradCache

    (tmp_path / "events").mkdir()
    events = tmp_path / "events"
    encoder = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * SIDE * SIDE, 4))

    def encode(pixels: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            until(events / "piece 4 begun")  # of the next batch
        out = encoder(pixels / 255)
        (events / "first chunk encoded").touch()
        return out

    options = {
        "backend": backend,
        "chunk": 32,
        "folder": str(tmp_path),
        "workers": 1,
        "shard_streams": 1,
        "timeout_s": 50.0,
    }
    with open_stream(mixed, batch=128, side=SIDE, tokenizer=Gated(events), **options) as stream:
        batch = stream.next_batch()
        rows = ChunkLoader(batch.pixels, len(batch), torch.device("cpu"), resident=False)
        cache = GradCache([encode], lambda features: features.square().sum(), chunks=32)
        batch.expect(cache.ranges(0, len(batch)))
        assert torch.isfinite(cache.step(rows))
