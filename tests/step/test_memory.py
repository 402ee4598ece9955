"""The memory for kept graphs with `cache.keep=auto`: what the first step leaves free."""

from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from clipscale.config.sections import CacheConfig, OptimConfig
from clipscale.distributed.world import World
from clipscale.step import memory
from clipscale.step.measurements import StepTimer
from clipscale.step.memory import measured_keep_bytes
from tests.step.cache.test_kept_graphs import N, cached
from tests.support.checkpoints import ONE_RANK
from tests.support.runs import four_step_config, train_loop
from tests.support.towers import samples, small_model


@pytest.mark.parametrize(
    ("other_rank", "loss", "required"), [(840, 70, 830), (750, 70, 750), (840, 150, 810), (840, 990, 0)]
)
def test_auto_measures_in_the_first_step_and_then_keeps_what_it_has_left(
    other_rank: int, loss: int, required: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that has least decides. The step built and dropped a graph of 30 bytes, so one more may be kept. The
    optimizer's state, 90 bytes, is made in the first update, and stays."""
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 60 + 90)
    monkeypatch.setattr(memory, "usable_bytes", lambda device: 900)
    monkeypatch.setattr(World, "all_reduce_max", lambda self, *values: [max(-other_rank, *values)])
    gpu = torch.device("cuda")
    timer = StepTimer(gpu)
    timer.bytes_before = {"encode": 60}
    timer.peak_bytes = {"encode": 150, "loss": loss, "replay": 160, "optim": 185}
    assert measured_keep_bytes(World(0, 1, gpu), timer, graph_bytes=30) == required
    assert [CacheConfig(keep=setting).keep_bytes for setting in ("auto", "none", "2k")] == [None, 0, 2048]


def test_on_a_cpu_auto_keeps_the_graphs_of_a_batch_that_fits_from_the_second_step_on() -> None:
    """This is the default of a run: a batch of one chunk has no second pass then."""
    model, calls = small_model(), []
    model.image.register_forward_hook(lambda *_: calls.append("image"))
    cache = cached(model, chunk=N)
    cache.keep_bytes = None
    for expected in (2, 1):
        calls.clear()
        cache.step(*samples(N))
        cache.keep_bytes = measured_keep_bytes(ONE_RANK, StepTimer(ONE_RANK.device), cache.graph_bytes)
        assert len(calls) == expected
    assert cache.keep_bytes is not None and 2**20 < cache.keep_bytes < psutil.virtual_memory().total // 2


@pytest.mark.parametrize(("free", "usable"), [(20, 10), (6, 2), (3, 0)])
def test_on_a_cpu_auto_leaves_memory_to_others(monkeypatch: pytest.MonkeyPatch, free: int, usable: int) -> None:
    """It leaves half of the memory, and at least 4 GiB. The ranks of a machine share the rest."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(memory, "free_memory", lambda: free << 30)
    for ranks in (1, 2):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert max(0, memory.usable_bytes(cpu)) == (usable << 30) // ranks


def test_graphs_are_kept_only_when_the_optimizer_has_its_state(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first steps with fp16 overflow, and are skipped. The memory that they leave free is not free for graphs."""
    scaler = partial(torch.amp.GradScaler, init_scale=2.0**127, backoff_factor=2.0**-120)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    settings = {"cache": CacheConfig(chunk=["4", "6"], keep="auto"), "optim": OptimConfig(name="lion", lr=1e-3)}
    run = train_loop(four_step_config(shards, tmp_path / "run", precision="fp16", **settings), ONE_RANK)
    run.run_step()
    assert not run.train_step.optimizer.state and run.train_step.cache.keep_bytes is None
    run.run_step()
    run.stream.close()
    assert run.train_step.optimizer.state and run.train_step.cache.keep_bytes is not None
