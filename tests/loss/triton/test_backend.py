"""The Triton block functions against float64 formulas: on the CUDA device where there is one, else in Triton's interpreter.

The interpreter must be chosen before Triton is imported, so the ordinary suite runs this file in a process of its own: see
test_triton_interpreter.py. `TRITON_INTERPRET=1 pytest tests/loss/triton/test_backend.py` runs it directly.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.loss.triton.truth import Block, distance, error_of, features, scale_error_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no CUDA device; test_triton_interpreter.py runs these", allow_module_level=True)

from clipscale.loss.triton import backend as triton_block  # noqa: E402
from clipscale.loss.triton import panels as triton_panels  # noqa: E402
from clipscale.loss.triton import tune as triton_tune  # noqa: E402
from clipscale.loss.triton.backend import (  # noqa: E402
    add_sigmoid_gradient_block,
    add_softmax_gradient_block,
    lse_block,
    sigmoid_loss_block,
)
from clipscale.loss.triton.tuning import Tiles  # noqa: E402

SHAPES = [(1, 1, 1), (2, 2, 3), (33, 31, 64), (17, 65, 40)]
SCALES = [1.0, 14.3, 100.0]
HALVES = [torch.bfloat16, torch.float16]


def block(
    n: int,
    m: int,
    width: int,
    scale: float,
    kind: str = "random",
    dtype: torch.dtype = torch.float32,
    positive: int | None = 0,
    keys: int = 0,
) -> Block:
    """A problem; with keys > 0 the pairs carry that many different keys."""
    u, v = features(kind, n, m, width, dtype, DEVICE)
    generator = torch.Generator().manual_seed(n + m)
    row_keys, col_keys = (
        torch.randint(-keys, keys, (size,), generator=generator).to(DEVICE) * 2**33 if keys else None for size in (n, m)
    )
    return Block(u, v, torch.tensor(scale, device=DEVICE), positive, row_keys, col_keys)


def weights(b: Block) -> tuple[Tensor, Tensor]:
    """Uneven weights; hard negatives have none."""
    n, m = len(b.u), len(b.v)
    a = torch.linspace(0.5, 1.5, n, device=DEVICE)
    c = torch.linspace(1.5, 0.5, m, device=DEVICE)
    c[n:] = 0
    return a, c


def lse_tolerance(b: Block) -> float:
    """A float32 dot product of unit vectors, summed up in one chain as a GPU does it, is off by a few 2^-24 and more with its width."""
    return 1e-6 + (5e-7 + 5e-9 * b.u.shape[1]) * float(b.scale)


def log_sum_exps(b: Block) -> tuple[Tensor, Tensor]:
    """Both log-sum-exps from the forward kernels."""
    r, c = lse_block(b.u, b.v, b.scale, **b.options)
    assert r is not None and c is not None
    return r, c


def softmax_gradients(b: Block, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The features' and the scale's gradients of the symmetric loss, from the forward kernels' sums: what both round alike cancels."""
    a, c = weights(b)
    d_u, d_v = (torch.zeros(x.shape, device=DEVICE) for x in (b.u, b.v))
    r, s = log_sum_exps(b)
    d_scale = add_softmax_gradient_block(b.u, b.v, b.scale, r, s, a, c, **b.options, d_u=d_u, d_v=d_v, **options)
    return d_u, d_v, d_scale


def check_lse(b: Block) -> None:
    for name, got, truth in zip("rc", log_sum_exps(b), b.log_sum_exps()):
        finite = truth.isfinite()
        assert torch.equal(got.isfinite(), finite), f"{name}: -inf where there are terms, or the other way round"
        error = float((got - truth)[finite].abs().amax()) if finite.any() else 0.0
        assert error <= lse_tolerance(b), f"{name} is off by {error:.2e}"


def check_softmax(b: Block, **options: Any) -> None:
    truth, got = b.softmax_gradients(*weights(b), **options), softmax_gradients(b, **options)
    tolerance = 1e-5 + lse_tolerance(b)  # what the scores themselves are off by
    errors = [error_of(b, *pair, *weights(b)) for pair in list(zip(got, truth))[:2]]
    errors.append(scale_error_of(got[2], truth[2], *weights(b)))
    assert max(errors) <= tolerance, f"d_u, d_v, d_scale off by {errors}, the norms {[float(x.norm()) for x in truth]}"


@pytest.mark.parametrize("kind", ["random", "equal", "pairs"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("shape", SHAPES)
def test_softmax_equals_float64(shape: tuple[int, int, int], scale: float, kind: str) -> None:
    b = block(*shape, scale, kind)
    check_lse(b)
    check_softmax(b)


def test_softmax_equals_float64_on_a_block_of_many_tiles() -> None:
    b = block(252, 507, 123, 14.3) if DEVICE == "cuda" else block(84, 169, 41, 14.3)
    check_lse(b)
    check_softmax(b)


def test_scores_that_span_more_than_float32_take_the_second_path() -> None:
    b = block(40, 70, 24, 100.0, "extreme")
    _, c = b.log_sum_exps()
    spread = float(c.max() - c.min())
    assert spread > 120, f"this is to be a hard case: the columns span {spread:.0f} nats"
    check_lse(b)
    check_softmax(b)


@pytest.mark.parametrize("positive", [None, 5, -12, 1000, -1000])
def test_positives_may_lie_anywhere_or_outside(positive: int | None) -> None:
    b = block(37, 50, 32, 14.3, "pairs", positive=positive, keys=4)
    check_lse(b)
    check_softmax(b)


@pytest.mark.parametrize("scale", SCALES)
def test_pairs_with_equal_keys_are_left_out(scale: float) -> None:
    b = block(35, 66, 32, scale, keys=3)
    check_lse(b)
    check_softmax(b)


def test_a_row_with_every_pair_left_out_has_no_terms() -> None:
    b = block(20, 40, 16, 10.0, positive=None)
    b.row_keys, b.col_keys = torch.zeros(20, dtype=torch.int64), torch.zeros(40, dtype=torch.int64)
    b.row_keys[3:], b.col_keys[35:] = 1, 2  # rows 0..2 keep the last five columns only
    b.row_keys, b.col_keys = b.row_keys.to(DEVICE), b.col_keys.to(DEVICE)
    check_lse(b)
    b.col_keys[:] = 0
    r, _ = log_sum_exps(b)
    assert r[:3].tolist() == [-torch.inf] * 3 and bool(r[3:].isfinite().all()), r


@pytest.mark.parametrize("keys", [0, 3])
def test_label_smoothing(keys: int) -> None:
    b = block(30, 45, 32, 14.3, "pairs", keys=keys)
    check_softmax(b, smoothing=(0.1 / 45, 0.1 / 30), epsilon=0.1)


@pytest.mark.parametrize("side", ["rows", "columns"])
def test_one_direction_alone(side: str) -> None:
    b = block(30, 45, 32, 100.0, "pairs", keys=5)
    want_rows = side == "rows"
    r, c = lse_block(b.u, b.v, b.scale, **b.options, want_rows=want_rows, want_cols=not want_rows)
    assert (r is None, c is None) == (not want_rows, want_rows)
    both = log_sum_exps(b)
    alone = r if want_rows else c
    assert alone is not None and torch.equal(alone, both[0 if want_rows else 1])
    a, w = weights(b)
    d_u, d_v = torch.zeros(b.u.shape, device=DEVICE), torch.zeros(b.v.shape, device=DEVICE)
    directions = (r, None, a, None) if want_rows else (None, c, None, w)
    add_softmax_gradient_block(b.u, b.v, b.scale, *directions, **b.options, d_u=d_u, d_v=d_v)
    truth = b.softmax_gradients(a if want_rows else None, None if want_rows else w)
    errors = [error_of(b, got, t, a if want_rows else w) for got, t in zip((d_u, d_v), truth)]
    assert max(errors) <= 3e-5, errors


def test_gradients_are_added_to_what_is_there() -> None:
    b = block(30, 45, 32, 14.3)
    for dtype in (torch.float32, *HALVES):
        half = Block(b.u.to(dtype), b.v.to(dtype), b.scale)
        a, w = weights(half)
        before = [torch.randn(x.shape, device=DEVICE) for x in (b.u, b.v)]
        d_u, d_v = (x.clone() for x in before)
        r, c = log_sum_exps(half)
        add_softmax_gradient_block(half.u, half.v, b.scale, r, c, a, w, positive=0, d_u=d_u, d_v=d_v)
        for got, old, alone in zip((d_u, d_v), before, softmax_gradients(half)):
            assert distance(got - old, alone.double()) <= 1e-5, dtype


def test_a_frozen_side_is_not_computed_and_changes_nothing_for_the_other() -> None:
    b = block(30, 45, 32, 14.3)
    a, w = weights(b)
    r, c = log_sum_exps(b)
    both = softmax_gradients(b)
    for side in (0, 1):
        grads = [torch.zeros(x.shape, device=DEVICE) if side == k else None for k, x in enumerate((b.u, b.v))]
        d_scale = add_softmax_gradient_block(b.u, b.v, b.scale, r, c, a, w, **b.options, d_u=grads[0], d_v=grads[1])
        wanted = grads[side]
        assert wanted is not None and torch.equal(wanted, both[side]) and torch.equal(d_scale, both[2])
    d_scale = add_softmax_gradient_block(b.u, b.v, b.scale, r, c, a, w, **b.options, d_u=None, d_v=None)
    assert torch.equal(d_scale, both[2])


@pytest.mark.parametrize("keys", [0, 3])
@pytest.mark.parametrize(("scale", "bias"), [(10.0, -10.0), (100.0, 0.0), (1.0, -30.0)])
def test_sigmoid_equals_float64(scale: float, bias: float, keys: int) -> None:
    for kind in ("pairs", "equal"):
        b = block(35, 66, 40, scale, kind, keys=keys)
        loss, *truth = b.sigmoid(bias)
        shift = torch.tensor(bias, device=DEVICE)
        d_u, d_v = torch.zeros(b.u.shape, device=DEVICE), torch.zeros(b.v.shape, device=DEVICE)
        got = sigmoid_loss_block(b.u, b.v, b.scale, shift, **b.options)
        sums = add_sigmoid_gradient_block(b.u, b.v, b.scale, shift, **b.options, d_u=d_u, d_v=d_v)
        errors = [distance(x, t) for x, t in zip((got, *sums, d_u, d_v), (loss, *truth))]
        assert max(errors) <= 1e-5, f"{kind}: loss, bias, scale, d_u, d_v off by {errors}"
        alone = add_sigmoid_gradient_block(b.u, b.v, b.scale, shift, **b.options, d_u=None, d_v=None)
        assert all(map(torch.equal, alone, sums))


def test_tiny_sigmoid_terms_keep_their_precision() -> None:
    """log(1 + e^-20) computed as the logarithm of a rounded sum would be off by a factor; so would the loss of a fresh SigLIP."""
    b = block(40, 40, 16, 0.001, "equal", positive=None)
    loss, *_ = b.sigmoid(-20.0)
    got = sigmoid_loss_block(b.u, b.v, b.scale, torch.tensor(-20.0, device=DEVICE), **b.options)
    assert distance(got, loss) <= 2e-6, (float(got), float(loss))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", ["random", "pairs"])
@pytest.mark.parametrize("scale", [14.3, 100.0])
def test_half_precision_is_no_further_from_float64_than_twice_plain_torch(
    dtype: torch.dtype, kind: str, scale: float
) -> None:
    b = block(48, 48, 40, scale, kind, dtype)
    u, v = (x.clone().requires_grad_() for x in (b.u, b.v))
    logits = b.scale.to(dtype) * (u @ v.T)
    target = torch.arange(48, device=DEVICE)
    (torch.nn.functional.cross_entropy(logits, target) + torch.nn.functional.cross_entropy(logits.T, target)).backward()
    even = torch.full((48,), 1 / 48, device=DEVICE)
    truth = b.softmax_gradients(even, even)
    got = [torch.zeros(b.u.shape, device=DEVICE), torch.zeros(b.v.shape, device=DEVICE)]
    r, c = log_sum_exps(b)
    d_scale = add_softmax_gradient_block(b.u, b.v, b.scale, r, c, even, even, **b.options, d_u=got[0], d_v=got[1])
    off = scale_error_of(d_scale, truth[2], even, even)
    assert off <= 1e-5 + 2.5e-7 * scale, (
        f"the scale's gradient, which no rounding of score gradients reaches, is off by {off:.2e}"
    )
    for ours, plain, true in zip(got, (u.grad, v.grad), truth):
        assert plain is not None
        errors = [error_of(b, x, true, even, even) for x in (ours, plain)]
        assert errors[0] <= 2 * errors[1] + 1e-5, f"ours {errors[0]:.2e}, plain torch {errors[1]:.2e}"


@pytest.mark.parametrize("weight", [1e-9, 1.0, 2.0**20])
def test_float16_gradients_keep_their_precision_at_any_weight(weight: float) -> None:
    """1/2N is below float16's numbers for a large batch, a loss scaler's factor above them."""
    b = block(40, 40, 32, 5.0, "pairs", torch.float16)
    a = torch.full((40,), weight, device=DEVICE)
    r, c = log_sum_exps(b)
    d_u, d_v = (torch.full(x.shape, weight, device=DEVICE) for x in (b.u, b.v))
    add_softmax_gradient_block(b.u, b.v, b.scale, r, c, a, a, **b.options, d_u=d_u, d_v=d_v)
    errors = [error_of(b, got - weight, t, a, a) for got, t in zip((d_u, d_v), b.softmax_gradients(a, a))]
    assert max(errors) <= 1e-3, errors
    shift = torch.zeros((), device=DEVICE)
    d_u.zero_()
    sums = add_sigmoid_gradient_block(b.u, b.v, b.scale, shift, **b.options, d_u=d_u, d_v=None)
    _, *truth, _ = b.sigmoid(0.0)
    errors = [distance(x, t) for x, t in zip((*sums, d_u), truth, strict=True)]
    assert max(errors) <= 1e-3, errors


def test_the_same_inputs_give_the_same_bits() -> None:
    b = block(50, 70, 32, 100.0, dtype=torch.bfloat16, keys=6)
    first, second = ([*log_sum_exps(b), *softmax_gradients(b)] for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second))


def test_panels_bound_the_memory_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    b = block(70, 133, 32, 100.0, keys=5)
    whole = [*log_sum_exps(b), *softmax_gradients(b)]
    shapes: list[tuple[int, int]] = []
    panels = triton_panels.Problem.panels

    def seen(self: triton_panels.Problem, height: int, width: int) -> Any:
        shapes.append((height, width))
        return panels(self, height, width)

    monkeypatch.setattr(triton_panels.Problem, "panels", seen)
    monkeypatch.setattr(triton_block, "PARTIAL_BYTES", 512)
    monkeypatch.setattr(triton_block, "PANEL_BYTES", 4096)
    parts = [*log_sum_exps(b), *softmax_gradients(b)]
    errors = [distance(x, y.double()) for x, y in zip(parts, whole)]
    assert max(errors) <= 2e-6, errors
    if DEVICE == "cpu":
        assert shapes == [(32, 32)] * 3, f"panels of whole tiles near 512 bytes of sums and 4096 of gradients: {shapes}"


def test_any_strides_will_do() -> None:
    b = block(33, 41, 24, 14.3)
    want = softmax_gradients(b)
    wide = torch.zeros(33, 100, device=DEVICE)
    wide[:, 3:27] = b.u
    for u in (b.u.T.contiguous().T, wide[:, 3:27]):
        got = softmax_gradients(Block(u, b.v, b.scale))
        assert distance(got[0], want[0].double()) <= 1e-6
        assert distance(got[1], want[1].double()) <= 1e-6


def test_not_a_number_stays_visible() -> None:
    b = block(20, 40, 16, 10.0)
    b.u[7, 3] = torch.nan
    r, c = log_sum_exps(b)
    assert bool(r[7].isnan()) and bool(c.isnan().all()), (r, c)
    assert bool(r[:7].isfinite().all()), r


def test_an_empty_block_adds_nothing() -> None:
    b = block(4, 4, 8, 1.0)
    empty = b.u[:0]
    r, c = lse_block(empty, b.v, b.scale, positive=0)
    assert r is not None and c is not None and len(r) == 0 and c.tolist() == [-torch.inf] * 4
    d_v = torch.ones(4, 8, device=DEVICE)
    add_softmax_gradient_block(empty, b.v, b.scale, r, c, r, c, positive=0, d_u=None, d_v=d_v)
    assert float(sigmoid_loss_block(empty, b.v, b.scale, b.scale, positive=0)) == 0
    sums = add_sigmoid_gradient_block(empty, b.v, b.scale, b.scale, positive=0, d_u=None, d_v=d_v)
    assert [float(x) for x in sums] == [0, 0]
    assert d_v.tolist() == [[1.0] * 8] * 4


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"u": torch.ones(4, 8, dtype=torch.float64), "v": torch.ones(4, 8, dtype=torch.float64)}, "not torch.float64"),
        ({"u": torch.ones(4, 8, dtype=torch.bfloat16)}, "must agree"),
        ({"u": torch.ones(4, 9)}, r"must be \(n, D\)"),
        ({"scale": torch.ones(1)}, "0-d float32"),
        ({"row_keys": torch.ones(4, dtype=torch.int64)}, "go together"),
        ({"row_keys": torch.ones(4), "col_keys": torch.ones(4)}, "int64"),
        ({"fp32_precision": "tf16"}, "ieee or tf32"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], reason: str) -> None:
    arguments: dict[str, Any] = {"u": torch.ones(4, 8), "v": torch.ones(4, 8), "scale": torch.ones(()), "positive": 0}
    arguments |= change
    arguments = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in arguments.items()}
    with pytest.raises(ValueError, match=reason):
        lse_block(**arguments)


def test_gradients_into_the_wrong_precision_are_refused() -> None:
    b = block(4, 4, 8, 1.0)
    wrong = torch.zeros(4, 8, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(ValueError, match=r"\(4, 8\) float32"):
        add_sigmoid_gradient_block(b.u, b.v, b.scale, b.scale, positive=0, d_u=wrong, d_v=None)


def test_a_kernel_that_fails_says_which_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        __name__ = "lse_kernel"

        def __getitem__(self, grid: object) -> Any:
            raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(triton_block, "lse_kernel", Broken())
    b = block(4, 4, 8, 1.0)
    with pytest.raises(RuntimeError, match=r"lse_kernel failed on .*out of resource: shared memory"):
        lse_block(b.u, b.v, b.scale, positive=0)


def test_the_tuner_times_every_kernel_with_every_shape_and_reports_what_does_not_run() -> None:
    b = block(40, 70, 32, 10.0)
    problem = triton_panels.Problem.of(b.u, b.v, b.scale, 0, (None, None), "ieee", backward=False)
    small, large, broken = Tiles(16, 32, 16, 4, 2), Tiles(32, 32, 32, 4, 2), Tiles(12, 12, 12, 4, 2)

    ticks = iter(range(1, 100))

    def clock(run: Callable[[], object]) -> float:
        run()
        return float(next(ticks))

    found = triton_tune.measure(problem, triton_tune.KERNELS, [small, large, broken], clock)
    assert len(found) == 12
    assert [m.tiles for m in found if m.kernel == "lse"] == [small, large, broken]
    assert all(
        (m.seconds == float("inf")) == (m.tiles == broken) and bool(m.remark) == (m.tiles == broken) for m in found
    )
    report = triton_tune.report(found, 1e9, 1.0, 90, "ieee")
    assert len(report.splitlines()) == 13 and "power of 2" in report, report
    late = triton_tune.measure(problem, triton_tune.KERNELS, [small], clock, seconds=-1)
    assert [m.remark for m in late] == ["not run: no time was left"] * 4
