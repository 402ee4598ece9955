"""The Triton block functions on a CUDA device at real sizes, against float64 on the same device."""

import pytest
import torch
from torch import Tensor

from tests.loss.triton_truth import Block, distance, features

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

from clipscale.loss.triton_block import (  # noqa: E402
    add_sigmoid_gradient_block,
    add_softmax_gradient_block,
    lse_block,
    sigmoid_loss_block,
)

SHAPES = [
    (1024, 1024, 64),
    (252, 507, 123),
    (1000, 1000, 640),
    (4096, 4100, 2048),
    (8192, 10000, 1280),
    (32768, 32768, 768),
    (65536, 65536, 512),
]
# dtype, precision of float32, tolerance of the log-sum-exps per unit of scale, tolerance of gradients
FORMS = {
    "bf16": (torch.bfloat16, "ieee", 3e-7, 6e-3),
    "fp16": (torch.float16, "ieee", 3e-7, 1e-3),
    "fp32": (torch.float32, "ieee", 3e-7, 3e-5),
    "tf32": (torch.float32, "tf32", 2e-3, 2e-2),
}


def problem(shape: tuple[int, int, int], form: str, scale: float, keys: bool = False, kind: str = "pairs") -> Block:
    n, m, width = shape
    u, v = features(kind, n, m, width, FORMS[form][0], "cuda")
    ids = (torch.randint(0, max(2, n // 4), (size,), device="cuda") if keys else None for size in (n, m))
    return Block(u, v, torch.tensor(scale, device="cuda"), 0, *ids)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_softmax_at_real_sizes(shape: tuple[int, int, int], form: str) -> None:
    _, precision, lse_tolerance, tolerance = FORMS[form]
    b = problem(shape, form, 20.0, keys=shape[0] % 1000 == 0)
    n, m, _ = shape
    r, c = lse_block(b.u, b.v, b.scale, **b.options, fp32_precision=precision)
    assert r is not None and c is not None
    truth = b.log_sum_exps()
    errors = [float((got - t).abs().amax()) for got, t in zip((r, c), truth)]
    assert max(errors) <= 1e-6 + lse_tolerance * 20, f"log-sum-exps off by {errors}"
    a, w = torch.full((n,), 1 / n, device="cuda"), torch.full((m,), 1 / n, device="cuda")
    w[n:] = 0
    d_u, d_v = torch.zeros(b.u.shape, device="cuda"), torch.zeros(b.v.shape, device="cuda")
    add_softmax_gradient_block(b.u, b.v, b.scale, r, c, a, w, **b.options, d_u=d_u, d_v=d_v, fp32_precision=precision)
    errors = [distance(got, t) for got, t in zip((d_u, d_v), b.softmax_gradients(a, w))]
    assert max(errors) <= tolerance, f"gradients off by {errors}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
def test_sigmoid_at_real_sizes(shape: tuple[int, int, int], form: str) -> None:
    _, precision, _, tolerance = FORMS[form]
    b = problem(shape, form, 10.0, keys=shape[0] % 1000 == 0)
    bias = torch.tensor(-10.0, device="cuda")
    loss, total, *truth = b.sigmoid(-10.0, 1 / shape[0])
    got = sigmoid_loss_block(b.u, b.v, b.scale, bias, **b.options, fp32_precision=precision)
    d_u, d_v = torch.zeros(b.u.shape, device="cuda"), torch.zeros(b.v.shape, device="cuda")
    options = b.options | {"fp32_precision": precision, "d_u": d_u, "d_v": d_v}
    got_total = add_sigmoid_gradient_block(b.u, b.v, b.scale, bias, 1 / shape[0], **options)
    exact = 1e-5 if form != "tf32" else 5e-3
    errors = [distance(got, loss), distance(got_total, total)]
    assert max(errors) <= exact, f"loss and sum of gradients off by {errors}"
    errors = [distance(x, t) for x, t in zip((d_u, d_v), truth)]
    assert max(errors) <= tolerance, f"gradients off by {errors}"


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_scores_of_any_spread(scale: float) -> None:
    for kind in ("random", "equal", "extreme"):
        b = problem((3000, 5000, 512), "bf16", scale, kind=kind)
        sums = lse_block(b.u, b.v, b.scale, **b.options)
        for got, truth in zip(sums, b.log_sum_exps()):
            assert got is not None
            error = float((got - truth).abs().amax())
            assert error <= 1e-6 + 3e-7 * scale, f"{kind}: off by {error:.2e}"


def test_the_same_inputs_give_the_same_bits() -> None:
    b = problem((20000, 30000, 768), "bf16", 50.0)

    def results() -> list[Tensor | None]:
        r, c = lse_block(b.u, b.v, b.scale, **b.options)
        d_u, d_v = torch.zeros(b.u.shape, device="cuda"), torch.zeros(b.v.shape, device="cuda")
        a, w = (torch.ones(len(x), device="cuda") for x in (b.u, b.v))
        add_softmax_gradient_block(b.u, b.v, b.scale, r, c, a, w, **b.options, d_u=d_u, d_v=d_v)
        return [r, c, d_u, d_v]

    for first, second in zip(results(), results()):
        assert first is not None and second is not None and torch.equal(first, second)


def test_more_than_two_to_the_thirty_one_numbers_in_one_side() -> None:
    """(3.5 million, 640) has 2.24e9 numbers: an offset held in 32 bits would wrap around."""
    n, width = 3_500_000, 640
    if torch.cuda.mem_get_info()[0] < 30e9:
        pytest.skip("needs 30 GB of device memory")
    u = torch.randn(n, width, device="cuda", dtype=torch.bfloat16) / width**0.5
    v = u[-300:].clone()
    scale = torch.tensor(10.0, device="cuda")
    r, c = lse_block(u, v, scale, positive=None)
    assert r is not None and c is not None
    tail = Block(u[-300:], v, scale, None)
    error = float((r[-300:] - tail.log_sum_exps()[0]).abs().amax())
    assert error <= 1e-5, f"the last rows are off by {error:.2e}"
    d_u = torch.zeros(n, width, device="cuda")
    weight = torch.ones(n, device="cuda")
    add_softmax_gradient_block(u, v, scale, r, None, weight, None, positive=300 - n, d_u=d_u, d_v=None)
    tail.positive = 0
    assert distance(d_u[-300:], tail.softmax_gradients(weight[-300:], None)[0]) <= 6e-3


def test_memory_is_bounded_by_the_panels() -> None:
    """At N = 262144 the score matrix would be 128 GiB."""
    n, width = 262_144, 512
    u, v = (torch.randn(n, width, device="cuda").bfloat16() / width**0.5 for _ in range(2))
    d_u, d_v = (torch.zeros(n, width, device="cuda") for _ in range(2))
    weight = torch.ones(n, device="cuda")
    scale = torch.tensor(10.0, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    r, c = lse_block(u, v, scale, positive=0)
    add_softmax_gradient_block(u, v, scale, r, c, weight, weight, positive=0, d_u=d_u, d_v=d_v)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= 1 << 30, f"{extra / 2**20:.0f} MiB"
