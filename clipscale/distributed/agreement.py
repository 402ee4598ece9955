"""Ranks agree on errors: if one rank raises UserError, all do, at the same place.

Otherwise the others would wait for that rank in the next collective. Only UserErrors are agreed on. After another error
its process ends, and then the launcher ends the others.
"""

from collections.abc import Callable
from typing import NoReturn, TypeVar, cast

from clipscale.common.errors import UserError
from clipscale.distributed.world import World

T = TypeVar("T")


def run_on_rank0(world: World, work: Callable[[], T]) -> T:
    """Call `work` on rank 0 alone. Returns its result, or raises its UserError, on all ranks. A collective.

    Another error than UserError leaves rank 0 alone: see `raise_together`.
    """
    result = raise_together(world, lambda: work() if world.is_rank0 else None)
    return cast(T, world.broadcast_object(result))


def run_long_on_rank0(world: World, work: Callable[[], T]) -> T:
    """`run_on_rank0` for work that has limits of its own, and may take longer than `World.timeout`. A collective."""
    result: T | None = None
    problem: UserError | None = None
    if world.is_rank0:
        try:
            result = work()
        except UserError as error:
            problem = error
    result, problem = world.broadcast_object((result, problem), is_late=True)
    if problem:
        raise_on_all_ranks(problem)
    return cast(T, result)


def raise_together(world: World, work: Callable[[], T]) -> T:
    """Call `work` on every rank, and gather the ranks' errors. A collective. Returns this rank's result.

    If any rank raises UserError, every rank raises the first of them. Any other error of `work` leaves this rank alone,
    without the collective. The others wait in it until this process has ended with that error and the launcher, ours or
    torchrun, ends them; without a launcher, until `World.timeout`.
    """
    problem: UserError | None = None
    try:
        result = work()
    except UserError as error:
        problem = error
    for error_of_rank in world.all_gather_object(problem):
        if error_of_rank:
            raise_on_all_ranks(error_of_rank)
    return result


def raise_on_all_ranks(error: UserError) -> NoReturn:
    """Raise an error that every rank raises, at the same place; see `is_raised_on_all_ranks`."""
    error.is_on_all_ranks = True
    raise error


def is_raised_on_all_ranks(world: World, error: Exception) -> bool:
    """Whether every rank raises this error at the same place, so that a collective may follow."""
    return world.size == 1 or (isinstance(error, UserError) and error.is_on_all_ranks)
