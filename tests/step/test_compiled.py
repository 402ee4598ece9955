"""Whether and how towers are compiled: by the length of the run, block by block, and never at the cost of the run."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.nn.parallel import DistributedDataParallel

from clipscale.common.batch import ChunkSizes
from clipscale.step import compiled as compiled_module
from clipscale.step.cache.kept_graphs import measured_graph
from clipscale.step.compiled import (
    compile_towers,
    eager_for_new_shapes,
    innermost_blocks,
    should_compile,
    try_compiled,
)
from clipscale.step.precision import Precision
from tests.support.checkpoints import ONE_RANK
from tests.support.ranks import run_ranks
from tests.support.towers import small_model

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("setting", "seconds", "peak", "required"),
    [
        ("auto", 600, 1e15, False),
        ("auto", 1200, 1e15, True),
        ("auto", 1200, None, False),  # a CPU
        ("true", 1, None, True),
        ("false", 1e6, 1e15, False),
    ],
)
def test_auto_compiles_a_long_run_on_a_gpu(setting: str, seconds: float, peak: float | None, required: bool) -> None:
    assert should_compile(setting, seconds * 0.4e15, peak) is required


@pytest.mark.parametrize(
    ("fails_at", "lora"), [(2, 0), *(pytest.param(0, lora, marks=pytest.mark.slow) for lora in (0, 3))]
)
def test_a_compiler_that_fails_leaves_the_towers_as_they_were(fails_at: int, lora: int) -> None:
    """The compiler may fail at the shorter last chunk, of two samples.

    The test has a process of its own. Once torch has been forced to run eagerly, it holds a function's arguments until
    its end, and tests that follow and measure memory would fail.
    """
    if lora:
        pytest.importorskip("peft", reason="peft is not installed (clipscale[lora])")
    run_ranks(compiled, 1, fails_at, lora)


def compiled(rank: int, world_size: int, fails_at: int, lora: int) -> None:
    """Features and gradients equal the eager towers' either way, and random numbers go on from where they were. A
    graph takes as much memory as an eager one, which is what `clipscale plan` counts."""
    sizes = []

    def compiler(graph: Any, inputs: Any) -> Any:
        sizes.append(next(x.shape[0] for x in inputs if x.ndim == 3))
        if sizes[-1] == fails_at:
            raise RuntimeError("no compiler here")
        return lookup_backend("aot_eager_decomp_partition")(graph, inputs)

    torch.compile = partial(torch.compile, backend=compiler)
    model = small_model(lora=lora)
    pixels = torch.randint(0, 256, (3, 3, model.image_size, model.image_size), dtype=torch.uint8)
    with measured_graph() as eager:
        required = model.image(pixels).detach()
    state = torch.get_rng_state()
    towers = compile_towers(model, lengths_vary=False)
    problem = try_compiled(model, towers, ChunkSizes(3, 3, "cpu"), 5, Precision.set_up("fp32", CPU), ONE_RANK)
    if fails_at:
        assert problem is not None and "no compiler here" in problem
    else:
        assert problem is None
        assert sorted(sizes) == [2, 2, 2, 2, 3, 3, 3, 3], (
            "for each tower and size one graph without gradients, one with"
        )
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    with measured_graph() as now:
        torch.testing.assert_close(model.image(pixels), required)
    assert now() == pytest.approx(eager(), rel=0.02)
    with eager_for_new_shapes(problem is None):
        model.image(pixels[:1])
    assert 1 not in sizes


def test_towers_are_tried_with_the_sizes_of_their_own_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a checkpoint may be larger than a step of today; a sample may have several texts."""
    model = small_model()
    sizes: dict[nn.Module, set[int]] = {model.image: set(), model.text: set()}
    monkeypatch.setattr(compiled_module, "both_passes", lambda tower, inputs: sizes[tower].add(len(inputs)))
    chunk_sizes = ChunkSizes(8, 4, "cpu")
    towers = [model.image, model.text]
    precision = Precision.set_up("fp32", CPU)
    assert try_compiled(model, towers, chunk_sizes, 5, precision, ONE_RANK, texts_per_sample=2) is None
    assert sizes == {model.image: {5}, model.text: {4, 2}}


@pytest.mark.slow
def test_a_text_tower_is_compiled_once_for_captions_of_any_length() -> None:
    """`benchmarks/step.py` compiles it in the same way (compiled_text).

    A graph for each kind of block, without gradients and with them: the last block is of another kind.
    """
    ((graphs, after_first, difference, passes_differ),) = run_ranks(texts_of_any_length, 1)
    assert graphs == after_first >= 4, "the first length made all graphs"
    assert difference < 1e-5 and not passes_differ


def texts_of_any_length(rank: int, world_size: int) -> tuple[int, int, float, bool]:
    graphs = []

    def compiler(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return lookup_backend("aot_eager_decomp_partition")(graph, inputs)

    torch.compile = partial(torch.compile, backend=compiler)
    model = small_model()
    eager = small_model()
    eager.load_state_dict(model.state_dict())
    compile_towers(model, lengths_vary=True)
    for block in innermost_blocks(model.text.encoder):
        block.compile(dynamic=True)
    after_first = 0
    difference = 0.0
    passes_differ = False
    for samples, length in ((5, 7), (5, 3), (3, 12), (4, model.context_length)):
        tokens = torch.randint(1, 30, (samples, length))
        tokens[:, -1] = 31
        for tower in (model.text, eager.text):
            with torch.no_grad():
                features = tower(tokens)
            again = tower(tokens)
            passes_differ |= not torch.equal(features, again)
            again[:, :3].sum().backward()
        after_first = after_first or len(graphs)
        found, expected = (
            torch.cat([p.grad.flatten() for p in tower.parameters() if p.grad is not None])
            for tower in (model.text, eager.text)
        )
        difference = max(difference, float((found - expected).norm() / expected.norm()))
    return len(graphs), after_first, difference, passes_differ


def test_every_size_is_compiled_and_a_block_under_ddp_is_one_graph() -> None:
    assert run_ranks(graphs_of_layers, 1) == [(10, 1)]


def graphs_of_layers(rank: int, world_size: int) -> tuple[int, int]:
    """Counts the graphs of a layer at ten sizes, and of layers that do not fit together into a bucket of DDP's."""
    graphs = []

    def compiler(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.config.recompile_limit = 8  # torch's own, where another package has raised it
    compile_towers(small_model(), lengths_vary=False)
    layer = nn.Linear(4, 4)
    layer.compile(dynamic=False, backend=compiler)
    for rows in range(2, 12):
        layer(torch.zeros(rows, 4))
    sizes = len(graphs)
    graphs.clear()
    layers = nn.Sequential(*(nn.Linear(600, 600) for _ in range(3)))
    layers.compile(dynamic=False, backend=compiler)
    DistributedDataParallel(layers)(torch.zeros(2, 600))
    return sizes, len(graphs)
