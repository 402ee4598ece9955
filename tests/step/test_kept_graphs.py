"""Kept graphs: as many chunks as fit skip their second pass, on all ranks the same, and the gradient stays that of one
graph.
"""

import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from clipscale.common.phases import Phases
from clipscale.config.sections import ModelConfig
from clipscale.distributed.world import World
from clipscale.loss.api import contrastive_loss
from clipscale.loss.reference import dense_contrastive_loss
from clipscale.models.towers import ClipModel, build_model
from clipscale.step import kept_graphs
from clipscale.step.grad_cache import GradCache
from clipscale.step.kept_graphs import KeepBudget, KeptGraphs, graph_bytes
from tests.support.ranks import run_ranks

N, CHUNK = 12, 2


def towers(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> ClipModel:
    architecture = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 12, "layers": 2, "width": 32, "head_width": 16, "patch_size": 3},
        "text_cfg": {"context_length": 20, "vocab_size": 50, "width": 32, "heads": 2, "layers": 2},
    }
    torch.manual_seed(0)
    config = ModelConfig(name="small", architecture=architecture, patch_dropout=dropout, init_scale=5.0)
    model = build_model(config).to(dtype)
    for block in (*model.image.encoder.transformer.resblocks, *model.text.encoder.transformer.resblocks):
        block.ls_1 = block.ls_2 = nn.Dropout(dropout)
    return model


def inputs() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (N, 3, 12, 12), dtype=torch.uint8, generator=g)
    return pixels, torch.randint(1, 50, (N, 20), generator=g)


def cached(model: ClipModel, keep: float = 0, chunk: int = CHUNK, **more: Any) -> GradCache:
    loss = lambda u, v: contrastive_loss(u, v, model.logit_scale.exp())  # noqa: E731
    return GradCache([model.image, model.text], loss, chunks=chunk, keep_bytes=keep, **more)


def graphs_of(model: ClipModel) -> list[int]:
    """Bytes of a graph of each tower."""
    sizes = []
    for tower, rows in zip((model.image, model.text), inputs()):
        with graph_bytes() as size:
            tower(rows[:CHUNK])
        sizes.append(size())
    return sizes


@pytest.mark.parametrize(("budget", "count"), [(0, 0), (99, 0), (100, 1), (599, 5), (600, 6), (6000, 6), (math.inf, 6)])
def test_as_many_graphs_are_kept_as_fit(budget: float, count: int) -> None:
    graphs = KeptGraphs(bytes_each=100)
    graphs._rows = 12
    graphs.begin(12, 6, budget)
    assert graphs.count == count
    graphs.begin(12, 0, budget)
    assert graphs.count == 0, "a frozen tower"


def test_the_first_step_at_a_batch_size_measures_a_full_chunk_and_keeps_none() -> None:
    """Also where the last chunk is a remainder, and the first one sets aside what stays."""
    model = towers()
    size = graphs_of(model)[0]
    cache = cached(model, 2.5 * size)
    pixels, tokens = inputs()
    cache.step(pixels[:11], tokens[:11])
    assert [tower.graphs.count for tower in cache.towers] == [0, 0]
    assert cache.towers[0].graphs.bytes_each == size
    cache.step(pixels[:11], tokens[:11])
    assert cache.towers[0].graphs.count == 2
    cache.step(pixels[:1], tokens[:1])
    assert cache.towers[0].graphs.count == 0 and cache.towers[0].graphs.bytes_each < size, (
        "another batch, measured anew"
    )


def test_kept_chunks_have_no_second_pass() -> None:
    model, calls = towers(), []
    image, text = graphs_of(model)
    model.image.register_forward_hook(lambda *_: calls.append("image"))
    model.text.register_forward_hook(lambda *_: calls.append("text"))
    for keep, wanted in ((0, (12, 12)), (4.5 * image, (8, 12)), (6 * image + 3.5 * text, (6, 9)), (math.inf, (6, 6))):
        cache = cached(model, keep)
        cache.step(*inputs())
        calls.clear()
        cache.step(*inputs())
        assert (calls.count("image"), calls.count("text")) == wanted


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_the_gradient_is_that_of_one_graph(dropout: float) -> None:
    """Whatever is kept. Dropout draws the same numbers again."""
    wanted, found = towers(dropout), towers(dropout)
    torch.manual_seed(5)
    features = [
        torch.cat([tower(rows) for rows in x.split(CHUNK)]) for tower, x in zip((wanted.image, wanted.text), inputs())
    ]
    dense_contrastive_loss(*features, wanted.logit_scale.exp()).backward()
    after = torch.rand(3)
    cache, size = cached(found), sum(graphs_of(found))
    for keep in (0.3, 1.0, 4.0, 9.0, math.inf):
        found.zero_grad()
        cache.keep_bytes = keep * size
        torch.manual_seed(5)
        cache.step(*inputs())
        assert torch.equal(torch.rand(3), after), "the next step's random numbers"
        for (name, p), q in zip(found.named_parameters(), wanted.parameters(), strict=True):
            assert (p.grad - q.grad).norm() <= 1e-12 * q.grad.norm().clamp_min(1e-30), f"{name} with {keep} graphs"
    assert [tower.graphs.count for tower in cache.towers] == [N // CHUNK] * 2


def test_in_bf16_kept_graphs_give_the_replayed_gradient_bit_for_bit() -> None:
    """One backward pass each: one for all would sum them otherwise."""
    gradients = []
    for keep in (0, math.inf):
        model = towers(0.4, torch.float32)
        torch.manual_seed(5)
        cached(model, keep, autocast=lambda: torch.autocast("cpu", dtype=torch.bfloat16)).step(*inputs())
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_keep_the_same_graphs_and_sum_every_gradient_once(parallel: str) -> None:
    """In all steps, DDP's second among them, in which it rebuilds its buckets."""
    for counts in run_ranks(_on_ranks, 2, parallel, timeout_s=60):
        assert counts == [[0, 0], [2, 0], [3, 1], [3, 3]]


def _on_ranks(rank: int, ranks: int, parallel: str) -> list[list[int]]:
    world = World(rank, ranks, torch.device("cpu"))
    half = [rows[rank * N // 2 : (rank + 1) * N // 2] for rows in inputs()]

    def wrapped() -> tuple[ClipModel, GradCache]:
        model = towers()
        model.logit_scale.requires_grad_(False)
        cache = cached(model)
        for tower in cache.towers:
            tower.encoder = world.wrap(tower.encoder, parallel)
        return model, cache

    def gradients(model: ClipModel, cache: GradCache) -> list[Tensor]:
        model.zero_grad()
        cache.step(*half)
        found = [p.grad for p in model.parameters() if p.grad is not None]
        return [g.full_tensor() if isinstance(g, DTensor) else g.clone() for g in found]

    wanted, counts = gradients(*wrapped()), []
    model, cache = wrapped()
    image, text = graphs_of(towers())
    for keep in (1.0, 2.5 * image, 3 * image + 1.5 * text, math.inf):
        cache.keep_bytes = keep
        for g, w in zip(gradients(model, cache), wanted, strict=True):
            assert (g - w).norm() <= 1e-12 * w.norm().clamp_min(1e-30), f"{keep} bytes"
        counts.append([tower.graphs.count for tower in cache.towers])
    return counts


def test_a_graph_that_is_measured_is_gone_at_once() -> None:
    """Also one with an operation that saves its own result."""
    held: list[weakref.ref[Tensor]] = []

    class Tower(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x).exp()
            if torch.is_grad_enabled():
                held.append(weakref.ref(y))
            return y * y

    cache = GradCache([Tower(3, 2), nn.Linear(3, 2)], lambda u, v: (u @ v.T).sum(), chunks=2, keep_bytes=1)
    cache.encode(torch.randn(6, 3), torch.randn(6, 3))
    assert [y() for y in held] == [None] * 3


def test_auto_keeps_none_in_the_first_step_and_then_what_it_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the rank that has least; another batch size is measured anew."""
    monkeypatch.setattr(kept_graphs, "free_bytes", lambda device: 1000)
    monkeypatch.setattr(World, "highest", lambda self, *values: [max(-750, *values)])
    budget, phases = KeepBudget("auto", World(0, 1, torch.device("cuda"))), Phases(torch.device("cuda"))
    phases.before, phases.peak = {"encode": 60}, {"replay": 160}
    assert budget.of_step(8) == 0
    budget.after_step(phases)
    assert budget.of_step(8) == 750
    assert budget.of_step(16) == 0
    for setting, bytes in (("none", 0), ("2k", 2048)):
        assert KeepBudget(setting, World(0, 1, torch.device("cuda"))).of_step(8) == bytes
