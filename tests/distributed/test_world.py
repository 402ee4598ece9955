"""A step over several ranks waits for the device once, and all ranks end with the same weights."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from clipscale.common.errors import LostRankError
from clipscale.common.phases import Phases, Readback
from clipscale.config.sections import CacheConfig, LaunchConfig
from clipscale.config.train import TrainConfig
from clipscale.distributed import world as world_module
from clipscale.distributed.world import World, join
from clipscale.train import Run
from tests.support.ranks import run_ranks
from tests.support.runs import small


def counted(rank: int, world: int, config: TrainConfig) -> tuple[Counter[str], list[Tensor]]:
    """Calls in the second step that make the host wait for the device, or send objects; and the weights after it.

    Not counted: those of the optimizer, whose counts of steps lie on the host, and those in the loss, whose backend
    here is the CPU's.
    """
    run = Run(config, World(rank, world, torch.device("cpu")))
    run.train_step()
    run.step += 1
    calls = Counter[str]()
    uncounted = []
    phase = Phases.__call__

    @contextmanager
    def entered(phases: Phases, name: str) -> Iterator[None]:
        if name == "loss":
            uncounted.append(name)
        with phase(phases, name):
            yield
        if name == "loss":
            uncounted.remove(name)

    def counting(owner: Any, name: str) -> Any:
        original = getattr(owner, name)

        def called(*args: Any, **named: Any) -> Any:
            if not uncounted:
                calls[name] += 1
            return original(*args, **named)

        return patch.object(owner, name, called)

    hooks = (
        register_optimizer_step_pre_hook(lambda *_: uncounted.append("optimizer")),
        register_optimizer_step_post_hook(lambda *_: uncounted.remove("optimizer")),
    )
    with (
        patch.object(Phases, "__call__", entered),
        counting(torch.cuda, "synchronize"),
        counting(Tensor, "item"),
        counting(Tensor, "cpu"),
        counting(Tensor, "__float__"),
        counting(Tensor, "__bool__"),
        counting(dist, "broadcast_object_list"),
        counting(dist, "all_gather_object"),
        counting(Readback, "read"),
    ):
        run.train_step()
    for hook in hooks:
        hook.remove()
    run.stream.close()
    return calls, [p.detach() for p in run.state.model.parameters()]


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("zero3", marks=pytest.mark.slow)])
def test_a_step_waits_for_the_device_once(shards: str, tmp_path: Path, parallel: str) -> None:
    """For the loss and the norm, by which it is decided whether there is an update.

    The first rank, which logs, also reads the step before, while the device works on this one.
    """
    launch = LaunchConfig(parallel=parallel)
    config = small(shards, tmp_path / "run", launch=launch, cache=CacheConfig(chunk=["2", "3"]))
    (first, weights), (other, same) = run_ranks(counted, 2, config)
    assert first == {"read": 2}
    assert other == {"read": 1}, "only rank 0 logs"
    if parallel == "ddp":
        assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))


@pytest.mark.parametrize(("setting", "threads"), [(None, 4), ("2", 3)])
def test_a_process_on_a_cpu_takes_all_cores_unless_threads_are_set(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, threads: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if setting:
        monkeypatch.setenv("OMP_NUM_THREADS", setting)
    monkeypatch.setattr(world_module, "cores", lambda: 4)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        join("cpu")
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def limited(rank: int, world: int, sleeper: int) -> tuple[str, bool]:
    """What a rank learns when another one hangs in a step that is limited to a second."""
    here = World(rank, world, torch.device("cpu"))
    here.highest(0)  # the group is there
    world_module.ANSWER_S = 2.0
    try:
        with here.limited(1.0):
            if rank == sleeper:
                time.sleep(6.0)
                return "slept", False
            here.highest(rank)
    except LostRankError as error:
        return str(error), error.first
    return "", False


def test_a_rank_that_hangs_is_named_after_a_steps_time() -> None:
    """By the first of the others alone."""
    lines = run_ranks(limited, 3, 1)
    assert all("rank 1 of 3 does not answer" in line for line, _ in (lines[0], lines[2]))
    assert [first for _, first in lines] == [True, False, False]
