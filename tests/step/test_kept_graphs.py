"""Kept graphs: as many as fit are checkpointed, what memory is left makes them whole, and the gradient stays that of one graph."""

import copy
import math
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from clipscale.config.sections import ModelConfig
from clipscale.distributed.world import World
from clipscale.loss.api import contrastive_loss
from clipscale.loss.reference import dense_contrastive_loss
from clipscale.models.towers import ClipModel, build_model
from clipscale.step.grad_cache import GradCache
from clipscale.step.kept_graphs import (
    CHECKPOINTED,
    WHOLE,
    ActivationBudget,
    KeptGraphs,
    checkpointing_switch,
    graph_bytes,
)
from clipscale.step.pass_contexts import unchanged_buffers
from clipscale.step.precision import MasterWeights
from tests.support.ranks import run_ranks

N, CHUNK = 12, 2


def switch(on: bool) -> None:
    pass


def test_one_process_without_a_group_keeps_the_graphs_of_towers_with_synchronised_statistics() -> None:
    towers = [nn.Sequential(nn.Linear(4, 3), nn.SyncBatchNorm(3).eval()) for _ in range(2)]
    cache = GradCache(towers, lambda u, v: contrastive_loss(u, v, 3.0), chunks=CHUNK, keep_bytes=10**6)
    for _ in range(2):
        cache.step(torch.randn(N, 4), torch.randn(N, 4))
    assert [len(tower.graphs.kinds) for tower in cache.towers] == [N // CHUNK] * 2


@pytest.mark.parametrize(
    ("budget", "wanted"),
    [
        (0, ""),
        (99, ""),
        (100, "c"),
        (599, "ccccc"),
        (600, "cccccc"),
        (600 + 899, "cccccc"),
        (600 + 900, "wccccc"),
        (600 + 3 * 900, "wwwccc"),
        (6000, "wwwwww"),
        (math.inf, "wwwwww"),
    ],
)
def test_checkpointed_graphs_come_first_and_what_is_left_makes_them_whole(budget: float, wanted: str) -> None:
    """Six chunks whose whole graphs take 1000 bytes and whose checkpointed ones take 100."""

    def planned(**changed: Any) -> str:
        costs = {WHOLE: 1000, CHECKPOINTED: 100}
        graphs = KeptGraphs(ActivationBudget(budget), **{"switch": switch, "costs": costs} | changed)
        kinds = graphs.planned(6)
        assert graphs.budget.used <= budget
        return "".join(kind[0] for kind in kinds)

    assert planned() == wanted
    assert planned(switch=None) == "w" * min(6, int(min(budget, 6000) // 1000)), "whole ones alone"
    assert planned(later=10_000).count("w") == (6 if budget == math.inf else 0), (
        "another tower's come before whole ones"
    )
    assert set(planned(costs={WHOLE: 1000, CHECKPOINTED: 400})) <= {"w"}, "they would save too little for their bytes"


def test_the_first_step_measures_both_kinds() -> None:
    graphs = KeptGraphs(ActivationBudget(math.inf), switch)
    assert [graphs.kind(0, 3), graphs.kind(1, 3)] == [CHECKPOINTED, None], "without gaps"
    graphs.outputs = [torch.empty(0)] * 2
    assert graphs.kind(2, 3) == WHOLE
    graphs.outputs = []
    assert graphs.kind(0, 1) == WHOLE, "a single chunk"
    graphs.costs[WHOLE] = 1000
    assert graphs.kind(0, 1) == WHOLE, "which need not know the other kind"


def towers(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> ClipModel:
    architecture = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 12, "layers": 2, "width": 32, "head_width": 16, "patch_size": 3},
        "text_cfg": {"context_length": 20, "vocab_size": 50, "width": 32, "heads": 2, "layers": 2},
    }
    torch.manual_seed(0)
    model = build_model(ModelConfig(name="small", architecture=architecture, patch_dropout=dropout, init_scale=5.0)).to(
        dtype
    )
    for block in (*model.image.encoder.transformer.resblocks, *model.text.encoder.transformer.resblocks):
        block.ls_1 = block.ls_2 = nn.Dropout(dropout)
    return model


def inputs() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (N, 3, 12, 12), dtype=torch.uint8, generator=g), torch.randint(
        1, 50, (N, 20), generator=g
    )


def cached(model: ClipModel, keep: float = 0, chunk: int = CHUNK, **more: Any) -> GradCache:
    encoders = [model.image, model.text]
    return GradCache(
        encoders,
        lambda u, v: contrastive_loss(u, v, model.logit_scale.exp()),
        chunks=chunk,
        keep_bytes=keep,
        checkpointing=[checkpointing_switch(tower, ModelConfig()) for tower in encoders],
        **more,
    )


def whole_bytes(model: ClipModel) -> int:
    """Of a whole graph of each tower."""
    total = 0
    for tower, rows in zip((model.image, model.text), inputs()):
        with graph_bytes() as size:
            tower(rows[:CHUNK])
        total += size()
    return total


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_the_gradient_is_that_of_one_graph_and_the_memory_is_used(dropout: float) -> None:
    """Steps of one run: whole graphs follow once all chunks are checkpointed. Dropout draws the same numbers again."""
    wanted, found = towers(dropout), towers(dropout)
    torch.manual_seed(5)
    features = [
        torch.cat([tower(rows) for rows in x.split(CHUNK)]) for tower, x in zip((wanted.image, wanted.text), inputs())
    ]
    dense_contrastive_loss(*features, wanted.logit_scale.exp()).backward()
    after = torch.rand(3)
    cache, one = cached(found), whole_bytes(found)
    seen = set()
    for keep in (0.3, 0.5, 1.0, 2.0, 4.0, 9.0):
        found.zero_grad()
        cache.budget.bytes = keep * one
        torch.manual_seed(5)
        cache.step(*inputs())
        assert torch.equal(torch.rand(3), after), "the next step's random numbers"
        assert 0 < cache.budget.used <= cache.budget.bytes
        seen.add(tuple("".join(kind[0] for kind in tower.graphs.kinds) for tower in cache.towers))
        for (name, p), q in zip(found.named_parameters(), wanted.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            assert (p.grad - q.grad).norm() <= 1e-12 * q.grad.norm().clamp_min(1e-30), f"{name} with {keep} graphs"
    assert ("wwwwww", "wwwwww") in seen and any("w" in kinds and "c" in kinds for pair in seen for kinds in pair), seen


def test_a_checkpointed_graph_spares_the_end_of_every_block() -> None:
    """Two forward passes of a replayed chunk, one with a whole graph; a checkpointed one leaves out the MLP's second product."""
    calls: Counter[str] = Counter()
    for kind, first, second in ((None, 2, 2), (CHECKPOINTED, 2, 1), (WHOLE, 1, 1)):
        model = towers()
        cache = cached(model, math.inf)
        cache.step(*inputs())
        cache.budget.bytes = {None: 0, CHECKPOINTED: sum(tower.least for tower in cache.towers), WHOLE: math.inf}[kind]
        calls.clear()
        for block in model.image.encoder.transformer.resblocks:
            block.mlp.c_fc.register_forward_hook(lambda *_: calls.update(["first"]))
            block.mlp.c_proj.register_forward_hook(lambda *_: calls.update(["second"]))
        cache.step(*inputs())
        blocks = 2 * N // CHUNK
        assert set(cache.towers[0].graphs.kinds) == {kind} - {None}
        assert (calls["first"], calls["second"]) == (first * blocks, second * blocks), f"{kind}: {calls}"


def test_in_bf16_both_kinds_give_the_replayed_gradient_bit_for_bit() -> None:
    grads = []
    for kind in (None, CHECKPOINTED, WHOLE):
        model = towers(0.4, torch.float32)
        cache = cached(model, chunk=N, autocast=lambda: torch.autocast("cpu", dtype=torch.bfloat16))
        for tower in cache.towers if kind else ():
            tower.graphs.costs = {WHOLE: 10**9 if kind == CHECKPOINTED else 1, CHECKPOINTED: 1}
        cache.budget.bytes = 10**8 if kind else 0
        torch.manual_seed(5)
        cache.step(*inputs())
        assert [tower.graphs.kinds for tower in cache.towers] == [[kind] if kind else []] * 2
        grads.append([p.grad for p in model.parameters()])
    for replayed, *kept in zip(*grads, strict=True):
        assert all(torch.equal(g, replayed) for g in kept)


def test_gradients_of_kept_graphs_are_summed_in_float32_beside_masters() -> None:
    """As those of replayed chunks: one backward pass of all graphs would sum them in bf16."""
    found = []
    for keep in (0, math.inf):
        model = towers(dtype=torch.float32)
        matrices = {name: p for name, p in model.named_parameters() if p.ndim >= 2}
        masters = MasterWeights(matrices)
        for p in matrices.values():
            p.data = p.data.bfloat16()
        cache = cached(model, keep, 1, autocast=lambda: torch.autocast("cpu", dtype=torch.bfloat16))
        cache.step(*inputs())
        assert len(cache.towers[0].graphs.kinds) == (N if keep else 0)
        found.append([master.grad for master in masters.copies.values()])
    for replayed, kept in zip(*found, strict=True):
        assert replayed is not None and kept is not None and torch.equal(replayed, kept)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_agree_on_kept_graphs_and_sum_every_gradient_once(parallel: str) -> None:
    """From the first step on, in which a whole graph is measured that does not fit; and where ranks have different memory."""
    for kept in run_ranks(_on_ranks, 2, parallel, timeout_s=60):
        assert kept == [{CHECKPOINTED}, {CHECKPOINTED}, {WHOLE, CHECKPOINTED}, {WHOLE}]


def _on_ranks(rank: int, ranks: int, parallel: str) -> list[set[str]]:
    world, chunk = World(rank, ranks, torch.device("cpu")), 2

    def wrapped() -> tuple[ClipModel, GradCache]:
        model = towers()
        parts = [world.wrap(tower, parallel) for tower in (model.image, model.text)]
        switches = [checkpointing_switch(tower, ModelConfig()) for tower in (model.image, model.text)]
        return model, GradCache(
            parts,
            lambda u, v: contrastive_loss(u, v, model.logit_scale.exp().detach()),
            chunks=chunk,
            checkpointing=switches,
            highest=world.highest,
        )

    def gradients(model: ClipModel, cache: GradCache) -> list[Tensor]:
        model.zero_grad()
        half = slice(rank * N // 2, (rank + 1) * N // 2)
        cache.step(*(rows[half] for rows in inputs()))
        found = [p.grad for part in (model.image, model.text) for p in part.parameters() if p.grad is not None]
        return [g.full_tensor() if isinstance(g, DTensor) else g.clone() for g in found]

    wanted, kinds = gradients(*wrapped()), []
    model, cache = wrapped()
    one = whole_bytes(towers())
    for step, keep in enumerate((0.5, 0.5, 2.0, 20.0)):
        cache.budget.bytes = (keep + (rank if step == 2 else 0)) * one
        if step == 0 and parallel == "fsdp":
            gradients(model, cache)  # all ranks measure first, and keep nothing
            cache.budget.bytes = keep * one
        found = gradients(model, cache)
        for g, w in zip(found, wanted, strict=True):
            assert (g - w).norm() <= 1e-12 * w.norm().clamp_min(1e-30), f"step {step}"
        kinds.append({kind for tower in cache.towers for kind in tower.graphs.kinds})
    return kinds


def test_memory_that_ends_where_ranks_must_keep_the_same_graphs_ends_the_step() -> None:
    graphs = KeptGraphs(ActivationBudget(math.inf), equal=True)

    def runs_out() -> Tensor:
        raise torch.OutOfMemoryError("no more")

    with pytest.raises(torch.OutOfMemoryError, match="no more") as caught:
        graphs.run(WHOLE, runs_out)
    assert "cache.keep" in caught.value.__notes__[0]


def test_graphs_that_all_ranks_keep_are_measured_by_a_full_chunk_and_anew_for_another_batch() -> None:
    graphs = KeptGraphs(ActivationBudget(500), switch, equal=True)
    kinds = [graphs.kind(i, 4) for i in range(4)]
    assert kinds == [CHECKPOINTED, WHOLE, None, None], "the last chunk may be a remainder"
    assert [graphs.kind(i, 2) for i in range(2)] == [WHOLE, None]
    graphs.budget.bytes = math.inf
    assert graphs.kind(3, 4) is None, "no graph without those before it, as after a step is resumed"
    graphs.costs.update({WHOLE: 100, CHECKPOINTED: 90})
    graphs.rough = {CHECKPOINTED}
    assert not graphs.too_large(90, 100), "a first chunk's bytes decide nothing"
    graphs.rough.clear()
    assert graphs.too_large(90, 100)
    graphs.forget()
    assert set(graphs.costs.values()) == {0}


def test_a_first_chunks_bytes_give_way_to_a_later_ones() -> None:
    """Those of the first include what a pass sets aside once."""
    graphs = KeptGraphs(ActivationBudget(math.inf))
    graphs.learn(WHOLE, 500)
    assert graphs.costs[WHOLE] == 500, "nothing else is known yet"
    graphs.outputs = [torch.empty(0)]
    graphs.learn(WHOLE, 100)
    assert graphs.costs[WHOLE] == 100
    graphs.learn(WHOLE, 120)
    graphs.learn(WHOLE, 110)
    graphs.outputs = []
    graphs.learn(WHOLE, 500)
    assert graphs.costs[WHOLE] == 120


def test_which_towers_can_be_checkpointed() -> None:
    tower = towers().image
    found = checkpointing_switch(tower, ModelConfig())
    assert found is not None
    found(True)
    assert tower.encoder.transformer.grad_checkpointing
    found(False)
    assert not tower.encoder.transformer.grad_checkpointing
    for config in (ModelConfig(grad_checkpointing=True), ModelConfig(compile=True)):
        assert checkpointing_switch(tower, config) is None
    assert checkpointing_switch(nn.Linear(2, 2), ModelConfig()) is None


def test_memory_that_ends_within_a_checkpointed_graph_leaves_checkpointing_off() -> None:
    model = towers()
    cache = cached(model, math.inf)

    def runs_out(*_: Any) -> None:
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError("no more")

    handle = model.image.encoder.ln_pre.register_forward_hook(runs_out)
    cache.encode(*inputs())
    handle.remove()
    assert cache.budget.limit == 0 and not model.image.encoder.transformer.grad_checkpointing
    wanted = copy.deepcopy(model)
    cache.step(*inputs())
    cached(wanted).step(*inputs())
    for p, q in zip(model.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-14)


def test_a_graph_that_is_measured_and_does_not_fit_is_gone_at_once() -> None:
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
    assert [y() for y in held] == [None], "one graph was measured"


def test_buffers_are_restored_only_where_something_changed_them() -> None:
    """Else a graph of another tower that holds the same buffer could not run its backward pass."""
    norm = nn.BatchNorm1d(3)
    tower = nn.Sequential(norm)
    tower.register_buffer("mask", torch.ones(3))
    tower.register_buffer("calls", torch.zeros(()))
    with unchanged_buffers(tower):
        tower(torch.randn(4, 3))
        tower.calls += 1
    assert norm.num_batches_tracked == tower.calls == 0 and torch.equal(norm.running_mean, torch.zeros(3))
    assert tower.mask._version == 0
