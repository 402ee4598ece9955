"""The Triton block functions on a CUDA device at real sizes, against float64 on the same device; tests/device.py: on the CPU, smaller.

What the float64 truth costs on a device is said in docs/benchmarks/README.md.
"""

import os
import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest
import torch
from torch import Tensor

from tests.device import CUDA, DEVICE, on_device, only_on_cuda, sized, with_kernels
from tests.loss.triton.truth import Block, distance, error_of, features, scale_error_of

pytestmark = [*on_device, with_kernels]

from clipscale.loss.triton.backend import (  # noqa: E402
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
    (60001, 65523, 1280),
]
AT_FULL_SCALE = [(65536, 65536, 512), (60001, 65523, 1280)]
# dtype, precision of float32, tolerance of the log-sum-exps per unit of scale, tolerance of gradients. A dot product is summed up in one
# chain over its width, on tensor cores with truncation, so that the first tolerance grows with the width.
FORMS = {
    "bf16": (torch.bfloat16, "ieee", 5e-7, 6e-3),
    "fp16": (torch.float16, "ieee", 5e-7, 1e-3),
    "fp32": (torch.float32, "ieee", 5e-7, 3e-5),
    "tf32": (torch.float32, "tf32", 2e-3, 2e-2),
}


def problem(shape: tuple[int, int, int], form: str, scale: float, keys: bool = False, kind: str = "pairs") -> Block:
    n, m, width = sized(*shape, smaller=1 if max(shape) < 600 else 16 if max(shape) < 2000 else 128)
    u, v = features(kind, n, m, width, FORMS[form][0], DEVICE)
    generator = torch.Generator().manual_seed(n + m)
    ids = (torch.randint(0, n // 4, (size,), generator=generator).to(DEVICE) if keys else None for size in (n, m))
    return Block(u, v, torch.tensor(scale, device=DEVICE), 0, *ids)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("shape", "scale"), [(s, 20.0) for s in SHAPES] + [(s, 100.0) for s in AT_FULL_SCALE], ids=str)
def test_softmax_at_real_sizes(shape: tuple[int, int, int], scale: float, form: str) -> None:
    _, precision, lse_tolerance, tolerance = FORMS[form]
    b = problem(shape, form, scale, keys=shape[0] % 1000 == 0)
    n, m = len(b.u), len(b.v)
    r, c = lse_block(b.u, b.v, b.scale, **b.options, fp32_precision=precision)
    assert r is not None and c is not None
    truth = b.log_sum_exps()
    errors = [float((got - t).abs().amax()) for got, t in zip((r, c), truth)]
    assert max(errors) <= 1e-6 + (lse_tolerance + 5e-9 * shape[2]) * scale, f"log-sum-exps off by {errors}"
    a, w = torch.full((n,), 1 / n, device=DEVICE), torch.full((m,), 1 / n, device=DEVICE)
    w[n:] = 0
    d_u, d_v = torch.zeros(b.u.shape, device=DEVICE), torch.zeros(b.v.shape, device=DEVICE)
    options = b.options | {"fp32_precision": precision, "d_u": d_u, "d_v": d_v}
    d_scale = add_softmax_gradient_block(b.u, b.v, b.scale, r, c, a, w, **options)
    truth = b.softmax_gradients(a, w)
    errors = [error_of(b, got, t, a, w) for got, t in zip((d_u, d_v), truth)]
    assert max(errors) <= tolerance * scale / 20, f"gradients off by {errors}"
    error = scale_error_of(d_scale, truth[2], a, w)
    assert error <= (5e-4 if form != "tf32" else tolerance), f"the scale's gradient is off by {error:.1e}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
def test_sigmoid_at_real_sizes(shape: tuple[int, int, int], form: str) -> None:
    _, precision, _, tolerance = FORMS[form]
    b = problem(shape, form, 10.0, keys=shape[0] % 1000 == 0)
    bias = torch.tensor(-10.0, device=DEVICE)
    loss, *truth = b.sigmoid(-10.0)
    got = sigmoid_loss_block(b.u, b.v, b.scale, bias, **b.options, fp32_precision=precision)
    d_u, d_v = torch.zeros(b.u.shape, device=DEVICE), torch.zeros(b.v.shape, device=DEVICE)
    options = b.options | {"fp32_precision": precision, "d_u": d_u, "d_v": d_v}
    sums = add_sigmoid_gradient_block(b.u, b.v, b.scale, bias, **options)
    exact = 3e-5 if form != "tf32" else 5e-3
    errors = [distance(x, t) for x, t in zip((got, *sums), (loss, *truth[:2]))]
    assert max(errors) <= exact, f"loss, bias, scale off by {errors}"
    errors = [distance(x, t) for x, t in zip((d_u, d_v), truth[2:])]
    assert max(errors) <= tolerance, f"gradients off by {errors}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["random", "pairs", "equal", "extreme"])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_scores_of_any_spread(scale: float, kind: str, form: str) -> None:
    """Also where all cosines are -1 but for one pair of duplicates, so that the scores of a tile span 200 nats."""
    _, precision, lse_tolerance, tolerance = FORMS[form]
    b = problem((3000, 5000, 512), form, scale, kind=kind)
    r, c = lse_block(b.u, b.v, b.scale, **b.options, fp32_precision=precision)
    assert r is not None and c is not None
    errors = [float((got - truth).abs().amax()) for got, truth in zip((r, c), b.log_sum_exps())]
    assert max(errors) <= 1e-6 + (lse_tolerance + 5e-9 * 512) * scale, f"log-sum-exps off by {errors}"
    if kind == "equal":
        return  # the gradient is zero: what is left is the rounding of the score gradients, which do not cancel
    a, w = torch.ones(len(b.u), device=DEVICE), torch.ones(len(b.v), device=DEVICE)
    d_u, d_v = (torch.zeros(x.shape, device=DEVICE) for x in (b.u, b.v))
    add_softmax_gradient_block(b.u, b.v, b.scale, r, c, a, w, **b.options, d_u=d_u, d_v=d_v, fp32_precision=precision)
    errors = [error_of(b, got, truth, a, w) for got, truth in zip((d_u, d_v), b.softmax_gradients(a, w))]
    assert max(errors) <= tolerance * max(1.0, scale / 20), f"gradients off by {errors}"


def test_the_same_inputs_give_the_same_bits() -> None:
    b = problem((20000, 30000, 768), "bf16", 50.0)

    def results() -> list[Tensor | None]:
        r, c = lse_block(b.u, b.v, b.scale, **b.options)
        d_u, d_v = torch.zeros(b.u.shape, device=DEVICE), torch.zeros(b.v.shape, device=DEVICE)
        a, w = (torch.ones(len(x), device=DEVICE) for x in (b.u, b.v))
        add_softmax_gradient_block(b.u, b.v, b.scale, r, c, a, w, **b.options, d_u=d_u, d_v=d_v)
        return [r, c, d_u, d_v]

    for first, second in zip(results(), results()):
        assert first is not None and second is not None and torch.equal(first, second)


@only_on_cuda
def test_more_than_two_to_the_thirty_one_numbers_in_one_side() -> None:
    """(3.5 million, 640) has 2.24e9 numbers: an offset held in 32 bits would wrap around."""
    n, width = 3_500_000, 640
    if torch.cuda.mem_get_info()[0] < 30e9:
        pytest.skip("needs 30 GB of device memory")
    u = torch.randn(n, width, device=DEVICE, dtype=torch.bfloat16) / width**0.5
    v = u[-300:].clone()
    scale = torch.tensor(10.0, device=DEVICE)
    r, c = lse_block(u, v, scale, positive=None)
    assert r is not None and c is not None
    tail = Block(u[-300:], v, scale, None)
    error = float((r[-300:] - tail.log_sum_exps()[0]).abs().amax())
    assert error <= 1e-5, f"the last rows are off by {error:.2e}"
    d_u = torch.zeros(n, width, device=DEVICE)
    weight = torch.ones(n, device=DEVICE)
    add_softmax_gradient_block(u, v, scale, r, None, weight, None, positive=300 - n, d_u=d_u, d_v=None)
    tail.positive = 0
    assert distance(d_u[-300:], tail.softmax_gradients(weight[-300:], None)[0]) <= 6e-3


@only_on_cuda
def test_memory_is_bounded_by_the_panels() -> None:
    """At N = 262144 the score matrix would be 128 GiB."""
    n, width = 262_144, 512
    u, v = (torch.randn(n, width, device=DEVICE).bfloat16() / width**0.5 for _ in range(2))
    d_u, d_v = (torch.zeros(n, width, device=DEVICE) for _ in range(2))
    weight = torch.ones(n, device=DEVICE)
    scale = torch.tensor(10.0, device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    r, c = lse_block(u, v, scale, positive=0)
    add_softmax_gradient_block(u, v, scale, r, c, weight, weight, positive=0, d_u=d_u, d_v=d_v)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= 1 << 30, f"{extra / 2**20:.0f} MiB"


def small_kernels() -> None:
    """Every kernel on a small ragged problem, with and without keys, for a checker of memory to watch."""
    for form in ("bf16", "fp32"):
        for keys in (False, True):
            b = problem((252, 507, 123), form, 20.0, keys=keys)
            bias, weights = torch.tensor(-10.0, device=DEVICE), [torch.ones(len(x), device=DEVICE) for x in (b.u, b.v)]
            d_u, d_v = (torch.zeros(x.shape, device=DEVICE) for x in (b.u, b.v))
            sums = lse_block(b.u, b.v, b.scale, **b.options)
            add_softmax_gradient_block(b.u, b.v, b.scale, *sums, *weights, **b.options, d_u=d_u, d_v=d_v)
            loss = sigmoid_loss_block(b.u, b.v, b.scale, bias, **b.options)
            add_sigmoid_gradient_block(b.u, b.v, b.scale, bias, **b.options, d_u=d_u, d_v=d_v)
            assert all(bool(x.isfinite().all()) for x in (loss, d_u, d_v))


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_a_checker_of_memory_finds_nothing(tool: str) -> None:
    """compute-sanitizer over the small kernels, with every tensor an allocation of its own, so that a step beyond one is seen."""
    command = [sys.executable, "-c", "from tests.loss.triton.test_gpu import small_kernels as run; run(); print('ran')"]
    if not CUDA and tool != "memcheck":
        pytest.skip("without a device there is nothing to watch, and once is enough to see that the kernels run")
    if CUDA:
        if which("compute-sanitizer") is None:
            pytest.skip("compute-sanitizer is not installed")
        command = ["compute-sanitizer", "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9", *command]
    variables = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    root = Path(__file__).parents[3]
    done = subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True, timeout=280, check=False)
    said = done.stdout + done.stderr
    if "Device not supported" in said:
        pytest.skip("compute-sanitizer does not support this device: " + said[-200:])
    assert done.returncode == 0 and "ran" in done.stdout, f"exit status {done.returncode}: {said[-4000:]}"
