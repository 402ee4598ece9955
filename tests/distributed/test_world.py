"""A step over several ranks waits for the device once, and all ranks end with the same weights."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from clipscale.common.phases import Readback
from clipscale.config.sections import CacheConfig, LaunchConfig
from clipscale.config.train import TrainConfig
from clipscale.distributed import world as world_module
from clipscale.distributed.world import World, join
from clipscale.train import Run
from tests.support.ranks import run_ranks
from tests.support.runs import small


def counted(rank: int, world: int, config: TrainConfig) -> tuple[Counter[str], list[Tensor]]:
    """Calls in the second step that make the host wait for the device, or send objects; and the weights after it."""
    run, calls = Run(config, World(rank, world, torch.device("cpu"))), Counter[str]()
    run.train_step()
    run.step += 1

    def counting(owner: Any, name: str) -> Any:
        original = getattr(owner, name)

        def called(*args: Any, **named: Any) -> Any:
            caller = sys._getframe(1).f_code
            # Adam's counts of steps lie on the host. The loss's torch backend is that of the CPU; Triton's reads
            # nothing.
            if not any(path in caller.co_filename for path in ("/torch/optim/", "/clipscale/loss/")):
                calls[f"{name} in {caller.co_qualname}"] += 1
            return original(*args, **named)

        return patch.object(owner, name, called)

    with (
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
    run.stream.close()
    return calls, [p.detach() for p in run.state.model.parameters()]


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("zero3", marks=pytest.mark.slow)])
def test_a_step_waits_for_the_device_once(shards: str, tmp_path: Path, parallel: str) -> None:
    """For the loss and the norm, by which it is decided whether there is an update. The other reading is of the step
    before,
    and happens while the device works on this one."""
    launch = LaunchConfig(parallel=parallel)
    config = small(shards, tmp_path / "run", launch=launch, cache=CacheConfig(chunk=["2", "3"]))
    (first, weights), (other, same) = run_ranks(counted, 2, config)
    assert first == {"read in Run.train_step": 1, "read in StepRecords._complete": 1}
    assert other == {"read in Run.train_step": 1}, "only rank 0 logs"
    if parallel == "ddp":
        assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))


@pytest.mark.parametrize(("given", "threads"), [(None, 3), ("2", 4)])
def test_a_core_is_left_to_the_loaders_unless_threads_are_given(
    monkeypatch: pytest.MonkeyPatch, given: str | None, threads: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(world_module, "cores", lambda: 4)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        join("cpu")
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
