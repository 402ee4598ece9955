"""One process: every objective, similarity and backend against the float64 oracle."""

import pytest
import torch
import torch.nn.functional as F
from open_clip.loss import SigLipLoss
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from clipscale import contrastive_loss
from clipscale.loss import choices
from clipscale.loss.objective import OBJECTIVES
from clipscale.loss.reference import dense_contrastive_loss
from tests.loss.cases import (
    LossFunction,
    Phi,
    assert_exact,
    assert_near_plain_torch,
    error,
    features,
    keys,
    oracle,
    results,
    tiles_of,
)

BARS = {torch.float64: 1e-10, torch.float32: 1e-5}
BACKENDS = [
    *(pytest.param({"backend": name}, id=name) for name in choices.BACKENDS if name not in ("auto", "triton")),
    pytest.param({"backend": "tiled", "tile": 50}, id="tiles of 50"),
]
SMALL_BACKENDS = [{"backend": "dense"}, {"backend": "tiled", "tile": 4}]
PROBLEMS = [(1, 1, 3, "random"), (2, 2, 64, "random"), (63, 64, 33, "random"), (152, 307, 123, "random")]
PROBLEMS += [(70, 80, 40, kind) for kind in ("aligned", "equal", "orthogonal", "low", "obtuse", "duplicates")]
U, V = features(90, 95, 32)


def agrees(u: Tensor, v: Tensor, scale: float, options: dict, backend: dict) -> None:
    """Assert that the loss agrees with the oracle, in both types."""
    true = oracle(u, v, scale, **options)
    for dtype, bar in BARS.items():
        if isinstance(options.get("similarity"), Phi):
            options["similarity"].to(dtype)
        actual = results(contrastive_loss, u.to(dtype), v.to(dtype), scale, **options, **backend)
        assert_exact(actual, true, scale, bar, (tuple(u.shape), tuple(v.shape), scale, dtype, options))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("has_keys", [False, True])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_dot_product_is_exact(objective: str, has_keys: bool, backend: dict) -> None:
    for n, m, width, kind in PROBLEMS:
        for scale in (1.0, 100.0) if n > 100 or kind == "low" else (100.0,):
            options = {"objective": objective} | ({"keys": keys(n)} if has_keys else {})
            agrees(*features(n, n if has_keys else m, width, kind), scale, options, backend)


def cross_entropy(u: Tensor, v: Tensor, scale: Tensor, logit_bias: Tensor) -> Tensor:
    """CLIP's loss by torch's own function."""
    scores = scale * u @ v.T
    positives = torch.arange(len(u))
    return (F.cross_entropy(scores, positives) + F.cross_entropy(scores.T, positives)) / 2


@pytest.mark.parametrize("ours", [contrastive_loss, dense_contrastive_loss])
@pytest.mark.parametrize(("objective", "others"), [("softmax", cross_entropy), ("sigmoid", SigLipLoss())])
def test_an_objective_is_what_others_compute(objective: str, others: LossFunction, ours: LossFunction) -> None:
    """The oracle reads the formulas and facts of `OBJECTIVES`, as the loss does. torch and open_clip do not."""
    u, v = features(23, 23, 12, "aligned")
    assert_exact(results(ours, u, v, 14.3, tile=7, objective=objective), results(others, u, v, 14.3), 14.3, 1e-10, ours)


@pytest.mark.parametrize("backend", SMALL_BACKENDS)
@pytest.mark.parametrize("has_keys", [False, True])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_modules_are_exact_down_to_parameters(objective: str, has_keys: bool, backend: dict) -> None:
    torch.manual_seed(0)
    for n, m in ((1, 1), (5, 5), (13, 17)):
        options = {"objective": objective} | ({"keys": keys(n)} if has_keys else {})
        for scale in (1.0, 14.3) if n == 13 else (14.3,):
            agrees(*features(n, n if has_keys else m, 8), scale, options | {"similarity": Phi(8)}, backend)


def test_deep_similarity_sees_the_same_random_numbers_in_both_passes() -> None:
    """Plain autograd from the same seed, with one tile, is the truth; draws between the passes must neither matter nor
    change."""
    torch.manual_seed(0)
    u, v = features(9, 11, 8)
    phi = Phi(8, dropout=0.5).double()

    def tiled(*args: Tensor, **options: object) -> Tensor:
        torch.manual_seed(7)
        value = contrastive_loss(*args, **options)
        torch.manual_seed(8)
        return value

    def plain(*args: Tensor, **options: object) -> Tensor:
        torch.manual_seed(7)
        return dense_contrastive_loss(*args, **options)

    true = results(plain, u, v, 5.0, similarity=phi)
    actual = results(tiled, u, v, 5.0, similarity=phi, tile=16)
    state = torch.get_rng_state()
    torch.manual_seed(8)
    assert torch.equal(state, torch.get_rng_state()), "the backward pass changed the random state"
    assert_exact(actual, true, 5.0, 1e-10, "dropout")


SUBSETS = [("u",), ("v",), ("scale",), ("bias",), ("v", "scale"), ("u", "v", "scale", "bias")]


@pytest.mark.parametrize("similarity", ["dot", "deep"])
@pytest.mark.parametrize("trained", SUBSETS)
def test_frozen_inputs_get_no_gradient_and_do_not_change_the_others(similarity: str, trained: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    module = Phi(4).double().requires_grad_(False) if similarity == "deep" else None
    u, v = features(6, 6, 4)
    scale, bias = torch.tensor([3.0, -1.0]).double()

    def gradients(objective: str, trained: tuple[str, ...]) -> dict[str, Tensor | None]:
        x = {name: x.clone().requires_grad_(name in trained) for name, x in zip(SUBSETS[-1], (u, v, scale, bias))}
        options = {"logit_bias": x["bias"], "objective": objective, "similarity": module}
        contrastive_loss(x["u"], x["v"], x["scale"], **options).backward()
        return {name: leaf.grad for name, leaf in x.items()}

    with tiles_of(4):
        for objective in ("softmax", "sigmoid"):
            full = gradients(objective, SUBSETS[-1])
            expected = {name: x if name in trained else None for name, x in full.items()}
            torch.testing.assert_close(gradients(objective, trained), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["random", "aligned", "low"])
@pytest.mark.parametrize("objective", ["softmax", "sigmoid"])
def test_half_precision_is_no_further_from_the_truth_than_twice_plain_torch(
    objective: str, kind: str, dtype: torch.dtype
) -> None:
    for scale in (14.3, 100.0):
        u, v = (x.to(dtype) for x in features(200, 220, 96, kind))
        actual = results(contrastive_loss, u, v, scale, objective=objective, tile=64)
        assert_near_plain_torch(actual, u, v, scale, objective=objective)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_gradients_of_rows_in_stripes_are_exact(objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipscale.loss.autograd.STRIPE", 5)
    u, v = features(13, 13, 8)
    options = {"objective": objective, "keys": keys(13)}
    actual = results(contrastive_loss, u, v, 14.3, tile=4, **options)
    assert_exact(actual, oracle(u, v, 14.3, **options), 14.3, 1e-10, objective)


@pytest.mark.parametrize("similarity", ["dot", "deep"])
@pytest.mark.parametrize("objective", ["softmax", "sigmoid"])
def test_a_second_backward_pass_gives_the_same_gradient(objective: str, similarity: str) -> None:
    torch.manual_seed(0)
    u, v = (F.normalize(torch.randn(9, 8, dtype=torch.float64), dim=-1).requires_grad_() for _ in range(2))
    given = Phi(8, dropout=0.3).double() if similarity == "deep" else None
    with tiles_of(4):
        value = 3 * contrastive_loss(u, v, 10.0, logit_bias=-2.0, objective=objective, similarity=given)
        first, second = (torch.autograd.grad(value, (u, v), retain_graph=True) for _ in range(2))
    for a, b in zip(first, second):
        assert error(a, b, 1e-6) <= 1e-12, "the second backward pass gives another gradient"


@pytest.mark.parametrize("objective", ["softmax", "sigmoid"])
def test_a_bias_that_is_not_given_is_0(objective: str) -> None:
    u, v = features(9, 9, 8)
    value, of_0 = (contrastive_loss(u, v, 10.0, objective=objective, **given) for given in ({}, {"logit_bias": 0.0}))
    assert torch.equal(value, of_0)


def test_a_softmax_takes_four_matmul_units_and_a_sum_over_pairs_three() -> None:
    for objective, units in (("sigmoid", 3), ("softmax", 4)):
        u, v = (x.float().requires_grad_() for x in features(64, 64, 32))
        with FlopCounterMode(display=False) as counter:
            contrastive_loss(u, v, 10.0, objective=objective).backward()
        assert counter.get_total_flops() == units * 2 * 64 * 64 * 32, objective


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("factor", [2.0**-20, 0.3, 2.0**20])
def test_gradients_of_a_sum_over_pairs_keep_their_precision_under_any_factor(factor: float, dtype: torch.dtype) -> None:
    """They are found before the loss scaler's factor is known, which brings them into float16's range."""
    u, v = (x.to(dtype) for x in (U, V))
    scaled = lambda *a, **k: factor * 1e-3 * contrastive_loss(*a, **k)  # noqa: E731
    actual = results(scaled, u, v, 20.0, objective="sigmoid", tile=16)
    for name, x, true in zip(("images", "texts"), actual[1:], oracle(u, v, 20.0, objective="sigmoid")[1:]):
        true *= factor * 1e-3
        tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        off = (x.double() - true).abs() - tiny
        assert bool((off <= 2**-7 * true.abs().amax(1, keepdim=True)).all()), f"{name} off by {float(off.max()):.1e}"


@pytest.mark.parametrize("stripe", [2**16, 5])
def test_gradients_of_1e_6_of_a_sum_over_pairs_wait_in_float32_for_the_loss_scalers_factor(
    stripe: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are so small late in training. float16 has few such numbers before the factor."""
    monkeypatch.setattr("clipscale.loss.autograd.STRIPE", stripe)
    u, v = (x.half() for x in features(24, 26, 256, "aligned"))
    scaled = lambda *a, **k: 2.0**16 * contrastive_loss(*a, **k)  # noqa: E731
    actual = results(scaled, u, v, 40.0, -20.0, objective="sigmoid", tile=16)
    for name, x, true in zip(("images", "texts"), actual[1:], oracle(u, v, 40.0, -20.0, objective="sigmoid")[1:]):
        off = (x.double() / 2**16 - true).norm(dim=1) / true.norm(dim=1)
        assert float(off.max()) <= 2**-9, f"{name}: off by {float(off.max()):.1e} of {float(true.abs().max()):.1e}"


def test_a_change_in_place_before_the_backward_pass_is_noticed() -> None:
    u, v = (x.float().requires_grad_() for x in features(8, 8, 4))
    hidden = u * 1.0
    value = contrastive_loss(hidden, v, 10.0)
    hidden.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()
