"""The Triton backend against float64 formulas: on the CUDA device where there is one, else in Triton's interpreter.

The interpreter must be chosen before Triton is imported, so the ordinary suite runs this file in a process of its own
(test_interpreter.py). `TRITON_INTERPRET=1 pytest tests/loss/triton/test_backend.py` runs it directly.
"""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no CUDA device; test_interpreter.py runs these", allow_module_level=True)

from clipscale.config.sections import LossConfig  # noqa: E402
from clipscale.loss.api import configured_loss  # noqa: E402
from clipscale.loss.machine import Machine  # noqa: E402
from clipscale.loss.objective import Softmax  # noqa: E402
from clipscale.loss.reference import dense_contrastive_loss  # noqa: E402
from clipscale.loss.triton import backend as triton_backend  # noqa: E402
from clipscale.loss.triton.panels import PaddedBlock, Panel  # noqa: E402
from clipscale.loss.triton.softmax import OWN  # noqa: E402
from clipscale.loss.triton.tuning import Tuning  # noqa: E402
from tests.loss.cases import assert_exact, errors, oracle, results  # noqa: E402
from tests.loss.triton.truth import Problem, Weights, distance, error_of, features, scale_error_of  # noqa: E402

LONG = [] if DEVICE == "cuda" else [pytest.mark.slow]
"""Marks of what takes seconds in the interpreter, and repeats a path at other values."""

SCALES = [1.0, 14.3, 100.0]
# Every shape, scale and kind, and every scale with every kind, but not every triple: the interpreter is slow.
CASES: list[Any] = [((1, 1, 1), 100.0, "equal"), ((2, 2, 3), 14.3, "pairs"), ((2, 2, 3), 100.0, "random")]
CASES += [((33, 31, 40), 1.0, "pairs"), ((33, 31, 40), 100.0, "pairs"), ((17, 33, 24), 14.3, "random")]
CASES += [
    pytest.param((33, 31, 40), 14.3, "equal", marks=LONG),
    pytest.param((17, 33, 24), 1.0, "equal", marks=LONG),
    pytest.param((17, 33, 24), 1.0, "random", marks=LONG),
    pytest.param((17, 33, 24), 100.0, "equal", marks=LONG),
]


def problem(
    n: int,
    m: int,
    width: int,
    scale: float,
    kind: str = "random",
    dtype: torch.dtype = torch.float32,
    positive: int | None = 0,
    keys: int = 0,
) -> Problem:
    """With keys > 0 the pairs carry that many different keys."""
    u, v = features(kind, n, m, width, dtype, DEVICE)
    generator = torch.Generator().manual_seed(n + m)
    row_keys, col_keys = (
        torch.randint(-keys, keys, (size,), generator=generator).to(DEVICE) * 2**33 if keys else None for size in (n, m)
    )
    return Problem(u, v, torch.tensor(scale, device=DEVICE), positive, row_keys, col_keys)


def weights(p: Problem) -> tuple[Tensor, Tensor]:
    """Uneven weights; hard negatives have none."""
    n, m = len(p.u), len(p.v)
    a = torch.linspace(0.5, 1.5, n, device=DEVICE)
    b = torch.linspace(1.5, 0.5, m, device=DEVICE)
    b[n:] = 0
    return a, b


def lse_tolerance(p: Problem) -> float:
    """A float32 dot product of unit vectors, summed in one chain as on a GPU, is off by a few 2^-24 and more with its width."""
    return 1e-6 + (5e-7 + 5e-9 * p.u.shape[1]) * float(p.scale)


def check_lse(p: Problem) -> None:
    for name, got, truth in zip("rc", p.computed_lse(weights(p)), p.log_sum_exps()):
        assert got is not None
        finite = truth.isfinite()
        assert torch.equal(got.isfinite(), finite), f"{name}: -inf where there are terms, or the other way round"
        error = float((got - truth)[finite].abs().amax()) if finite.any() else 0.0
        assert error <= lse_tolerance(p), f"{name} is off by {error:.2e}"


def check_softmax(p: Problem, smoothing: float = 0.0) -> None:
    """Gradients from the backend's own log-sum-exps: what both passes round alike cancels."""
    truth = p.softmax_gradients(*weights(p), smoothing)
    got = p.computed_softmax(weights(p), smoothing=smoothing)
    errors = [error_of(p, *pair, *weights(p)) for pair in list(zip(got, truth))[:2]]
    errors.append(scale_error_of(got[2], truth[2], *weights(p)))
    # The error of the scores themselves, and some roundings of 2^-24, against a hundredth of the weights. With equal features they add up.
    tolerance = 2e-5 + lse_tolerance(p)
    assert max(errors) <= tolerance, f"d_u, d_v, d_scale off by {errors}, the norms {[float(x.norm()) for x in truth]}"


@pytest.mark.parametrize(("shape", "scale", "kind"), CASES)
def test_softmax_equals_float64(shape: tuple[int, int, int], scale: float, kind: str) -> None:
    p = problem(*shape, scale, kind)
    check_lse(p)
    check_softmax(p)


def test_softmax_equals_float64_on_a_block_of_many_tiles() -> None:
    p = problem(252, 507, 123, 14.3) if DEVICE == "cuda" else problem(35, 70, 41, 14.3)
    check_lse(p)
    check_softmax(p)


def test_scores_that_span_more_than_float32_take_the_second_path() -> None:
    p = problem(20, 40, 24, 100.0, "extreme")
    _, c = p.log_sum_exps()
    spread = float(c.max() - c.min())
    assert spread > 120, f"not a hard case: the columns span {spread:.0f} nats"
    check_lse(p)
    check_softmax(p)


def references_lost(p: Problem, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the forward pass finds sums that may have lost terms, and runs its kernels again."""
    decisions: list[bool] = []
    launch = PaddedBlock.launch

    def watched(self: PaddedBlock, kernel: Any, panel: Panel, grid: int, *arguments: Any, **constants: Any) -> None:
        if constants.get("FIND") is OWN:
            decisions.append(bool(arguments[4]))
        launch(self, kernel, panel, grid, *arguments, **constants)

    monkeypatch.setattr(PaddedBlock, "launch", watched)
    check_lse(p)
    return decisions[0]


PATHS = [
    ("pairs", 100.0, False),
    ("random", 14.3, False),
    ("low", 100.0, False),
    ("far row", 100.0, False),
    ("extreme", 100.0, True),
]


@pytest.mark.parametrize(("kind", "scale", "again"), PATHS)
def test_the_second_path_is_taken_where_terms_may_be_lost_and_nowhere_else(
    kind: str, scale: float, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert references_lost(problem(20, 36, 24, scale, kind), monkeypatch) == again


def test_a_block_without_positives_may_lose_terms_that_earlier_blocks_outweigh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a ring: the rows' own log-sum-exps are the references, and what lies far below them is nothing."""
    p = problem(20, 36, 24, 100.0, "low", positive=None)
    block = p.block(weights(p))
    assert block.rows.lse is not None and block.cols.lse is not None
    block.rows.lse.fill_(50.0)
    triton_backend.triton_backend(Softmax(), "ieee", Tuning(), Machine()).forward(block)
    assert torch.equal(block.rows.lse, torch.full_like(block.rows.lse, 50.0))
    truth = p.log_sum_exps()[1]
    assert float((block.cols.lse - truth).abs().max()) <= lse_tolerance(p)


class WithDescriptors(Machine):
    """Operands are loaded as Hopper and Blackwell do, through tensor descriptors; column sums are folded as on Blackwell."""

    def compute_capability(self, device: torch.device) -> int:
        return 100


def test_tensor_descriptors_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cuda":
        pytest.skip("the device decides how operands are loaded")
    p = problem(20, 40, 24, 14.3, "random", keys=4)
    plain = [*everything(p), *p.computed_sigmoid(-5.0)]
    monkeypatch.setattr("tests.loss.triton.truth.Machine", WithDescriptors)
    for x, y in zip([*everything(p), *p.computed_sigmoid(-5.0)], plain, strict=True):
        assert x is not None and y is not None
        assert distance(x, y.double()) <= 1e-5


@pytest.mark.parametrize("positive", [None, 5, -12, pytest.param(1000, marks=LONG)])
def test_positives_may_lie_anywhere_or_outside(positive: int | None) -> None:
    p = problem(20, 40, 16, 14.3, "pairs", positive=positive, keys=4)
    check_lse(p)
    check_softmax(p)


@pytest.mark.parametrize("scale", [pytest.param(14.3, marks=LONG), 100.0])
def test_pairs_with_equal_keys_are_left_out(scale: float) -> None:
    p = problem(19, 35, 16, scale, keys=3)
    check_lse(p)
    check_softmax(p)


def test_a_row_with_every_pair_left_out_has_no_terms() -> None:
    p = problem(20, 40, 16, 10.0, positive=None)
    row_keys, col_keys = torch.zeros(20, dtype=torch.int64), torch.zeros(40, dtype=torch.int64)
    row_keys[3:], col_keys[35:] = 1, 2  # rows 0..2 keep the last five columns only
    p.row_keys, p.col_keys = row_keys.to(DEVICE), col_keys.to(DEVICE)
    check_lse(p)
    p.col_keys[:] = 0
    r, _ = p.computed_lse(weights(p))
    assert r is not None and r[:3].tolist() == [-torch.inf] * 3 and bool(r[3:].isfinite().all()), r


@pytest.mark.parametrize("keys", [pytest.param(0, marks=LONG), 3])
def test_label_smoothing(keys: int) -> None:
    check_softmax(problem(19, 35, 16, 14.3, "pairs", keys=keys), smoothing=0.1)


@pytest.mark.parametrize("side", [pytest.param(0, id="rows"), pytest.param(1, id="columns", marks=LONG)])
def test_one_direction_alone(side: int) -> None:
    p = problem(19, 35, 16, 100.0, "pairs", keys=5)
    weight = weights(p)[side]
    one_sided: Weights = (weight, None) if side == 0 else (None, weight)
    alone, both = (p.computed_lse(w)[side] for w in (one_sided, weights(p)))
    assert alone is not None and both is not None and torch.equal(alone, both)
    got, truth = p.computed_softmax(one_sided), p.softmax_gradients(*one_sided)
    errors = [error_of(p, *pair, weight) for pair in list(zip(got, truth))[:2]]
    assert max(errors) <= 3e-5, errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=LONG)])
def test_gradients_are_added_to_what_is_there(dtype: torch.dtype) -> None:
    p = problem(19, 35, 16, 14.3, dtype=dtype)
    before = [torch.randn(x.shape, device=DEVICE) for x in (p.u, p.v)]
    added = p.computed_softmax(weights(p), grads=(before[0].clone(), before[1].clone()))
    for got, old, alone in zip(added, before, p.computed_softmax(weights(p))):
        assert distance(got - old, alone.double()) <= 1e-5


def test_a_frozen_side_is_not_computed_and_changes_nothing_for_the_other() -> None:
    p = problem(19, 35, 16, 14.3)
    d_u, d_v, d_scale = p.computed_softmax(weights(p))
    for needed, truth in (
        ((True, False), [d_u, d_scale]),
        ((False, True), [d_v, d_scale]),
        ((False, False), [d_scale]),
    ):
        got = p.computed_softmax(weights(p), needed=needed)
        assert all(map(torch.equal, got, truth)) and len(got) == len(truth), needed


@pytest.mark.parametrize(
    ("scale", "bias", "keys"),
    [
        (10.0, -10.0, 3),
        pytest.param(100.0, 0.0, 0, marks=LONG),
        pytest.param(1.0, -30.0, 0, marks=LONG),
    ],
)
def test_sigmoid_equals_float64(scale: float, bias: float, keys: int) -> None:
    for kind in ("pairs",) if keys else ("pairs", "equal"):
        p = problem(17, 35, 16, scale, kind, keys=keys)
        got, truth = p.computed_sigmoid(bias), p.sigmoid(bias)
        errors = [distance(*pair) for pair in zip(got, truth, strict=True)]
        assert max(errors) <= 1e-5, f"{kind}: loss, d_u, d_v, bias, scale off by {errors}"
        assert all(map(torch.equal, p.computed_sigmoid(bias, at_once=False), got)), "two sweeps find something else"
        alone = p.computed_sigmoid(bias, needed=(False, False))
        assert all(map(torch.equal, alone, [got[0], *got[3:]]))


def test_tiny_sigmoid_terms_keep_their_precision() -> None:
    """log(1 + e^-20) computed as the logarithm of a rounded sum would be off by a factor; so would the loss of a fresh SigLIP."""
    p = problem(17, 33, 16, 0.001, "equal", positive=None)
    (loss, *_), (got, *_) = p.sigmoid(-20.0), p.computed_sigmoid(-20.0)
    assert distance(got, loss) <= 2e-6, (float(got), float(loss))


@pytest.mark.parametrize("weight", [1e-9, pytest.param(2.0**20, marks=LONG)])
def test_float16_gradients_keep_their_precision_at_any_weight(weight: float) -> None:
    """1/2N is below float16's numbers for a large batch, a loss scaler's factor above them."""
    p = problem(40, 40, 32, 5.0, "pairs", torch.float16)
    a = torch.full((40,), weight, device=DEVICE)
    d_u, d_v = (torch.full(x.shape, weight, device=DEVICE) for x in (p.u, p.v))
    got = p.computed_softmax((a, a), grads=(d_u, d_v))
    errors = [error_of(p, x - weight, t, a, a) for x, t in list(zip(got, p.softmax_gradients(a, a)))[:2]]
    assert max(errors) <= 1e-3, errors
    errors = [distance(*pair) for pair in zip(p.computed_sigmoid(0.0), p.sigmoid(0.0), strict=True)]
    assert max(errors) <= 1e-3, errors


def kept_results(p: Problem, keep: str, machine: Machine | None = None) -> list[Tensor]:
    """The whole loss's value and gradients with this budget for kept exponentials."""
    config = LossConfig(backend="triton", keep=keep)

    def loss(u: Tensor, v: Tensor, scale: Tensor, logit_bias: Tensor) -> Tensor:
        return configured_loss(u, v, scale, None, config, machine=machine)

    return results(loss, p.u, p.v, float(p.scale))


# 17 x 64 scores fill 2 x 2 tiles of the interpreter, one of which is not special. Its row of tiles takes 4096 bytes.
SMALL, SOME = ((17, 64, 16), "4096") if DEVICE == "cpu" else ((600, 1100, 64), "2M")


@pytest.mark.parametrize(
    ("keep", "kind", "described"), [(SOME, "random", True), pytest.param("1G", "extreme", False, marks=LONG)]
)
def test_gradients_from_kept_exponentials_equal_float64(
    keep: str, kind: str, described: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem(*SMALL, 100.0, kind)
    kernels: list[str] = []
    launch = PaddedBlock.launch

    def watched(self: PaddedBlock, kernel: Any, *arguments: Any, **constants: Any) -> None:
        kernels.append(kernel.__name__)
        launch(self, kernel, *arguments, **constants)

    monkeypatch.setattr(PaddedBlock, "launch", watched)
    machine = WithDescriptors() if described and DEVICE == "cpu" else None
    assert_exact(kept_results(p, keep, machine), oracle(p.u, p.v, 100.0), 100.0, 1e-5, (keep, kind))
    assert "kept_gradient_kernel" in kernels
    assert ("softmax_gradient_kernel" in kernels) == (keep != "1G"), "of the other rows"


def test_kept_exponentials_are_no_further_from_float64_than_twice_plain_bfloat16() -> None:
    p = problem(*SMALL, 14.3, "random", torch.bfloat16)
    true = oracle(p.u, p.v, 14.3)
    plain = errors(results(dense_contrastive_loss, p.u, p.v, 14.3), true, 14.3)
    found = errors(kept_results(p, "1G"), true, 14.3)
    assert all(found[name] <= 2 * plain[name] + 1e-6 for name in ("value", "images", "texts")), (found, plain)
    assert found["scale"] <= 2**-8, "the rounding of one probability: in a sum over more pairs it averages out"


def everything(p: Problem, tuning: Tuning | None = None) -> list[Tensor | None]:
    return [*p.computed_lse(weights(p), tuning=tuning), *p.computed_softmax(weights(p), tuning=tuning)]
