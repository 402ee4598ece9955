"""The ring: the bytes that it sends, and transfers that are under way while a block is computed."""

import time
from inspect import isfunction
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from clipscale import contrastive_loss
from clipscale.loss.block import BlockSide
from clipscale.loss.communicator import Communicator
from clipscale.loss.exchange import BLOCK_SPAN, GRAD, Ring
from tests.loss.workers import Workers

COLS, WIDTH = 16, 512


def sent_in_a_step(group: dist.ProcessGroup, rank: int, objective: str, trains_texts: bool) -> float:
    """Bytes that this rank gives to any method of the communicator, for each number of the columns of all ranks."""
    u, v = (torch.randn(COLS, WIDTH).bfloat16().requires_grad_(x) for x in (True, trains_texts))
    methods = {name: f for name, f in vars(Communicator).items() if isfunction(f) and not name.startswith("__")}
    spies = {name: mock.create_autospec(method, side_effect=method) for name, method in methods.items()}
    with mock.patch.multiple(Communicator, **spies):
        contrastive_loss(u, v, 10.0, group=group, exchange="ring", objective=objective).backward()
    calls = [call for spy in spies.values() for call in spy.call_args_list]
    sent = sum(x.nbytes for x in tree_leaves([call.args for call in calls]) if isinstance(x, Tensor))
    return sent / (COLS * WIDTH * dist.get_world_size(group))


@pytest.mark.parametrize(("objective", "sweeps", "gradient"), [("softmax", 2, 4), ("sigmoid", 1, 4), ("softmax", 2, 0)])
def test_a_step_sends_at_most_nine_bytes_a_number(ranks: Workers, objective: str, sweeps: int, gradient: int) -> None:
    """A feature is sent P - 1 times in bfloat16 in each sweep, its gradient P times in float32, unless the texts are
    frozen. Sums of columns are small."""
    for world in (2, 4):
        expected = sweeps * 2 * (world - 1) / world + gradient
        for sent in ranks.run(sent_in_a_step, world, objective, gradient > 0):
            assert expected <= sent < 1.02 * expected + 0.05 and sent <= 9.0, f"{sent} bytes of {expected}"


# Name, first and last microsecond.
Span = tuple[str, float, float]


def timeline(group: dist.ProcessGroup, rank: int) -> list[Span]:
    """The blocks and transfers of a sweep with gradients, each block taking a while without using a processor."""
    cols = BlockSide(torch.zeros(1024, 1024))
    ring = Ring(Communicator(group))
    ring.sweep(cols, [GRAD], lambda *_: None)  # connects
    dist.barrier(group)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        ring.sweep(cols, [GRAD], lambda *_: time.sleep(0.15))
    events = [(event.name, event.time_range) for event in trace.events()]
    return sorted([(name, s.start, s.end) for name, s in events if name == BLOCK_SPAN or name.startswith("gloo:")])


def test_a_hop_is_under_way_while_its_block_is_computed(ranks: Workers) -> None:
    """In the trace every transfer of features begins before a block and ends after it."""
    for spans in ranks.run(timeline, 4):
        blocks = sorted([span for span in spans if span[0] == BLOCK_SPAN], key=lambda span: span[1])
        assert len(blocks) == 4
        for _, start, end in blocks[:-1]:
            around = {name for name, a, b in spans if name.startswith("gloo") and a <= start and b >= end}
            assert around == {"gloo:send", "gloo:recv"}, f"during the block of {start:.1f} to {end:.1f}: {around}"
