"""Ranks of a step send few messages, and all end with the same weights."""

import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from clipscale.config.sections import CacheConfig, LaunchConfig
from clipscale.config.train_config import TrainConfig
from clipscale.distributed import join
from clipscale.distributed.join import init_world
from clipscale.distributed.parallel import gradient_norm, wrap
from clipscale.distributed.world import World
from clipscale.step.measurements import Readback
from tests.support.ranks import run_ranks
from tests.support.runs import four_step_config, loop_with_batches


def counted(rank: int, world_size: int, config: TrainConfig, slots: int) -> tuple[int, int, int, list[Tensor]]:
    """How often the second step reads values of the device, sends objects, and waits for a number of the other ranks;
    and the weights after it. With 2 `slots` the second batch has arrived in the first step."""
    run = loop_with_batches(config, World(rank, world_size, torch.device("cpu")), batches=slots)
    run.run_step()
    with (
        patch.object(Readback, "read", autospec=True, side_effect=Readback.read) as read,
        patch.object(World, "all_reduce_max", autospec=True, side_effect=World.all_reduce_max) as waited,
        patch.object(dist, "broadcast_object_list", wraps=dist.broadcast_object_list) as broadcast,
        patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as gathered,
    ):
        run.run_step()
    run.stream.close()
    objects = broadcast.call_count + gathered.call_count
    return read.call_count, objects, waited.call_count, [p.detach() for p in run.train_step.model.parameters()]


@pytest.mark.parametrize(
    ("parallel", "slots"),
    [("ddp", 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("ddp", 1), ("zero3", 2)))],
)
def test_a_step_sends_no_objects_and_the_first_rank_alone_reads_a_record(
    shards: str, tmp_path: Path, parallel: str, slots: int
) -> None:
    """Each reads the loss and the norm, by which it is decided whether there is an update; the first also the record of
    the step before. What else would wait for the device: tests/test_host_waits.py. A rank waits for the others' number
    of text chunks only where its captions had not arrived in the step before."""
    launch = LaunchConfig(parallel=parallel)
    config = four_step_config(shards, tmp_path / "run", launch=launch, cache=CacheConfig(chunk=["2", "3"]))
    (*first, weights), (*other, same) = run_ranks(counted, 2, config, slots)
    assert (first, other) == ([2, 0, 2 - slots], [1, 0, 2 - slots]), "only rank 0 logs"
    if parallel == "ddp":
        assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))


@pytest.mark.parametrize(("setting", "threads"), [(None, 4), ("2", 3)])
def test_a_process_on_a_cpu_takes_all_cores_unless_threads_are_set(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, threads: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if setting:
        monkeypatch.setenv("OMP_NUM_THREADS", setting)
    monkeypatch.setattr(join, "cores", lambda: 4)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        init_world("cpu")
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def left_alone(rank: int, ranks: int) -> float:
    """How long the first rank waits for the second, which does not come."""
    world = World(rank, ranks, torch.device("cpu"), timedelta(seconds=0.5))
    world.all_reduce_max(1)
    begun = time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"(?i)timed out"):
            world.all_reduce_max(1)
    dist.barrier()
    return time.monotonic() - begun


def test_a_rank_waits_for_the_others_as_long_as_it_is_told() -> None:
    waited, _ = run_ranks(left_alone, 2)
    assert 0.4 < waited < 60


def test_the_norm_of_no_gradients_is_zero() -> None:
    frozen = torch.nn.Parameter(torch.ones(3))
    assert gradient_norm([frozen]).item() == 0
    assert gradient_norm([]).shape == ()


class WithBuffer(nn.Linear):
    """A layer with a buffer, which no step changes."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("table", torch.zeros(1))


def buffer_after_a_pass(rank: int, ranks: int) -> float:
    layer = WithBuffer()
    wrapped = wrap(World(rank, ranks, torch.device("cpu")), layer, "ddp", torch.float32)
    layer.table.fill_(rank)
    wrapped(torch.ones(1, 2))
    return float(layer.table)


def test_buffers_are_not_sent_in_every_pass() -> None:
    """They are constant, so a broadcast for each chunk would be for nothing."""
    assert run_ranks(buffer_after_a_pass, 2) == [0.0, 1.0]
