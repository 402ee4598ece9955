"""The batch in host memory: the same pixels with each `offload`, no more memory than stated, page-locked for a GPU."""

import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from clipscale.common.errors import UserError
from clipscale.config.data import AugmentConfig, DataConfig
from clipscale.data.columns import columns_of
from clipscale.data.loader import memory
from clipscale.data.loader.host_batch import Arena, Layout, Offload
from tests.data.files import picture, sample, write_tar
from tests.data.streams import open_stream

pytestmark = pytest.mark.timeout(60)
SIDE, BATCH, CHUNK = 16, 50, 12


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures whose bytes are fewer and more than their pixels, and broken ones between them."""
    members = []
    for i in range(120):
        if i % 9 == 4:
            members += [(f"{i}.jpg", picture(i, (40, 40), "JPEG")[:-300]), (f"{i}.txt", b"words")]
        elif i % 3:
            members += [(f"{i}.png", picture(i, (60, 37))), (f"{i}.txt", f"large {i}".encode())]
        else:
            members += sample(str(i), i)
    return write_tar(tmp_path_factory.mktemp("mixed") / "0.tar", members)


def passes(stream: Any, steps: int, again: int = 0) -> list[torch.Tensor]:
    """As training asks: the chunks of a batch once, then once more from row `again` on."""
    pixels = []
    for _ in range(steps):
        batch = stream.next_batch()
        spans = [(start, min(start + CHUNK, len(batch))) for start in range(0, len(batch), CHUNK)]
        repeated = [span for span in spans if span[0] >= again]
        batch.expect([*spans, *repeated])
        first = {span: batch.pixels(*span).clone() for span in spans}
        assert all(torch.equal(first[span], batch.pixels(*span)) for span in repeated), "the passes saw other pixels"
        pixels.append(torch.cat([*first.values()]))
    return pixels


@pytest.mark.parametrize("workers", [0, 2])
def test_encoded_pixels_are_those_of_host_in_both_passes(mixed: Path, workers: int) -> None:
    options = {"batch": BATCH, "side": SIDE, "augment": AugmentConfig(scale=(0.3, 1.0), flip=0.5)}
    with open_stream(mixed, **options) as host:
        expected = passes(host, 4)
    options |= {"backend": "encoded", "chunk": CHUNK, "workers": workers}
    for again in (0, 2 * CHUNK, BATCH):
        with open_stream(mixed, **options) as stream:
            for step, (ours, reference) in enumerate(zip(passes(stream, 4, again), expected)):
                assert torch.equal(ours, reference), f"step {step}"
            assert stream.broken["unreadable_image"] > 20


# -- memory ------------------------------------------------------------------------------------------------------------


def held_bytes() -> int:
    """Memory of the batches of this process."""
    files = [file for file in list(Path("/proc/self/fd").iterdir()) if "clipscale-batch" in str(file.resolve())]
    sizes = {file.stat().st_ino: file.stat().st_blocks * 512 for file in files}
    return sum(sizes.values())


def test_encoded_pictures_take_their_bytes_and_no_more(tmp_path: Path) -> None:
    """Also after larger ones have lain in the same places."""
    gc.collect()  # batches of other tests
    small, large = (picture(1, (size, size), "JPEG", quality=95) for size in (100, 400))
    members = []
    for i in range(640):
        members += [(f"{i}.jpg", small if i % 8 else large), (f"{i}.txt", b"a photograph")]
    path = write_tar(tmp_path / "0.tar", members)
    taken = {"host": [], "encoded": []}
    for backend, sizes in taken.items():
        with open_stream(path, batch=64, side=224, backend=backend, chunk=1) as stream:
            for _ in range(10):
                stream.next_batch().lengths()
                sizes.append(held_bytes())
    expected = 8 * len(large) + 56 * len(small) + 64 * 4096
    assert max(taken["encoded"]) < 1.2 * expected < taken["host"][0] / 2, (taken, expected)


def test_what_does_not_fit_is_refused_with_what_to_do(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 100_000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for backend, remedy in (("host", "offload=encoded"), ("encoded", "data.buffers=1")):
        message = rf"offload={backend}: 1 x 50 samples need .*free for each of 4; take {remedy}"
        with pytest.raises(UserError, match=message):
            open_stream(mixed, batch=BATCH, side=64, backend=backend, chunk=CHUNK)


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


@pytest.mark.parametrize("backend", ["host", "encoded"])
def test_encoding_begins_before_the_batch_is_complete_and_loading_goes_on_under_the_second_pass(
    mixed: Path, tmp_path: Path, backend: str
) -> None:
    """Each side waits for the other at the point where they must overlap: without the overlap this comes to no end."""
    from clipscale.data.loader.to_device import ChunkLoader
    from clipscale.step.grad_cache import GradCache

    encoder = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * SIDE * SIDE, 4))

    def encode(pixels: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            until(tmp_path / "piece 4 begun")  # of the next batch
        out = encoder(pixels / 255)
        (tmp_path / "first chunk encoded").touch()
        return out

    options = {"workers": 1, "shard_streams": 1, "timeout_s": 50.0}
    options |= {"backend": backend, "chunk": 32, "tokenizer": Gated(tmp_path)}
    with open_stream(mixed, batch=128, side=SIDE, **options) as stream:
        batch = stream.next_batch()
        rows = ChunkLoader(batch.pixels, len(batch), torch.device("cpu"), resident=False)
        cache = GradCache([encode], lambda features: features.square().sum(), chunks=32)
        batch.expect(cache.ranges(0, len(batch)))
        assert torch.isfinite(cache.step(rows))


# -- page-locked memory ------------------------------------------------------------------------------------------------


class Runtime:
    """In the place of CUDA's runtime: what is locked, from its address to its bytes."""

    def __init__(self, answer: int = 0) -> None:
        self.answer = answer
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 (CUDA's name)
        if not self.answer:
            self.locked[address] = size
        return self.answer

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802 (CUDA's name)
        del self.locked[address]


@pytest.mark.parametrize(("backend", "answer"), [("host", 0), ("encoded", 0), ("host", 2)])
def test_what_is_copied_to_the_gpu_is_locked_until_the_end(
    backend: str, answer: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = Runtime(answer)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = Arena(Layout(2, 8, columns_of(DataConfig(), 16), (1, 0), 4, Offload(backend, chunk=4)))
    memory.pin()
    assert memory.pinned == (not answer) == (not caplog.text)
    assert not answer or "could not be page-locked (CUDA error 2)" in caplog.text
    copied = [slot["rows"] for slot in memory.slots] if backend == "host" else [memory.buffers]
    for start, size in runtime.locked.items():
        for rows in copied:
            assert start <= rows.ctypes.data and rows.ctypes.data + rows.nbytes <= start + size
    memory.close()
    assert not memory.pinned and not runtime.locked
