"""Refused calls with their reason; mixed types, strides, autocast, torch.compile, options."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipscale import contrastive_loss
from clipscale.config.sections import LossConfig
from clipscale.loss.objective import OBJECTIVES
from clipscale.loss.precision import float32_matmuls
from tests.loss.cases import Phi, assert_exact, error, features, oracle, results

U, V = (x.float() for x in features(6, 8, 4))

REFUSALS = [
    ({"text_features": V[:, :3]}, "differ in width"),
    ({"image_features": U[:0], "text_features": V[:0]}, "the batch is empty"),
    ({"text_features": V[:5]}, "fewer texts than images"),
    ({"image_features": U.long()}, "must be floating-point"),
    ({"text_features": V.numpy()}, "text_features must be a tensor, not a ndarray"),
    ({"keys": [*range(len(U))]}, "keys must be a tensor, not a list"),
    ({"text_features": V.long()}, "must be floating-point"),
    ({"text_features": V.to("meta")}, "but text_features on meta"),
    ({"image_features": torch.ones(6, 3, 4)}, "features of 2 dimensions"),
    ({"similarity": "late"}, "similarity='late' is not a module"),
    ({"logit_scale": torch.ones(2)}, "are single numbers"),
    ({"logit_scale": -2.0}, "not its logarithm"),
    ({"logit_scale": torch.nan}, "logit_scale has 1 non-finite"),
    ({"image_features": U * torch.nan}, "image_features has 24 non-finite"),
    ({"captions": 1.5}, "captions=1.5: give the number of an image's texts, 1 or more"),
    ({"captions": 0}, "captions=0: give the number"),
    ({"captions": "2"}, "captions='2': give the number"),
    ({"objective": "softmin"}, "objective='softmin' is not one of softmax, "),
    ({"keys": torch.arange(6)}, "and there are hard negatives"),
    ({"keys": torch.arange(5), "text_features": V[:6]}, r"torch.int64 .* shape \(6,\)"),
    ({"similarity": nn.Bilinear(4, 4, 1), "text_features": U}, "must map"),
    ({"backend": "triton"}, "backend=triton cannot be had, since the features are on cpu"),
    (
        {"similarity": nn.Bilinear(4, 4, 1), "backend": "triton"},
        "since the similarity is not the dot product",
    ),
    ({"keys": torch.arange(6), "text_features": V[:6], "backend": "triton"}, "take no keys"),
    ({"image_features": U.double(), "text_features": V.double(), "backend": "triton"}, "float64"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSALS)
def test_a_mistake_is_refused_with_its_reason(changes: dict, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    arguments = {"image_features": U, "text_features": V, "logit_scale": 10.0} | changes
    with pytest.raises(ValueError, match=message):
        contrastive_loss(**arguments)


def test_without_the_check_what_is_not_finite_stays_visible() -> None:
    value = contrastive_loss(U * torch.nan, V, 10.0, check=False)
    assert bool(value.isnan()), f"the loss of NaN is {float(value)}"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("side", ["images", "positives", "hard negatives"])
def test_one_bad_number_anywhere_is_found(side: str, objective: str, bad: float) -> None:
    u = U.clone()
    v = V.clone()
    {"images": u[3:4], "positives": v[3:4], "hard negatives": v[7:8]}[side][0, 1] = bad
    if (side, objective) == ("hard negatives", "softmax_text"):  # where they have no part
        assert contrastive_loss(u, v, 10.0, objective=objective).isfinite()
        return
    with pytest.raises(ValueError, match="has 1 non-finite numbers"):
        contrastive_loss(u, v, 10.0, objective=objective)


@pytest.mark.parametrize(
    "types",
    [
        "float32 bfloat16 bfloat16",
        "float16 float32 float16",
        "float16 bfloat16 float32",
        "float64 float32 float32",
        "bfloat16 bfloat16 bfloat16",
    ],
)
def test_mixed_types_meet_in_the_narrower_and_gradients_keep_their_own(types: str) -> None:
    """`types`: of images, of texts, and in which both are multiplied."""
    images, texts, operands = (getattr(torch, name) for name in types.split())
    u = U.to(images)
    v = V.to(texts)
    actual = results(contrastive_loss, u, v, 10.0)
    assert (actual[1].dtype, actual[2].dtype) == (images, texts)
    true = oracle(u.to(operands), v.to(operands), 10.0)
    for name, f, t in zip(("value", "images", "texts"), actual, true):
        bar = 1e-5 if name == "value" else 2.0 ** {torch.float16: -11, torch.bfloat16: -8}.get(f.dtype, -16)
        assert error(f, t, 1e-3) < bar, f"{name}: {error(f, t, 1e-3):.1e}"


def test_float16_and_bfloat16_meet_in_the_type_that_holds_both() -> None:
    """Texts exceed float16's largest number, and images have more digits than bfloat16."""
    u = (2**-10 * U).half()
    v = 2.0**20 * V.bfloat16()
    actual = results(contrastive_loss, u, v, 0.01)
    true = oracle(u.float(), v.float(), 0.01)
    for name, x, t in zip(("value", "images", "texts", "scale"), actual, true):
        bar = 2.0 ** {torch.float16: -11, torch.bfloat16: -8}.get(x.dtype, -16)
        assert error(x, t, 1e-30) < bar, f"{name}: {error(x, t, 1e-30):.1e}"


def test_autocast_casts_float32_operands_as_matmul_would_and_nothing_else() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        actual = results(contrastive_loss, U, V, 10.0)
        exact = results(contrastive_loss, U.double(), V.double(), 10.0)
    assert [x.dtype for x in actual] == [torch.float32] * 5
    plain = results(contrastive_loss, U.bfloat16(), V.bfloat16(), 10.0)
    assert torch.equal(actual[0], plain[0]), f"{float(actual[0])} under autocast, {float(plain[0])} in bfloat16"
    assert_exact(actual, oracle(U.bfloat16(), V.bfloat16(), 10.0), 10.0, 1e-5, "gradients are not rounded to bfloat16")
    assert_exact(exact, oracle(U, V, 10.0), 10.0, 1e-10, "float64 stays float64")


def test_a_module_runs_under_the_callers_autocast_in_both_passes() -> None:
    seen = []

    class Watching(Phi):
        def forward(self, u: Tensor, v: Tensor) -> Tensor:
            scores = super().forward(u, v)
            seen.append(scores.dtype)
            return scores

    u = U.clone().requires_grad_()
    v = V.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        value = contrastive_loss(u, v, 10.0, similarity=Watching(4))
    value.backward()
    assert seen == [torch.bfloat16] * 2, f"the module's scores were {seen}"


def test_a_module_may_have_a_parameter_that_no_score_uses() -> None:
    """The parameter gets a gradient of zero. The other gradients are the same as without it."""
    torch.manual_seed(0)
    similarity = Phi(4)
    names = [name for name, _ in similarity.named_parameters()]
    gradients = []
    for _ in range(2):
        contrastive_loss(U, V, 10.0, similarity=similarity).backward()
        gradients.append([dict(similarity.named_parameters())[name].grad for name in names])
        similarity.zero_grad()
        similarity.unused = nn.Parameter(torch.ones(2))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_strides_do_not_matter() -> None:
    wide = torch.randn(8, 10, generator=torch.Generator().manual_seed(0)).double()
    u = wide[:, ::2].T[:4].T
    v = wide.flip(0)[:, 1:9:2]
    assert not u.is_contiguous()
    assert_exact(results(contrastive_loss, u, v, 3.0), oracle(u, v, 3.0), 3.0, 1e-10, "strided views")


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_the_scale_may_be_any_tensor_of_one_element(shape: tuple[int, ...]) -> None:
    log_scale = torch.full(shape, 2.0, requires_grad=True)
    contrastive_loss(U, V, log_scale.exp()).backward()
    true = oracle(U, V, float(torch.tensor(2.0).exp()))[3] * torch.tensor(2.0).double().exp()
    assert log_scale.grad is not None and log_scale.grad.shape == shape
    assert abs(float(log_scale.grad) - float(true)) < 1e-5, f"{float(log_scale.grad)} against {float(true)}"


def test_torch_compile_around_it_gives_what_eager_gives() -> None:
    torch.manual_seed(0)
    head = nn.Linear(4, 4)
    u = U.clone()
    v = V.clone()
    log_scale = torch.tensor(2.0, requires_grad=True)

    def step(u: Tensor, v: Tensor) -> Tensor:
        return 2 * contrastive_loss(F.normalize(head(u), dim=1), F.normalize(v, dim=1), log_scale.exp())

    actual = []
    for function in (step, torch.compile(step, backend="aot_eager")):
        value = function(u, v)
        actual.append([value, *torch.autograd.grad(value, [*head.parameters(), log_scale])])
    for eager, compiled in zip(*actual):
        assert torch.allclose(eager, compiled, rtol=1e-5, atol=1e-6), (
            f"{float((eager - compiled).detach().abs().max())}"
        )


def test_every_field_of_the_config_is_a_keyword_of_the_function() -> None:
    value = contrastive_loss(U, V, 10.0, **{n: x for n, x in vars(LossConfig()).items() if n != "sizes"})
    assert torch.equal(value, contrastive_loss(U, V, 10.0)), "the defaults differ"


@pytest.mark.parametrize("inside", ["ieee", "tf32"])
@pytest.mark.parametrize("value", [True, False])
def test_both_of_torchs_interfaces_can_be_read_inside_and_are_restored(inside: str, value: bool) -> None:
    """The interfaces give the precision of float32 matmuls: the loss's own inside, the caller's after."""
    matmul = torch.backends.cuda.matmul
    first = matmul.allow_tf32
    matmul.allow_tf32 = value
    before = matmul.fp32_precision
    with pytest.raises(KeyError), float32_matmuls(inside):
        assert (matmul.fp32_precision, matmul.allow_tf32) == (inside, inside == "tf32")
        raise KeyError
    assert (matmul.fp32_precision, matmul.allow_tf32) == (before, value)
    matmul.allow_tf32 = first
