"""Chunks on their way to the device: read again for the second pass, or kept. Streams of a GPU: tests/test_gpu.py."""

from collections import defaultdict
from contextlib import nullcontext
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from clipscale.data.loader import to_device
from clipscale.data.loader.to_device import ChunkLoader

# Bytes of the largest chunk that is small, and of the smallest that is large.
SMALL = 2**23
LARGE = SMALL + 1


@pytest.mark.parametrize(("resident", "reads"), [(True, 2), (False, 4)])
def test_chunks_stay_on_the_device_only_if_they_are_resident(resident: bool, reads: int) -> None:
    rows = torch.arange(10)
    spans = []

    def read(start: int, stop: int) -> Tensor:
        spans.append((start, stop))
        return rows[start:stop]

    chunks = ChunkLoader(read, 10, torch.device("cpu"), stays_on_device=resident)
    for span in ((0, 6), (6, 10), (0, 6), (6, 10)):
        assert chunks.chunk(*span).tolist() == [*range(*span)]
    assert len(spans) == reads and len(chunks) == 10


@pytest.mark.parametrize(
    ("sizes", "waits"),
    [
        ([SMALL] * 5, {4: [1], 5: [2]}),
        ([LARGE] * 4, {2: [1], 3: [2], 4: [3]}),
        ([SMALL] * 3 + [LARGE] * 2, {4: [1], 5: [2, 3, 4]}),
    ],
)
def test_three_small_chunks_are_copied_ahead_and_one_large_one(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], waits: dict[int, list[int]]
) -> None:
    """`waits`: at which chunk the host waits, and before which chunks' copies the events were recorded."""
    number = 0
    waited = defaultdict(list)
    compute = Mock(record_event=lambda: Mock(synchronize=partial(lambda event: waited[number].append(event), number)))
    monkeypatch.setattr(to_device, "shared_copy_stream", Mock())
    monkeypatch.setattr("torch.cuda.current_stream", lambda _: compute)
    monkeypatch.setattr("torch.cuda.stream", lambda _: nullcontext())
    rows = [Mock(**{"to.return_value.nbytes": size}) for size in sizes]
    chunks = ChunkLoader(lambda start, _: rows[start], len(sizes), torch.device("cuda"), stays_on_device=False)
    for number in range(1, len(sizes) + 1):
        chunks.chunk(number - 1, number)
    assert waited == waits
