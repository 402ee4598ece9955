"""What a step under FSDP2 and DDP sends over ranks, and what FSDP2 holds within it, by stage and type."""

import math
from itertools import count
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from clipscale.distributed.fsdp import fsdp_modules, reshard
from clipscale.distributed.parallel import wrap
from clipscale.distributed.weight_types import PER_PARAMETER
from clipscale.distributed.world import World
from clipscale.loss.api import contrastive_loss
from clipscale.step.cache import kept_graphs
from clipscale.step.cache.grad_cache import GradCache
from clipscale.step.cache.kept_graphs import GraphBudget
from tests.step.cache.encoders import batch, models
from tests.support.gradients import assert_same, gradients
from tests.support.ranks import run_ranks
from tests.support.towers import samples, small_model

CPU = torch.device("cpu")
GATHER = "all-gathers"
SUM = "reduce-scatters"
CHUNKS = 3
LAYERS = 2
# Both towers' blocks, and what is outside of them.
GROUPS = 2 * (LAYERS + 1)
CASES = [
    *({"stage": stage} for stage in (0, 2, 3)),
    {"stage": 2, "half": True, "steps": 2},
    {"stage": 3, "half": True},
]


class Collectives(TorchDispatchMode):
    """Counts the calls of FSDP2's collectives, and the bytes that this rank puts in."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = {GATHER: 0, SUM: 0}
        self.bytes = {GATHER: 0, SUM: 0}
        self.reductions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called = func._schema.name.split("::")[1]
        self.reductions += "reduce" in called
        name = {"_allgather_base_": GATHER, "_reduce_scatter_base_": SUM}.get(called)
        if name:
            self.calls[name] += 1
            self.bytes[name] += args[1].nbytes
        return func(*args, **(kwargs or {}))


def held(tower: nn.Module) -> tuple[int, int]:
    """Bytes of whole weights and of their gradients. FSDP2 keeps the latter aside while a weight is in shards."""
    weights = sum(p.nbytes for p in tower.parameters() if not isinstance(p, DTensor))
    states = [vars(part._get_fsdp_state()) for part in fsdp_modules(tower)]
    several = [x.get("_fsdp_param_groups") or [x["_fsdp_param_group"]] for x in states]  # torch 2.11: one a module
    groups = [group for each in several for group in each]
    whole = [getattr(param, "_unsharded_param", None) for group in groups for param in group.fsdp_params]
    return weights, sum(p.grad.nbytes for p in whole if p is not None and p.grad is not None)


def step(rank: int, ranks: int, stage: int, half: bool = False, steps: int = 1) -> dict:
    """The last step of one rank, over chunks of two samples for each tower, with ShardedTower's `stage`.

    Stage 0: FSDP2 as it is by itself, summing gradients with the last chunk alone.
    """
    model = small_model(LAYERS)
    world = World(rank, ranks, CPU)

    def autocast() -> torch.autocast:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=half)

    inputs = samples(2 * CHUNKS, seed=1 + rank)
    both = (model.image, model.text)
    with torch.no_grad(), autocast():  # one after the other, without FSDP2
        alone = [torch.cat([tower(part) for part in x.split(2)]) for tower, x in zip(both, inputs)]
    towers = [wrap(world, tower, f"zero{stage or 3}", torch.bfloat16 if half else torch.float32) for tower in both]
    if not stage:
        towers = [tower.get_submodule("module") for tower in towers]
    cache = GradCache(towers, lambda u, v: contrastive_loss(u, v, model.logit_scale.exp()), chunks=2, autocast=autocast)
    now = []
    for _ in range(steps):
        model.zero_grad()
        now.clear()
        counted = Collectives()
        with counted:
            features = cache.encode(*inputs)
        cache.backward(cache.loss(*features))
        with counted:
            cache.replay(lambda: now.append([held(tower) for tower in towers]))
    assert not any(held(tower)[0] for tower in towers), "no weights are whole between steps"
    summed = gradients(model)
    reshard(model)
    return {
        **counted.calls,
        "bytes": counted.bytes[GATHER],
        "held": tuple(map(max, zip(*(both[(i - 1) // CHUNKS] for i, both in enumerate(now) if i)))),
        "same features": all(torch.equal(*pair) for pair in zip(features, alone)),
        "gradients": summed,
    }


def measured(rank: int, ranks: int) -> list[dict]:
    return [step(rank, ranks, **case) for case in CASES]


@pytest.fixture(scope="module")
def cases() -> list[dict]:
    """The first rank's results of all cases."""
    return run_ranks(measured, 2)[0]


def test_weights_are_gathered_once_in_a_step_or_for_each_chunk(cases: list[dict]) -> None:
    """FSDP2 by itself gathers three times for each chunk. docs/step.md has the formulas' numbers of larger towers."""
    before, second, third, *_ = cases
    assert (before[GATHER], before[SUM]) == (3 * 2 * LAYERS * CHUNKS + 2 * CHUNKS, GROUPS)
    assert (second[GATHER], second[SUM]) == (GROUPS, CHUNKS * GROUPS)
    assert second["bytes"] < before["bytes"] / (2 * CHUNKS)
    assert third[GATHER] == before[GATHER]


def test_each_stage_holds_what_it_says(cases: list[dict]) -> None:
    model = small_model(LAYERS)
    largest = max(sum(p.nbytes for p in tower.parameters()) for tower in (model.image, model.text))
    assert [case["held"] for case in cases[:3]] == [(0, largest), (largest, 0), (0, 0)]


def test_bf16_weights_are_gathered_in_bf16_with_the_features_and_gradients_of_autocast(
    cases: list[dict],
) -> None:
    """Bit-equal features, since autocast rounds the same weights; gradients to the rounding of bf16."""
    _, single, whole, second, third = cases
    for plain, now in ((single, second), (whole, third)):
        assert now["same features"]
        assert now["bytes"] < (0.6 if PER_PARAMETER else 1.01) * plain["bytes"]  # whole modules in torch 2.11
        assert all(g.dtype == torch.float32 for g in now["gradients"].values())
    assert_same(third["gradients"], second["gradients"], 1e-5)


class Tied(nn.Module):
    """An embedding that is also the last layer's weight, as in captioners."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 16)
        self.scores = nn.Linear(16, 30)
        self.scores.weight = self.words.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.words(tokens), self.scores(self.words(tokens))


def unlike(rank: int, ranks: int) -> list[float]:
    """The largest differences of sharded towers' outputs.

    The towers are a ConvNeXt, which repeats its stages and the blocks in them, and tied weights under autocast, which
    rounds one use of them.
    """
    torch.manual_seed(0)
    convnext = timm.create_model("convnext_atto", num_classes=4, dims=(8, 8, 8, 8), depths=(1, 1, 2, 2)).eval()
    x = torch.randn(2, 3, 64, 64)
    tokens = torch.arange(6)
    world = World(rank, ranks, CPU)
    tied = Tied()
    expected = convnext(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = tied(tokens)
        words, scores = wrap(world, tied, "zero3", torch.bfloat16)(tokens)
    out = wrap(world, convnext, "zero3", torch.float32)(x)
    out.sum().backward()
    (words.sum() + scores.sum()).backward()
    return [float((a - b).abs().max()) for a, b in zip((out, words, scores), (expected, *plain))]


def test_repeated_blocks_inside_repeated_blocks_are_sharded_and_tied_weights_keep_their_type() -> None:
    for convnext, words, scores in run_ranks(unlike, 2):
        assert convnext < 1e-6 and (words, scores) == (0, 0)


def own_tower_twice(rank: int, ranks: int) -> list[bool]:
    """Whether open_clip's own text tower gives the same features as alone, in each of two passes of a step."""
    tower = small_model(lean=False).text
    tokens = samples(4)[1]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        alone = tower(tokens)
        sharded = wrap(World(rank, ranks, CPU), tower, "zero2", torch.bfloat16)
        return [torch.equal(sharded(tokens), alone) for _ in range(2)]


def test_a_text_tower_of_open_clips_own_casts_alike_before_and_after_its_weights_are_gathered() -> None:
    assert run_ranks(own_tower_twice, 2) == 2 * [[True, True]]


# Of the bytes for kept graphs, in three steps: one reduction for each tower, and one when its graphs are measured.
REDUCED = {keep: [2 + 2 * (keep > 0), 2, 2] for keep in (0, 3000)}


def reductions(rank: int, ranks: int) -> tuple[list[list[int]], int]:
    """How often each of three steps reduces something over ranks, and the graphs kept if other ranks' are larger."""
    world = World(rank, ranks, CPU)
    counts = []
    for keep in REDUCED:
        m = models()
        towers = [wrap(world, m[name], "ddp", torch.float32) for name in ("image", "text")]
        cache = GradCache(towers, m["head"], chunks=[2, 5], keep_bytes=keep)
        steps = []
        for _ in range(3):
            with Collectives() as counted:
                cache.step(*batch(6))
            steps.append(counted.reductions)
        counts.append(steps)
    weight = torch.ones(4, 10 * (1 + rank), requires_grad=True)  # (2, 10 or 20) float32 a chunk are saved
    uneven = GradCache([lambda x: (x @ weight).exp()], Tensor.sum, chunks=2, keep_bytes=1000)
    for _ in range(2):
        uneven.step(torch.zeros(20, 4))
    return counts, uneven.num_kept_graphs[0]


def test_gradients_are_reduced_once_for_each_tower_and_ranks_keep_the_same_graphs() -> None:
    (counts, kept), (others, kept_there) = run_ranks(reductions, 2)
    assert counts == others == [*REDUCED.values()]
    assert 0 < kept == kept_there < 10, "as many as fit on the rank whose graphs are largest"


def crowded(rank: int, ranks: int, stages: str, full: bool) -> tuple[dict[str, Tensor], list[int]]:
    """Gradients of two steps, and the graphs kept in each. `full`: the second rank's GPU has no room for a second."""
    plan = GraphBudget.plan
    calls = count()
    on_gpu = lambda self, *args, **given: plan(self, *args, **{**given, "on_gpu": True})  # noqa: E731
    GraphBudget.plan = on_gpu
    kept_graphs.free_gpu_memory = lambda: -1 if full and rank and next(calls) == 1 else 1
    model = small_model(LAYERS, dropout=0.4)
    world = World(rank, ranks, CPU)
    pairs = zip((model.image, model.text), stages.split())
    towers = [wrap(world, tower, stage, torch.float32) for tower, stage in pairs]
    cache = GradCache(towers, lambda u, v: contrastive_loss(u, v, 5.0), chunks=2, keep_bytes=math.inf)
    kept = []
    for _ in range(2):
        cache.step(*samples(2 * CHUNKS, seed=1 + rank))
        kept += cache.num_kept_graphs
    return gradients(model), kept


def roomy_and_crowded(rank: int, ranks: int, stages: str) -> list[tuple[dict[str, Tensor], list[int]]]:
    return [crowded(rank, ranks, stages, full) for full in (False, True)]


@pytest.mark.parametrize(
    ("stages", "left"), [("zero2 zero3", 0), pytest.param("ddp ddp", CHUNKS, marks=pytest.mark.slow)]
)
def test_a_graph_that_does_not_fit_on_one_rank_is_kept_on_none(stages: str, left: int) -> None:
    """With dropout, this step and the next stay the same bit for bit.

    DDP tries the graph whatever the GPU says, because its first pass with a graph is a collective.
    """
    for (plain, kept), (dropped, few) in run_ranks(roomy_and_crowded, 2, stages):
        assert kept == 4 * [CHUNKS] and few == 4 * [left]
        assert all(torch.equal(plain[name], dropped[name]) for name in plain)
