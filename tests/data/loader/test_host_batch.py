"""The batch in host memory: a step begins before it is complete; no more memory than is free; page-locked for a GPU."""

import time
from pathlib import Path

import pytest
import torch

from clipscale.common.errors import UserError
from clipscale.data.loader import host_batch
from clipscale.data.loader.host_batch import BatchLayout, create_arena
from tests.data.files import sample, write_tar
from tests.data.streams import open_stream

SIDE = 16


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    members = [member for i in range(120) for member in sample(str(i), i)]
    return write_tar(tmp_path_factory.mktemp("shard") / "0.tar", members)


@pytest.mark.parametrize(("workers", "take"), [(0, "a smaller batch"), (1, "data.buffers=1")])
def test_what_does_not_fit_is_refused_with_what_to_do(
    shard: Path, monkeypatch: pytest.MonkeyPatch, workers: int, take: str
) -> None:
    monkeypatch.setattr(host_batch, "free_memory", lambda: 100_000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    slots = 1 + workers
    with pytest.raises(
        UserError, match=rf"data.buffers={slots}: {slots} x 50 samples .* free for each of 4; take {take}"
    ):
        open_stream(shard, batch=50, side=64, workers=workers)


# ---- overlap ----


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
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline, f"waited in vain: {path.name}"
        time.sleep(0.01)


def test_encoding_begins_before_the_batch_is_complete_and_loading_goes_on_under_the_second_pass(
    shard: Path, tmp_path: Path
) -> None:
    """Each side waits for the other at the point where they must overlap: without the overlap this comes to no end."""
    from clipscale.data.loader.to_device import ChunkLoader
    from clipscale.step.cache.grad_cache import GradCache

    encoder = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * SIDE * SIDE, 4))

    def encode(pixels: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            until(tmp_path / "piece 4 begun")  # of the next batch
        out = encoder(pixels / 255)
        (tmp_path / "first chunk encoded").touch()
        return out

    options = {"workers": 1, "shard_streams": 1, "timeout_s": 50.0, "tokenizer": Gated(tmp_path)}
    with open_stream(shard, batch=128, side=SIDE, **options) as stream:
        batch = stream.next_batch()
        rows = ChunkLoader(batch.pixels, len(batch), torch.device("cpu"), stays_on_device=False)
        cache = GradCache([encode], lambda features: features.square().sum(), chunks=32)
        assert torch.isfinite(cache.step(rows))


# ---- page-locked memory ----


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


@pytest.mark.parametrize("answer", [0, 2])
def test_what_is_copied_to_the_gpu_is_locked_until_the_end(
    answer: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = Runtime(answer)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = create_arena(BatchLayout(2, 8, 16, 4))
    memory.pin()
    assert memory.is_pinned == (not answer) == (not caplog.text)
    assert not answer or "could not be page-locked (CUDA error 2)" in caplog.text
    for start, size in runtime.locked.items():
        for rows in (slot["pixels"] for slot in memory.slots):
            assert start <= rows.ctypes.data and rows.ctypes.data + rows.nbytes <= start + size
    memory.close()
    assert not memory.is_pinned and not runtime.locked
