"""Kept graphs: as many chunks as fit skip their second pass. test_exactness.py shows that the gradient stays."""

import math
import weakref
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clipscale.common.rng import RandomState
from clipscale.loss.api import contrastive_loss
from clipscale.models.towers import ClipModel
from clipscale.step.cache.grad_cache import GradCache
from clipscale.step.cache.kept_graphs import (
    GraphBudget,
    GraphPolicy,
    KeptGraphs,
    ShortMemoryPolicy,
    measured_graph,
    num_that_fit,
)
from tests.support.towers import samples, small_model

N = 12
CHUNK = 2


def cached(
    model: ClipModel, keep: float = 0, chunk: int = CHUNK, image: nn.Module | None = None, **more: Any
) -> GradCache:
    loss = lambda u, v: contrastive_loss(u, v, model.logit_scale.exp())  # noqa: E731
    return GradCache([image or model.image, model.text], loss, chunks=chunk, keep_bytes=keep, **more)


def graphs_of(model: ClipModel) -> list[int]:
    """The bytes of one graph of each tower."""
    sizes = []
    for tower, rows in zip((model.image, model.text), samples(N)):
        with measured_graph() as size:
            tower(rows[:CHUNK])
        sizes.append(size())
    return sizes


def test_the_first_step_with_chunks_of_a_size_measures_a_full_chunk_and_keeps_none() -> None:
    """The last chunk is a remainder, and the first one also allocates what stays."""
    model = small_model()
    size = graphs_of(model)[0]
    cache = cached(model, 2.5 * size)
    pixels, tokens = samples(N)
    cache.step(pixels[:11], tokens[:11])
    assert cache.num_kept_graphs == [0, 0]
    assert cache.towers[0].graphs.graph_bytes == size
    cache.step(pixels[:11], tokens[:11])
    assert cache.num_kept_graphs[0] == 2
    cache.keep_bytes = size - 1
    cache.step(pixels[:11], tokens[:11])
    assert cache.num_kept_graphs == [0, 0], "the second tower's budget is below 0"
    cache.step(pixels[:1], tokens[:1])
    assert cache.num_kept_graphs[0] == 0 and cache.towers[0].graphs.graph_bytes < size, "another batch, measured anew"
    cache.chunks = [1, 1]
    cache.step(pixels[:11], tokens[:11])
    cache.chunks = [CHUNK, CHUNK]
    cache.step(pixels[:11], tokens[:11])
    assert cache.towers[0].graphs.graph_bytes == size, "other chunks, measured anew"


def test_a_tower_on_the_cpu_is_measured_in_a_process_that_uses_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    size = graphs_of(model)[0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    monkeypatch.setattr(RandomState, "now", lambda device=None: RandomState(torch.get_rng_state(), None))
    cache = cached(model, 2.5 * size)
    cache.step(*samples(N))
    assert cache.graph_bytes == size


def test_a_graphs_bytes_are_without_the_weights_and_without_views_of_them() -> None:
    """A linear layer saves its input and its weight, transposed or not."""
    layer = nn.Linear(100, 100)
    x = torch.randn(2, 100, requires_grad=True)
    for function in (layer, lambda x: x @ layer.weight, lambda x: x @ layer.weight.T[:, :50]):
        with measured_graph() as size:
            function(x)
        assert size() == x.nbytes


def test_kept_chunks_have_no_second_pass() -> None:
    model = small_model()
    calls = []
    image, text = graphs_of(model)
    model.image.register_forward_hook(lambda *_: calls.append("image"))
    model.text.register_forward_hook(lambda *_: calls.append("text"))
    for keep, expected in ((0, (12, 12)), (4.5 * image, (8, 12)), (6 * image + 3.5 * text, (6, 9)), (math.inf, (6, 6))):
        cache = cached(model, keep)
        cache.step(*samples(N))
        calls.clear()
        cache.step(*samples(N))
        assert (calls.count("image"), calls.count("text")) == expected


def test_a_graph_that_is_measured_is_gone_at_once() -> None:
    """One of its operations saves its own result."""
    held = []

    class Tower(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x).exp()
            if torch.is_grad_enabled():
                held.append(weakref.ref(y))
            return y * y

    cache = GradCache([Tower(3, 2), nn.Linear(3, 2)], lambda u, v: (u @ v.T).sum(), chunks=2, keep_bytes=1)
    cache.encode(torch.randn(6, 3), torch.randn(6, 3))
    assert [y() for y in held] == [None] * 3


@pytest.mark.parametrize("full", [0, 2])
def test_a_graph_that_does_not_fit_ends_the_keeping_and_not_the_step(
    full: int, caplog: pytest.LogCaptureFixture
) -> None:
    """With dropout, this step and all that follow are the same bit for bit. One line says it."""

    class Full(nn.Module):
        """Has memory for the graphs of its first `full` calls."""

        def __init__(self, tower: nn.Module) -> None:
            super().__init__()
            self.tower = tower
            self.graphs = 0

        def forward(self, x: Tensor) -> Tensor:
            out = self.tower(x)
            if replaying or not torch.is_grad_enabled():
                return out
            self.graphs += 1
            if self.graphs <= full:
                return out
            raise torch.OutOfMemoryError("CUDA out of memory")

    gradients = []
    for keep in (0, math.inf):
        replaying = keep == 0
        model = small_model(dropout=0.4, patch_dropout=0.4)
        cache = cached(model, keep, image=Full(model.image))
        torch.manual_seed(5)
        for _ in range(2):
            u, v = cache.encode(*samples(N))
            cache.backward(cache.loss(u, v))
            replaying = True
            cache.replay()
            replaying = keep == 0
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert cache.num_kept_graphs == [0, 0], "no tower takes the room of another's graphs"
    assert sum("cache.keep: out of memory" in message for message in caplog.messages) == 1


class Watched(nn.Linear):
    """Notes what its passes made, and fails in one of them."""

    def __init__(self, fails_at: int) -> None:
        super().__init__(3, 2)
        self.made: list[weakref.ref[Tensor]] = []
        self.fails_at = fails_at

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.made += [weakref.ref(x), weakref.ref(y)]
        if len(self.made) == 2 * self.fails_at:
            raise ZeroDivisionError
        return y


@pytest.mark.parametrize("fails_at", [2, 4, 5], ids=["first pass", "the other tower's first pass", "second pass"])
def test_a_step_that_fails_leaves_nothing_in_memory(fails_at: int) -> None:
    """One encoder serves both towers, with two chunks each. If there is a second pass, no graphs are kept."""
    encoder = Watched(fails_at)
    loss = lambda u, v: (u @ v.T).square().sum()  # noqa: E731
    cache = GradCache([encoder] * 2, loss, chunks=2, keep_bytes=math.inf if fails_at < 5 else 0)
    batches = [torch.randn(4, 3), torch.randn(4, 3)]
    held = [weakref.ref(batch) for batch in batches]
    with suppress(ZeroDivisionError):
        cache.step(*batches)
    del batches
    assert [ref() for ref in held + encoder.made] == [None] * (2 + len(encoder.made))
    assert all(len(tower.representations) == 0 for tower in cache.towers)


KEEP, MEASURE, DISCARD, NO_GRAPH = GraphPolicy
CHECK_FIRST, RETRY, RAISE = ShortMemoryPolicy


@pytest.mark.parametrize(
    ("num_kept", "num_planned", "memory_policy", "is_measuring", "policies"),
    [
        (2, 2, RETRY, False, [KEEP, KEEP, NO_GRAPH]),
        (0, 0, RAISE, True, [MEASURE, MEASURE, MEASURE]),
        (1, 2, CHECK_FIRST, False, [KEEP, DISCARD, NO_GRAPH]),
        (1, 2, RETRY, False, [KEEP, NO_GRAPH, NO_GRAPH]),
    ],
    ids=["two fit", "first step", "one does not fit, and other ranks build it", "one does not fit"],
)
def test_the_policy_of_each_chunks_graph(
    num_kept: int, num_planned: int, memory_policy: ShortMemoryPolicy, is_measuring: bool, policies: list[GraphPolicy]
) -> None:
    plan = {"num_kept": num_kept, "num_planned": num_planned, "is_measuring": is_measuring}
    graphs = KeptGraphs(**plan, memory_policy=memory_policy)
    assert [graphs.planned_policy(i) for i in range(3)] == policies


@pytest.mark.parametrize(
    ("memory", "graph_bytes", "earlier", "fitting"),
    [
        (100, 10, [], 10),
        (100, 10, [(3, 20)], 4),
        (100, 10, [(0, 20)], 8),
        (100, 10, [(0, 0)], 10),
        (100, 10, [(1, 101)], 0),
        (100, 0, [], 0),
        (math.inf, 0, [(3, 20)], 20),
    ],
    ids=[
        "one tower",
        "an earlier tower takes its own",
        "the replay of an earlier tower that keeps none builds one graph",
        "a frozen tower takes none",
        "nothing is left",
        "not measured yet",
        "all",
    ],
)
def test_the_graphs_that_fit(memory: float, graph_bytes: int, earlier: list[tuple[int, int]], fitting: int) -> None:
    assert num_that_fit(memory, 20, graph_bytes, earlier) == fitting


def test_a_plan_leaves_out_reserved_memory_and_measures_no_tower_without_a_second_pass() -> None:
    budget = GraphBudget(100)
    last = KeptGraphs(chunk_rows=8, graph_bytes=10)
    assert budget.plan(last, [], 8, 20, RETRY, on_gpu=False, reserved_bytes=35).num_planned == 6
    for num_keepable, measures in (0, False), (4, True):
        assert budget.plan(last, [], 9, num_keepable, RETRY, on_gpu=False).is_measuring is measures


@pytest.mark.parametrize(("sizes", "agreed"), [([9], 9), ([9, 5], 9), ([9, 5, 6], 6), ([9, 7, 6], 7)])
def test_the_first_of_three_graphs_does_not_count_and_that_of_two_does(sizes: list[int], agreed: int) -> None:
    """The first graph also holds what later ones reuse. But the second of two chunks may be shorter."""
    graphs = KeptGraphs(is_measuring=True, measured_bytes=sizes)
    graphs.agree_on_size(torch.device("cpu"))
    assert graphs.graph_bytes == agreed
