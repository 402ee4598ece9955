"""Chunk sizes by measurement: the fastest, or the smallest that is nearly as fast where the memory left over keeps
graphs.
"""

from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

from clipscale.common.batch import ChunkSizes
from clipscale.common.errors import UserError
from clipscale.distributed.world import World
from clipscale.step.chunk_sizes import (
    ChunkProbe,
    agreed_chunk_sizes,
    find_chunk,
    measured_chunk,
    other_step_bytes,
)
from tests.support.checkpoints import ONE_RANK
from tests.support.ranks import run_ranks
from tests.support.towers import samples, small_model

CPU = torch.device("cpu")
GPU = torch.device("cuda")
RATES = {16: 50.0, 32: 80.0, 64: 96.0, 128: 100.0, 256: 99.0, 512: 90.0, 1024: 70.0}


def measured(
    fits: int, rates: dict[int, float], batch: int = 4096, rows: int = 1, beside: int = 100
) -> Callable[[bool], int]:
    """`find_chunk` on a device that runs chunks at these samples a second, up to `fits` samples. `rows` of a sample.

    `beside`: the samples for which the step's other parts would take the memory.
    """
    sizes = list[int]()

    class Probe(ChunkProbe):
        def samples_per_second(self, size: int) -> float:
            sizes.append(size)
            if size > fits:
                raise torch.OutOfMemoryError
            return rates[size]

        def norm_rows(self) -> int:
            return rows

        def leaves_enough_memory(self) -> bool:
            return fits - sizes[-1] >= beside

    probe = Probe(nn.Identity(), torch.zeros, GPU, other_step_bytes=0)
    return lambda keep: find_chunk(probe, batch, keeps_graphs=keep)


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


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    ("fits", "chunk"),
    [
        pytest.param(868, 768, id="the whole batch leaves room for the rest of the step"),
        pytest.param(867, 512, id="it leaves too little"),
        pytest.param(767, 256, id="it does not fit, and 512 may leave too little"),
    ],
)
def test_the_whole_batch_is_a_chunk_where_the_rest_of_the_step_fits_beside_it(
    fits: int, chunk: int, keep: bool
) -> None:
    rising = {size: float(size) for size in (16, 32, 64, 128, 256, 512, 768)}
    assert measured(fits=fits, rates=rising, batch=768)(keep) == chunk


@pytest.mark.parametrize(("peak", "chunk"), [(80, 24), (81, 16)])
def test_the_memory_that_a_chunk_leaves_is_what_was_free_at_its_peak(
    peak: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine tenths of 100 MB that are free now are usable. 10 MB are allocated; the weights need almost 20 MB beside."""
    model = nn.Linear(999, 900).requires_grad_()
    MB = 1_000_000
    memory = {"max_memory_allocated": peak, "memory_allocated": 10, "memory_reserved": 30}
    for name, size in memory.items():
        monkeypatch.setattr(torch.cuda, name, lambda *device, size=size: size * MB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *device: (80 * MB, 140 * MB))
    monkeypatch.setattr(ChunkProbe, "samples_per_second", lambda probe, size: float(size))
    probe = ChunkProbe(model, lambda n: torch.zeros(n, 999), GPU, other_step_bytes(model))
    assert measured_chunk(probe, 24, World(0, 1, GPU), keeps_graphs=True) == chunk


@pytest.mark.parametrize(
    ("rows", "chunk"),
    [
        pytest.param(257, 256, id="128 x 257 rows are few, 256 x 257 are 65,792"),
        pytest.param(256, 64, id="256 x 256 are 65,536, which is not above them"),
        pytest.param(600, 128, id="64 x 600 rows are few"),
        pytest.param(1025, 64, id="the smallest has enough"),
        pytest.param(50, 64, id="of the sizes that are nearly as fast none has enough"),
    ],
)
def test_of_sizes_nearly_as_fast_one_is_taken_with_rows_for_the_fast_kernel_of_layer_norm(
    rows: int, chunk: int
) -> None:
    """With RATES 64, 128 and 256 samples are nearly as fast."""
    assert measured(fits=4096, rates=RATES, rows=rows)(True) == chunk
    assert measured(fits=4096, rates=RATES, rows=rows)(False) == 128, "without kept graphs it is the fastest"


def test_rows_of_layer_norms_are_the_tokens_of_a_sample() -> None:
    """Most norms see all tokens; the last one the pooled token alone. An image of 12 pixels has 4 x 4 patches of 3."""
    model = small_model()
    pixels, captions = samples(2)
    for tower, inputs, tokens in ((model.image, pixels, 1 + 4 * 4), (model.text, captions, model.context_length)):
        probe = ChunkProbe(tower, partial(inputs.narrow, 0, 0), CPU, other_step_bytes=0)
        assert probe.norm_rows() == tokens
        assert not any(module._forward_pre_hooks for module in tower.modules())
        tower.requires_grad_(False)
        assert probe.norm_rows() == 0, "a frozen tower has no such gradients"


def test_a_resumed_run_has_the_chunks_of_its_checkpoint_on_the_same_kind_of_device() -> None:
    """Other chunks would draw other random numbers. On another kind of device the checkpoint's may be too large."""
    model = small_model()
    for device, image in (("cpu", 17), ("NVIDIA H200, 140 GiB", 100)):
        sizes = agreed_chunk_sizes((None, None), model, 100, ONE_RANK, ChunkSizes(17, 100, device), keeps_graphs=True)
        assert sizes == ChunkSizes(image, 100, "cpu")


def sizes_on_a_rank(rank: int, world_size: int) -> str:
    """Rank 1's device has no room for a chunk."""

    def find(*_: object, **__: object) -> int:
        if rank == 1:
            raise UserError("not even 16 samples fit the device")
        return 16

    with mock.patch("clipscale.step.chunk_sizes.find_chunk", find), pytest.raises(UserError) as refusal:
        agreed_chunk_sizes(
            [None, None], small_model(), 8, World(rank, world_size, torch.device("cpu")), None, keeps_graphs=True
        )
    return str(refusal.value)


def test_all_ranks_end_where_a_chunk_does_not_fit_the_device_of_one() -> None:
    assert run_ranks(sizes_on_a_rank, 2) == ["not even 16 samples fit the device"] * 2
