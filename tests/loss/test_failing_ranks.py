"""A mistake or a failure of one rank ends the loss on every rank, with its reason."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from clipscale import contrastive_loss
from clipscale.loss.exchange import Communicator
from clipscale.loss.torch_backend import TorchBackend
from tests.loss.workers import Workers, check, stacked


def refusal(
    group: dist.ProcessGroup, rank: int, shapes: list[tuple[int, int, int]], changes: list[dict[str, Any]]
) -> str:
    """The error's text on this rank, given every rank's (n, m, D) and options."""
    n, m, width = shapes[rank]
    options: dict[str, Any] = {"logit_scale": 10.0, "dtype": torch.float32, "frozen": False} | changes[rank]
    dtype, frozen, scale = options.pop("dtype"), options.pop("frozen"), options.pop("logit_scale")
    u, v = torch.ones(n, width, dtype=dtype, requires_grad=not frozen), torch.ones(m, width, dtype=dtype)
    if options.pop("poison", False):
        u.data[0, 0] = torch.nan
    try:
        contrastive_loss(u, v, scale, group=group, **options)
    except ValueError as problem:
        return str(problem)
    return "no error"


SAME = [(4, 4, 8)] * 3


REFUSALS: list[tuple[list[tuple[int, int, int]], list[dict[str, Any]], str]] = [
    ([(4, 4, 8), (4, 4, 8), (5, 5, 8)], [{}, {}, {}], "number of images"),
    ([(4, 4, 8), (4, 6, 8), (4, 4, 8)], [{}, {}, {}], "number of texts"),
    ([(4, 4, 8), (4, 4, 9), (4, 4, 8)], [{}, {}, {}], "size of an image's features"),
    (SAME, [{}, {}, {"dtype": torch.bfloat16}], "feature type"),
    (SAME, [{"image_keys": torch.arange(4)}, {}, {}], "choice of masks and keys"),
    (SAME, [{"frozen": True}, {}, {}], "choice of tensors that need a gradient"),
    (SAME, [{"objective": "sigmoid"}, {}, {}], "objective"),
    (SAME, [{"exchange": "gather"}, {}, {}], "exchange"),
    ([(4, 4, 8), (5, 4, 8), (4, 4, 8)], [{}, {}, {}], "rank 1|fewer texts"),
    (SAME, [{"ranks_per_node": 2}] * 3, "ranks_per_node=2 must divide"),
    (SAME, [{"logit_scale": -1.0}, {}, {}], "must be positive"),
    (SAME, [{"poison": True}, {}, {}], "is nan"),
]


@pytest.mark.parametrize(("shapes", "changes", "message"), REFUSALS, ids=[message for _, _, message in REFUSALS])
def test_a_mistake_of_one_rank_is_refused_on_every_rank(
    ranks: Workers, shapes: Any, changes: Any, message: str
) -> None:
    for text in ranks.run(refusal, 3, shapes, changes):
        assert any(part in text for part in message.split("|")), f"expected '{message}' but got '{text}'"


def failing(group: dist.ProcessGroup, rank: int, exchange: str, in_pass: str, visit: int, check: bool = True) -> str:
    """What this rank gets where rank 1 runs out of memory in a pass: an error, or whether the value and the texts' gradient are NaN.

    Without `check` there is no backward pass.
    """
    torch.manual_seed(rank)
    u, v = (torch.randn(count, 8, requires_grad=True) for count in (5, 6))
    visits, run = [0], getattr(TorchBackend, in_pass)

    def fail_there(backend: TorchBackend, block: Any) -> None:
        visits[0] += 1
        if rank == 1 and visits[0] == visit:
            raise torch.OutOfMemoryError("tried to allocate a tile")
        run(backend, block)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchBackend, in_pass, fail_there)
        try:
            value = contrastive_loss(u, v, 10.0, exchange=exchange, group=group, check=check)
            if check:
                value.backward()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return f"{bool(value.isnan())} {v.grad is not None and bool(v.grad.isnan().all())}"


REASON = "OutOfMemoryError: tried to allocate a tile"


@pytest.mark.parametrize(
    ("exchange", "visit"), [("replicated", 1), ("local", 1), ("gather", 1), ("ring", 1), ("ring", 3)]
)
def test_a_rank_that_fails_ends_the_others_with_its_reason(ranks: Workers, exchange: str, visit: int) -> None:
    others = f"RuntimeError: contrastive_loss failed on rank 1: {REASON}"
    assert ranks.run(failing, 3, exchange, "forward", visit) == [others, REASON, others]
    u, v = stacked(3, 5, 6, 8)
    check(ranks, 3, u, v, 14.3, {"exchange": exchange})  # the group still works


@pytest.mark.parametrize("exchange", ["local", "gather", "ring"])
def test_without_a_check_and_in_the_backward_pass_the_others_get_nan(ranks: Workers, exchange: str) -> None:
    assert ranks.run(failing, 3, exchange, "backward", 1) == ["False True", REASON, "False True"]
    assert ranks.run(failing, 3, exchange, "forward", 1, False) == ["True False", REASON, "True False"]


def warmed(group: dist.ProcessGroup, rank: int, exchange: str) -> tuple[list[str], str]:
    """What this rank does first in two calls, and its error in a third one, where rank 1 cannot compile."""
    events: list[str] = []
    started = Communicator.post if exchange == "ring" else Communicator.gather
    warm_up, forward = TorchBackend.warm_up, TorchBackend.forward

    def prepared(backend: TorchBackend, block: Any) -> None:
        assert block.rows.grad is not None, "the backward pass has kernels, too"
        events.append("warm up")
        warm_up(backend, block)

    def moved(comm: Communicator, *given: Any, **options: Any) -> Any:
        features_move = exchange == "ring" or given[0].dim() == 2
        events.extend(["hop"] if features_move else [])
        return started(comm, *given, **options)

    def computed(backend: TorchBackend, block: Any) -> None:
        events.append("compute")
        forward(backend, block)

    def fail(backend: TorchBackend, block: Any) -> None:
        raise RuntimeError("out of resource: shared memory")

    u, v = (torch.randn(5, 8, requires_grad=True) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchBackend, "warm_up", prepared)
        patch.setattr(TorchBackend, "forward", computed)
        patch.setattr(Communicator, started.__name__, moved)
        contrastive_loss(u, v, 10.0, exchange=exchange, group=group)
        if rank == 1:
            patch.setattr(TorchBackend, "warm_up", fail)
        try:
            contrastive_loss(u, v, 10.0, exchange=exchange, group=group)
        except Exception as error:
            return events[:3], f"{type(error).__name__}: {error}"
    return events[:3], "no error"


@pytest.mark.parametrize("exchange", ["replicated", "local", "gather", "ring"])
def test_kernels_are_warmed_up_before_the_first_hop(ranks: Workers, exchange: str) -> None:
    reason = "RuntimeError: out of resource: shared memory"
    others = f"RuntimeError: contrastive_loss failed on rank 1: {reason}"
    for rank, (events, text) in enumerate(ranks.run(warmed, 3, exchange)):
        expected = ["warm up", "hop", "hop" if exchange == "replicated" else "compute"]
        assert events == expected, f"rank {rank}: {events}"
        assert text == (reason if rank == 1 else others), f"rank {rank}: {text}"


def outsider(group: dist.ProcessGroup, rank: int) -> str:
    other = dist.new_group([0])  # torch requires all ranks to make it
    if rank == 0:
        return "inside"
    try:
        contrastive_loss(torch.ones(2, 2), torch.ones(2, 2), 1.0, group=other)
    except ValueError as problem:
        return str(problem)
    return "no error"


def test_a_rank_outside_of_the_group_is_refused(ranks: Workers) -> None:
    answers = ranks.run(outsider, 4)
    assert all("does not belong to the group" in text for text in answers[1:]), answers
