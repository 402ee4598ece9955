"""A UserError of one rank is raised on all of them, at the same place. Another error is that rank's own."""

import pickle
import time
from datetime import timedelta

import pytest
import torch

from clipscale.common.errors import LoaderError, UserError
from clipscale.distributed import agreement
from clipscale.distributed.agreement import AgreedError, run_on_all_ranks, run_on_rank0, run_on_rank0_with_heartbeat
from clipscale.distributed.world import World
from tests.support.checkpoints import ONE_RANK
from tests.support.ranks import run_ranks


def agree(rank: int, ranks: int) -> tuple[str, type, int, str, str, int]:
    """The error that rank 1 raises, on this rank: its message, kind and exit status; the message of an agreement inside
    another one; that of the error of rank 0's work; and a result of its work."""
    world = World(rank, ranks, torch.device("cpu"))

    def fail_on_rank_1() -> None:
        if rank == 1:
            raise LoaderError("rank 1 has no data")

    def fail() -> int:
        raise UserError(f"rank {rank} cannot write")

    with pytest.raises(AgreedError) as of_rank_1:
        run_on_all_ranks(world, fail_on_rank_1)
    with pytest.raises(AgreedError) as inside:
        run_on_all_ranks(world, lambda: run_on_rank0(world, fail))
    with pytest.raises(AgreedError) as of_rank_0:
        run_on_rank0(world, fail)
    error = pickle.loads(pickle.dumps(of_rank_1.value))  # as a worker's, which is sent to its launcher
    assert type(inside.value.error) is UserError
    return (
        str(error),
        type(error.error),
        error.exit_status,
        str(inside.value),
        str(of_rank_0.value),
        run_on_rank0(world, lambda: 10 + rank),
    )


def test_an_error_of_the_user_is_raised_on_all_ranks() -> None:
    outcome = ("rank 1 has no data", LoaderError, 1, "rank 0 cannot write", "rank 0 cannot write", 10)
    assert run_ranks(agree, 2) == [outcome, outcome]


def test_an_error_of_the_only_rank_keeps_its_kind() -> None:
    def fail() -> None:
        raise LoaderError("no data")

    with pytest.raises(LoaderError):
        run_on_all_ranks(ONE_RANK, fail)
    with pytest.raises(LoaderError):
        run_on_rank0_with_heartbeat(ONE_RANK, fail)


def fail_alone(rank: int, ranks: int) -> bool:
    """Rank 1 fails by another error, which it raises without a collective. It calls its next one for rank 0's."""
    world = World(rank, ranks, torch.device("cpu"))

    def work() -> None:
        if rank == 1:
            raise OSError("disk")

    if rank == 1:
        with pytest.raises(OSError, match="disk"):
            run_on_all_ranks(world, work)
        world.barrier()
    else:
        run_on_all_ranks(world, work)
    return True


def test_another_error_leaves_its_rank_at_once() -> None:
    assert run_ranks(fail_alone, 2) == [True, True]


def wait_for_rank_0(rank: int, ranks: int) -> tuple[int, str]:
    """The result and the error of work that takes longer than a rank waits. Then rank 0 is silent as long."""
    agreement.HEARTBEAT_S = 0.1
    world = World(rank, ranks, torch.device("cpu"), timedelta(seconds=2))

    def fail() -> int:
        raise UserError("no network")

    def work() -> int:
        time.sleep(2.5)
        return 5

    with pytest.raises(AgreedError) as raised:
        run_on_rank0_with_heartbeat(world, fail)
    result = run_on_rank0_with_heartbeat(world, work)
    if rank == 0:
        time.sleep(2.5)
    else:
        with pytest.raises(RuntimeError):
            run_on_rank0_with_heartbeat(world, work)
    return result, str(raised.value)


def test_ranks_wait_for_rank_0_as_long_as_it_works_and_no_longer() -> None:
    assert run_ranks(wait_for_rank_0, 3) == [(5, "no network")] * 3
