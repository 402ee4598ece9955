"""Ranks agree on errors: if one rank raises UserError, all raise an AgreedError of it, at the same place.

Otherwise the others would wait for that rank in the next collective. Only UserErrors are agreed on. After another error
its process ends, and then the launcher ends the others.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import NoReturn, Self, TypeVar, cast

from clipscale.common.errors import UserError
from clipscale.distributed.world import World

T = TypeVar("T")


class AgreedError(UserError):
    """An error that every rank raises, at the same place, so that a collective may follow. Only this module makes one.

    `error`: the first rank's error. Message and exit status are those of `error`.
    """

    def __init__(self, error: UserError) -> None:
        super().__init__(error)
        self.error = error
        self.exit_status = error.exit_status

    def __reduce__(self) -> tuple[type[Self], tuple[UserError]]:
        return type(self), (self.error,)  # a worker's is sent to its launcher


# Seconds between the messages of a rank 0 whose work takes long.
HEARTBEAT_S = 1.0


def run_on_rank0(world: World, work: Callable[[], T]) -> T:
    """Call `work` on rank 0 alone. Returns its result, or raises AgreedError, on all ranks. A collective.

    Any other error than UserError is raised on rank 0 alone: see `run_on_all_ranks`.
    """
    result = run_on_all_ranks(world, lambda: work() if world.is_rank0 else None)
    return cast(T, world.broadcast_object(result))


def run_on_rank0_with_heartbeat(world: World, work: Callable[[], T]) -> T:
    """`run_on_rank0` for work that may last as long as a network: copies, weights, counts. A collective.

    Meanwhile a thread of rank 0 sends heartbeats. If rank 0's process ends, the other ranks fail at once. If it is
    frozen, they fail after `World.timeout`. If `work` itself never returns, the heartbeats go on and the others wait
    for ever: give such work a time limit of its own.
    """
    if world.size == 1:
        return work()
    group = world.rank0_group
    outcome: tuple[T | None, UserError | None] | None = None
    if world.is_rank0:
        with sending_heartbeats(world):
            try:
                outcome = work(), None
            except UserError as error:
                outcome = None, error
        world.broadcast_object(outcome, group)
    while outcome is None:
        outcome = world.broadcast_object(outcome, group)
    result, problem = outcome
    if problem:
        raise_on_all_ranks(problem)
    return cast(T, result)


@contextmanager
def sending_heartbeats(world: World) -> Iterator[None]:
    """Context of rank 0's work: a thread sends None to the other ranks, at once and then every HEARTBEAT_S seconds."""
    has_ended = Event()

    def send_heartbeats() -> None:
        with suppress(RuntimeError):  # another rank has ended; rank 0 learns of it when its work is done
            while not has_ended.is_set():
                world.broadcast_object(None, world.rank0_group)
                has_ended.wait(min(HEARTBEAT_S, world.timeout.total_seconds() / 4))

    thread = Thread(target=send_heartbeats, daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
    thread.join()  # but not after an error of this rank alone, which ends its process


def run_on_all_ranks(world: World, work: Callable[[], T]) -> T:
    """Call `work` on every rank, and gather the ranks' errors. A collective. Returns this rank's result.

    If any rank raises UserError, every rank raises an AgreedError of the first of them; in a run of one rank the error
    stays as it is. Any other error of `work` leaves this rank alone, without the collective. The others wait in it
    until this process has ended with that error and the launcher, ours or torchrun, ends them; without a launcher,
    until `World.timeout`.
    """
    if world.size == 1:
        return work()
    problem: UserError | None = None
    try:
        result = work()
    except UserError as error:
        problem = error
    for rank, error_of_rank in enumerate(world.all_gather_object(problem)):
        if error_of_rank:
            # This rank raises its own error, which has its cause, and not the copy that was sent.
            raise_on_all_ranks(problem if problem and rank == world.rank else error_of_rank)
    return result


def raise_on_all_ranks(error: UserError) -> NoReturn:
    """Raise AgreedError. Called on every rank, at the same place."""
    if isinstance(error, AgreedError):
        raise error
    raise AgreedError(error) from error


def unwrap_agreed(error: Exception) -> Exception:
    """The error itself, or the one on which the ranks have agreed."""
    return error.error if isinstance(error, AgreedError) else error
