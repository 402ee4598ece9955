"""Chunks on their way to the device: read again for the second pass, or kept. Streams of a GPU: tests/test_gpu.py."""

import pytest
import torch
from torch import Tensor

from clipscale.data.loader.to_device import ChunkLoader


@pytest.mark.parametrize(("resident", "reads"), [(True, 2), (False, 4)])
def test_chunks_stay_on_the_device_only_if_they_are_resident(resident: bool, reads: int) -> None:
    rows, spans = torch.arange(10), []

    def read(start: int, stop: int) -> Tensor:
        spans.append((start, stop))
        return rows[start:stop]

    chunks = ChunkLoader(read, 10, torch.device("cpu"), resident=resident)
    for span in ((0, 6), (6, 10), (0, 6), (6, 10)):
        assert chunks.chunk(*span).tolist() == [*range(*span)]
    assert len(spans) == reads and len(chunks) == 10
