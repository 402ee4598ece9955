"""The host memory that is copied to the GPU is page-locked while the batches live, and a refusal is a warning."""

import pytest
import torch

from clipscale.config.data import DataConfig
from clipscale.data.columns import columns_of
from clipscale.data.loader.host_batch import Arena, Layout, Offload


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
