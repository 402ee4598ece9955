"""The public function on the Triton backend, in Triton's interpreter: what the adaptor adds to the kernels, against the oracle."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

import pytest
import torch

from clipscale import contrastive_loss
from clipscale.loss.api import OBJECTIVES
from tests.loss.cases import assert_exact, errors, features, keys, oracle, results

pytestmark = pytest.mark.skipif(
    os.environ["TRITON_INTERPRET"] != "1",
    reason="TRITON_INTERPRET is off: on the CPU the kernels run in the interpreter only",
)
VARIANTS = [(o, e) for o in OBJECTIVES for e in ("plain", "keys", "smoothing") if (o, e) != ("sigmoid", "smoothing")]


@pytest.mark.parametrize(("objective", "extra"), VARIANTS)
def test_float32_is_exact(objective: str, extra: str) -> None:
    n, m = 70, 90
    options = {"plain": {}, "keys": keys(n, m), "smoothing": {"label_smoothing": 0.1}}[extra]
    for scale in (1.0, 100.0):
        u, v = features(n, m, 48)
        true = oracle(u, v, scale, objective=objective, **options)
        found = results(contrastive_loss, u.float(), v.float(), scale, objective=objective, backend="triton", **options)
        assert_exact(found, true, scale, 1e-5, (objective, extra, scale))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("objective", ["softmax", "sigmoid"])
def test_half_precision_is_no_further_from_the_truth_than_twice_plain_torch(objective: str, dtype: torch.dtype) -> None:
    from clipscale.loss.dense import dense_contrastive_loss

    for scale in (14.3, 100.0):
        u, v = (x.to(dtype) for x in features(70, 90, 48, "aligned"))
        true = oracle(u, v, scale, objective=objective)
        plain = errors(results(dense_contrastive_loss, u, v, scale, objective=objective), true, scale)
        found = errors(results(contrastive_loss, u, v, scale, objective=objective, backend="triton"), true, scale)
        for name, ours in found.items():
            assert ours <= 2 * plain[name] + 1e-6, f"{name} at scale {scale}: {ours:.1e} against {plain[name]:.1e}"


@pytest.mark.parametrize("wanted", [("u",), ("v",), ("scale",)])
def test_a_frozen_side_gets_no_gradient(wanted: tuple[str, ...]) -> None:
    u, v = (x.float() for x in features(20, 24, 16))
    true = dict(zip(("u", "v", "scale"), oracle(u, v, 10.0)[1:4]))
    given = {"u": u, "v": v, "scale": torch.tensor(10.0)}
    given = {name: x.clone().requires_grad_(name in wanted) for name, x in given.items()}
    contrastive_loss(*given.values(), backend="triton").backward()
    for name, x in given.items():
        assert (x.grad is not None) == (name in wanted), f"{name} of {wanted}"
        if x.grad is not None:
            worst = float((x.grad - true[name]).abs().max() / true[name].abs().max())
            assert worst < 1e-5, f"{name}: {worst:.1e}"
