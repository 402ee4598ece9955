"""Chunk sizes by measurement: the fastest, or the smallest that is nearly as fast where the memory left over keeps
graphs.
"""

from collections.abc import Callable

import pytest
import torch

from clipscale.common.chunk_sizes import ChunkSizes
from clipscale.common.errors import UserError
from clipscale.step.cache.chunk_sizes import agreed_chunk_sizes, find_chunk
from tests.support.checkpoints import ONE_RANK
from tests.support.towers import small_model

GPU = torch.device("cuda")
RATES = {16: 50.0, 32: 80.0, 64: 96.0, 128: 100.0, 256: 99.0, 512: 90.0, 1024: 70.0}


def measured(fits: int, rates: dict[int, float], batch: int = 4096) -> Callable[[bool], int]:
    """`find_chunk` on a device that runs chunks at these samples a second, up to `fits` samples."""

    def rate(size: int) -> float:
        if size > fits:
            raise torch.OutOfMemoryError
        return rates[size]

    return lambda keep: find_chunk(rate, batch, GPU, keeps_graphs=keep)


def test_without_kept_graphs_the_fastest_chunk_is_taken() -> None:
    find = measured(fits=4096, rates=RATES)
    assert find(False) == 128
    assert find(True) == 64, "96 % of the speed, and memory for graphs"
    assert measured(fits=4096, rates=RATES, batch=256)(True) == 128, "which fits whole"


def test_the_largest_chunk_that_fits_leaves_no_memory_and_is_not_taken() -> None:
    rising = {16 * 2**i: 100.0 * 2**i for i in range(8)}
    assert measured(fits=256, rates=rising)(False) == 128
    with pytest.raises(UserError, match="not even 16 samples fit"):
        measured(fits=8, rates=rising)(False)


def test_a_resumed_run_has_the_chunks_of_its_checkpoint_on_the_same_kind_of_device() -> None:
    """Other chunks would draw other random numbers. On another kind of device the checkpoint's may be too large."""
    model = small_model()
    for device, image in (("cpu", 17), ("NVIDIA H200, 140 GiB", 100)):
        sizes = agreed_chunk_sizes((None, None), model, 100, ONE_RANK, ChunkSizes(17, 100, device), keeps_graphs=True)
        assert sizes == ChunkSizes(image, 100, "cpu")
