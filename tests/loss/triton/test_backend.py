"""The Triton backend against the float64 oracle, on the CUDA device where there is one, else in Triton's interpreter.

The interpreter must be chosen before Triton is imported, so the ordinary suite runs this file in a process of its own
(test_interpreter.py). `TRITON_INTERPRET=1 pytest tests/loss/triton/test_backend.py` runs it directly.
"""

import itertools
import math
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from tests.support.device import INTERPRETED

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and not INTERPRETED:
    pytest.skip("no CUDA device, and no interpreter: test_interpreter.py has one", allow_module_level=True)

from clipscale import contrastive_loss  # noqa: E402
from clipscale.loss.block import Block, BlockSide, LossParameters  # noqa: E402
from clipscale.loss.objective import OBJECTIVES  # noqa: E402
from clipscale.loss.reference import dense_contrastive_loss  # noqa: E402
from clipscale.loss.runtime import LossRuntime  # noqa: E402
from clipscale.loss.softmax.kernel import TritonSoftmax  # noqa: E402
from clipscale.loss.triton import tuning  # noqa: E402
from clipscale.loss.triton.tuning import FLOAT32, TileShape  # noqa: E402
from tests.loss.cases import Tiled, assert_exact, assert_near_plain_torch, features, oracle, results  # noqa: E402
from tests.loss.workers import Workers, check, stacked  # noqa: E402
from tests.support.ranks import workers  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
LONG = pytest.mark.slow if DEVICE == "cpu" else pytest.mark.gpu
SOFTMAXES = ("softmax", "softmax_image", "softmax_text")


def triton(u: Tensor, v: Tensor, scale: float, bias: float = -2.0, **options: Any) -> list[Tensor]:
    """The Triton backend's results, on the CPU."""
    actual = results(contrastive_loss, u.to(DEVICE), v.to(DEVICE), scale, bias, backend="triton", **options)
    return [x.cpu() for x in actual]


def extreme(n: int, m: int, width: int) -> tuple[Tensor, Tensor]:
    """All cosines near -1 but for one pair of duplicates, so that at scale 100 the scores of a tile span 200 nats."""
    towards = torch.eye(1, width, dtype=torch.float64)
    generator = torch.Generator().manual_seed(n)
    noise = [0.05 * torch.randn(x, width, generator=generator, dtype=torch.float64) / width**0.5 for x in (n, m)]
    u = towards + noise[0]
    v = -towards + noise[1]
    v[m // 2] = u[n // 3]
    return normalize(u, dim=1), normalize(v, dim=1)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_float32_is_exact(objective: str) -> None:
    """Kernels of one-sided softmax are softmax's, with other weights: they have one case."""
    cases = [(17, 36, 40, 14.3, "random"), (1, 1, 1, 100.0, "random"), (5, 70, 24, 100.0, "aligned")]
    for n, m, width, scale, kind in cases if objective in ("softmax", "sigmoid") else cases[:1]:
        u, v = features(n, m, width, kind)
        actual = triton(u.float(), v.float(), scale, objective=objective)
        assert_exact(actual, oracle(u, v, scale, objective=objective), scale, 1e-5, (n, m, width, kind))


@pytest.mark.parametrize("kind", ["equal", "low", "far row", "extreme"])
def test_scores_that_span_more_than_float32_are_exact(kind: str) -> None:
    u, v = extreme(20, 40, 24) if kind == "extreme" else features(20, 40, 24, "low" if kind == "far row" else kind)
    if kind == "far row":
        u = -u
        u[7].neg_()
    for objective in SOFTMAXES if kind == "extreme" else SOFTMAXES[:1]:
        actual = triton(u.float(), v.float(), 100.0, objective=objective)
        assert_exact(actual, oracle(u, v, 100.0, objective=objective), 100.0, 1e-5, (kind, objective))


@LONG
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("objective", ["softmax", "sigmoid"])
def test_half_precision_is_no_further_from_the_truth_than_twice_plain_torch(objective: str, dtype: torch.dtype) -> None:
    for kind, scale in (("aligned", 14.3), ("low", 100.0)):
        u, v = (x.to(dtype) for x in features(35, 70, 40, kind))
        actual = triton(u, v, scale, objective=objective)
        assert_near_plain_torch(actual, u, v, scale, objective=objective)


@pytest.mark.parametrize("objective", ["softmax", "sigmoid"])
def test_probabilities_of_1e_8_have_their_gradients_in_float16(objective: str) -> None:
    """Hard negatives have such ones, far below float16's smallest number before the loss scaler's factor."""
    u, v = (x.half() for x in features(17, 40, 64, "aligned"))
    scaled = lambda *a, **k: 2.0**18 * contrastive_loss(*a, **k)  # noqa: E731
    true = results(dense_contrastive_loss, u.double(), v.double(), 20.0, -16.0, objective=objective)[2][17:]
    given = {"objective": objective, "backend": "triton"}
    actual = results(scaled, u.to(DEVICE), v.to(DEVICE), 20.0, -16.0, **given)[2][17:].cpu().double() / 2**18
    off = (actual - true).norm(dim=1) / true.norm(dim=1)
    assert float(off.max()) <= 5e-3, f"{objective}: off by {off.tolist()}"


def test_tiny_sigmoid_terms_keep_their_precision() -> None:
    """log(1 + e^-20) computed as the logarithm of a rounded sum would be off by a factor; so would the loss of a fresh
    SigLIP."""
    u, v = (x.float() for x in features(17, 33, 16, "equal"))
    actual, true = (f(u, v, 0.001, -20.0, objective="sigmoid")[0] for f in (triton, oracle))
    assert abs(float(actual - true)) <= 2e-6 * float(true)


SHAPES = {(t.rows, t.cols, t.depth, number >= 9) for number, t in ((8, FLOAT32), *tuning.SHAPES.items())}


@LONG
@pytest.mark.skipif(DEVICE == "cuda", reason="each GPU has one")
@pytest.mark.parametrize("shape", sorted(SHAPES), ids=str)
def test_every_shape_of_tiles_is_exact(shape: tuple[int, int, int, bool]) -> None:
    runtime = Tiled(TileShape(*shape[:3], warps=1, stages=1), tma=shape[3])
    for n, m, width, kind, scale in ((1, 257, 40, "random", 14.3), (130, 300, 70, "low", 100.0)):
        u, v = features(n, m, width, kind)
        for objective in ("softmax", "sigmoid"):
            actual = triton(u.float(), v.float(), scale, objective=objective, runtime=runtime)
            assert_exact(actual, oracle(u, v, scale, objective=objective), scale, 1e-5, (n, m, kind, objective))


@pytest.mark.parametrize("objective", ["softmax", "sigmoid"])
def test_panels_stripes_and_descriptors_change_nothing_but_rounding(
    objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    u, v = (x.float() for x in features(20, 40, 41))
    plain, again = (triton(u, v, 14.3, objective=objective) for _ in range(2))
    assert all(map(torch.equal, plain, again)), "the same inputs give the same bits"
    tiles = LossRuntime().tile_shape(torch.device(DEVICE), torch.float32)
    small = Tiled(replace(tiles, panel_bytes=2048))
    small.max_partial_bytes = 2048
    for runtime in (small, Tiled(tiles, tma=DEVICE == "cpu")):
        actual = triton(u, v, 14.3, runtime=runtime, objective=objective)
        assert_exact(actual, [x.double() for x in plain], 14.3, 2e-6, type(runtime))
    monkeypatch.setattr("clipscale.loss.autograd.STRIPE", 16)
    actual = triton(u, v, 14.3, objective=objective)
    assert_exact(actual, [x.double() for x in plain], 14.3, 2e-6, "stripes")


def test_a_frozen_side_changes_nothing_for_the_other() -> None:
    u, v = (x.float().to(DEVICE) for x in features(17, 20, 16))
    for objective in ("softmax", "sigmoid"):
        full = triton(u, v, 14.3, objective=objective)
        choices = [*itertools.product((False, True), repeat=2)]  # what is left out knows no objective
        for trained in choices if objective == "softmax" else choices[1:2]:
            inputs = [x.clone().requires_grad_(expected) for x, expected in zip((u, v), trained)]
            scale = torch.tensor(14.3, device=DEVICE, requires_grad=True)
            contrastive_loss(*inputs, scale, logit_bias=-2.0, objective=objective, backend="triton").backward()
            for x, expected, true in zip((*inputs, scale), (*trained, True), full[1:]):
                assert (x.grad is not None) == expected and (x.grad is None or torch.equal(x.grad.cpu(), true))


def test_a_block_may_have_its_positives_anywhere_or_none() -> None:
    """A ring visits such blocks. Log-sum-exps are joined with those of earlier blocks."""
    u, v = (torch.nn.functional.pad(x.float(), (0, 48)).to(DEVICE) for x in features(20, 40, 16, "low"))
    scale = torch.tensor(100.0, device=DEVICE)
    scores = 100.0 * u.double() @ v.double().T
    tiles = LossRuntime().tile_shape(u.device, u.dtype)
    for positive, before in ((None, -torch.inf), (5, -torch.inf), (-12, 50.0), (1000, -50.0)):
        rows = BlockSide(u, lse_weight=torch.ones(20, device=DEVICE))
        cols = BlockSide(v, lse_weight=torch.ones(40, device=DEVICE))
        rows.lse = rows.initial_lse().clamp_min(before)
        cols.lse = cols.initial_lse().clamp_min(before)
        rows.row_loss = torch.zeros(20, dtype=torch.float64, device=DEVICE)
        TritonSoftmax(LossRuntime(), tiles).forward(Block(rows, cols, LossParameters(scale, scale), positive))
        for actual, dim in ((rows.lse, 1), (cols.lse, 0)):
            true = torch.logaddexp(scores.logsumexp(dim), torch.tensor(before, dtype=torch.float64, device=DEVICE))
            assert float((actual - true).abs().max()) <= 6e-5, f"positive={positive}"
        diagonal = scores.new_zeros(20)
        for i in range(20):
            if positive is not None and 0 <= i + positive < 40:
                diagonal[i] = 2 * scores[i, i + positive]
        assert torch.allclose(rows.row_loss, -diagonal, rtol=1e-6)


# ---- nothing is lost to underflow ----


@contextmanager
def flushed() -> Iterator[None]:
    """The interpreter flushes results below 2^-126 to zero, as GPUs do in exponentials; here in products and sums,
    too."""
    from triton.runtime import interpreter

    builder = type(interpreter.interpreter_builder)
    plain = {name: getattr(builder, name) for name in ("create_exp2", "create_fmul", "create_fadd", "create_fma")}
    with pytest.MonkeyPatch.context() as patch:
        for name in plain if DEVICE == "cpu" else ():

            def flushing(self: Any, *given: Any, name: str = name) -> Any:
                handle = plain[name](self, *given)
                if handle.data.dtype == "float32":
                    handle.data = handle.data.copy()
                    handle.data[abs(handle.data) < 2.0**-126] = 0
                return handle

            patch.setattr(builder, name, flushing)
        yield


def assert_nothing_is_lost(u: Tensor, v: Tensor, scale: float = 100.0, objectives: Sequence[str] = SOFTMAXES) -> None:
    """Values and each row's gradient, which would be wrong by powers of ten where a column's terms are lost."""
    u = u.float()
    v = v.float()
    for objective in objectives:
        with flushed():
            actual, true = ([x.cpu().double() for x in f(u, v, scale, objective=objective)] for f in (triton, oracle))
        assert abs(float(actual[0] - true[0])) <= 1e-4, (
            f"{objective}: the loss is {float(actual[0])}, not {float(true[0])}"
        )
        for name, a, b in zip(("images", "texts"), actual[1:], true[1:]):
            off = (a - b).norm(dim=1) / b.norm(dim=1).clamp_min(scale / len(u) / 100)
            assert float(off.max()) <= 5e-3, f"{objective}: {name} off by {off.tolist()}"


def unit(*numbers: float) -> Tensor:
    """Numbers of a row, filled up to unit length in a direction that no other row has."""
    return torch.tensor([*numbers, math.sqrt(max(0.0, 1 - sum(x * x for x in numbers)))], dtype=torch.float64)


@pytest.mark.parametrize("c", [-0.46, 0.5, *(pytest.param(c, marks=LONG) for c in (-0.30, -0.9))])
@pytest.mark.parametrize("gap", [0.0, pytest.param(0.3, marks=LONG)])
def test_columns_far_below_the_largest_row_keep_their_terms(c: float, gap: float) -> None:
    """Two rows with a perfect positive, and a third whose column lies tens of nats below them."""
    u = torch.zeros(3, 8, dtype=torch.float64)
    v = torch.zeros(3, 8, dtype=torch.float64)
    u[0, 0] = u[1, 1] = v[0, 0] = 1
    u[2, 3], u[2, 4] = unit(0.1029)
    v[1, 1] = c
    v[1, 4] = gap
    v[1, 2] = math.sqrt(max(0.0, 1 - c * c - gap * gap))
    v[2, 1], v[2, 3] = unit(0.236)
    assert_nothing_is_lost(normalize(u, dim=1), normalize(v, dim=1))


@LONG
@settings(max_examples=8, derandomize=True, deadline=None)
@given(
    angles=st.lists(st.tuples(*[st.floats(0, math.pi)] * 4), min_size=2, max_size=3),
    scale=st.sampled_from([1.0, 50.0, 100.0]),
)
def test_no_pairs_lose_anything(angles: list[tuple[float, ...]], scale: float) -> None:
    def row(a: float, b: float) -> Tensor:
        return torch.tensor([math.cos(a), math.sin(a) * math.cos(b), math.sin(a) * math.sin(b)], dtype=torch.float64)

    u, v = (torch.stack([row(*x[i : i + 2]) for x in angles]) for i in (0, 2))
    assert_nothing_is_lost(u, v, scale, ["softmax"])


def test_full_tiles_lose_nothing_of_lines_122_powers_below_their_largest_score() -> None:
    assert_full_tiles_lose_nothing(below=122, spread=6, seed=0)


@LONG  # beside the test above
@settings(max_examples=8, derandomize=True, deadline=None)
@given(below=st.integers(60, 150), spread=st.integers(0, 12), seed=st.integers(0, 99))
def test_full_tiles_lose_nothing_of_lines_far_below_their_largest_score(below: int, spread: int, seed: int) -> None:
    assert_full_tiles_lose_nothing(below, spread, seed)


def assert_full_tiles_lose_nothing(below: int, spread: int, seed: int) -> None:
    """Only a tile without a ragged edge takes one shift for all its rows and columns.

    Each tile has one perfect pair. All other scores lie `below` to `below + spread` powers of two under its score.
    """
    tiles = LossRuntime().tile_shape(torch.device(DEVICE), torch.float32)
    n = math.lcm(tiles.rows, tiles.cols)
    powers = 100 * math.log2(math.e)
    under = below + spread * torch.rand(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    perfect = torch.arange(0, n, tiles.rows)
    under[perfect, perfect] = 0
    assert_nothing_is_lost(torch.eye(n, dtype=torch.float64), 1 - under / powers, objectives=["softmax"])


@LONG
def test_far_rows_in_several_tiles_and_longer_ones_lose_nothing() -> None:
    u, v = extreme(40, 70, 24)
    assert_nothing_is_lost(u, v[:40], objectives=["softmax"])
    assert_nothing_is_lost(3 * u, v[:40], objectives=["softmax"])


# ---- ranks ----


@pytest.fixture(scope="module")
def forked() -> Iterator[Workers]:
    """Forks of this process: Triton chooses the interpreter when it is imported."""
    with workers(2, multiprocessing.get_context("fork")) as started:
        yield started


@pytest.mark.skipif(DEVICE == "cuda", reason="gloo ranks on the CPU")
@pytest.mark.parametrize(
    ("objective", "exchange"),
    [
        ("softmax", "ring"),
        *(pytest.param("softmax", exchange, marks=LONG) for exchange in ("replicated", "local")),
        ("softmax_text", "gather"),
        ("sigmoid", "ring"),
    ],
)
def test_on_ranks_it_is_exact(forked: Workers, objective: str, exchange: str) -> None:
    u, v = stacked(2, 18, 20, 24)
    options = {"objective": objective, "exchange": exchange, "backend": "triton"}
    check(forked, 2, u.float(), v.float(), 14.3, options, bar=1e-5)
