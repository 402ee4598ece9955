"""The Triton backend on a CUDA device at real sizes, against float64 on the same device; on the CPU at smaller ones (tests/support).

docs/benchmarks/README.md says what the float64 truth costs on a device.
"""

import os
import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest
import torch

from tests.loss.triton.truth import Problem, Weights, distance, error_of, features, scale_error_of
from tests.support.device import CUDA, DEVICE, on_device, only_on_cuda, sized, with_kernels

pytestmark = [*on_device, with_kernels]

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
# dtype, precision of float32, tolerance of the log-sum-exps per unit of scale, tolerance of gradients. A dot product is summed in one
# chain over its width, on tensor cores with truncation, so the first tolerance grows with the width.
FORMS = {
    "bf16": (torch.bfloat16, "ieee", 5e-7, 6e-3),
    "fp16": (torch.float16, "ieee", 5e-7, 1e-3),
    "fp32": (torch.float32, "ieee", 5e-7, 3e-5),
    "tf32": (torch.float32, "tf32", 2e-3, 2e-2),
}


def problem(shape: tuple[int, int, int], form: str, scale: float, keys: bool = False, kind: str = "pairs") -> Problem:
    n, m, width = sized(*shape, smaller=1 if max(shape) < 600 else 16 if max(shape) < 2000 else 128)
    u, v = features(kind, n, m, width, FORMS[form][0], DEVICE)
    generator = torch.Generator().manual_seed(n + m)
    ids = (torch.randint(0, n // 4, (size,), generator=generator).to(DEVICE) if keys else None for size in (n, m))
    return Problem(u, v, torch.tensor(scale, device=DEVICE), 0, *ids)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("shape", "scale"), [(s, 20.0) for s in SHAPES] + [(s, 100.0) for s in AT_FULL_SCALE], ids=str)
def test_softmax_at_real_sizes(shape: tuple[int, int, int], scale: float, form: str) -> None:
    _, precision, lse_tolerance, tolerance = FORMS[form]
    p = problem(shape, form, scale, keys=shape[0] % 1000 == 0)
    n, m = len(p.u), len(p.v)
    a, b = torch.full((n,), 1 / n, device=DEVICE), torch.full((m,), 1 / n, device=DEVICE)
    b[n:] = 0
    lse = p.computed_lse((a, b), precision)
    errors = lse_errors(p, lse)
    assert max(errors) <= 1e-6 + (lse_tolerance + 5e-9 * shape[2]) * scale, f"log-sum-exps off by {errors}"
    got, truth = p.computed_softmax((a, b), lse, precision=precision), p.softmax_gradients(a, b)
    errors = [error_of(p, *pair, a, b) for pair in list(zip(got, truth))[:2]]
    assert max(errors) <= tolerance * scale / 20, f"gradients off by {errors}"
    error = scale_error_of(got[2], truth[2], a, b)
    assert error <= (5e-4 if form != "tf32" else tolerance), f"the scale's gradient is off by {error:.1e}"


def lse_errors(p: Problem, found: Weights) -> list[float]:
    return [float((got - t).abs().amax()) for got, t in zip(found, p.log_sum_exps()) if got is not None]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
def test_sigmoid_at_real_sizes(shape: tuple[int, int, int], form: str) -> None:
    _, precision, _, tolerance = FORMS[form]
    p = problem(shape, form, 10.0, keys=shape[0] % 1000 == 0)
    got, truth = p.computed_sigmoid(-10.0, precision=precision), p.sigmoid(-10.0)
    loss, d_u, d_v, d_bias, d_scale = (distance(*pair) for pair in zip(got, truth, strict=True))
    exact = 3e-5 if form != "tf32" else 5e-3
    assert max(loss, d_bias, d_scale) <= exact, f"loss, bias, scale off by {loss, d_bias, d_scale}"
    assert max(d_u, d_v) <= tolerance, f"gradients off by {d_u, d_v}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["random", "pairs", "equal", "extreme"])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_scores_of_any_spread(scale: float, kind: str, form: str) -> None:
    """Also where all cosines are -1 but for one pair of duplicates, so that the scores of a tile span 200 nats."""
    _, precision, lse_tolerance, tolerance = FORMS[form]
    p = problem((3000, 5000, 512), form, scale, kind=kind)
    a, b = torch.ones(len(p.u), device=DEVICE), torch.ones(len(p.v), device=DEVICE)
    lse = p.computed_lse((a, b), precision)
    errors = lse_errors(p, lse)
    assert max(errors) <= 1e-6 + (lse_tolerance + 5e-9 * 512) * scale, f"log-sum-exps off by {errors}"
    if kind == "equal":
        return  # the gradient is zero: only the rounding of the score gradients is left, which does not cancel
    got, truth = p.computed_softmax((a, b), lse, precision=precision), p.softmax_gradients(a, b)
    errors = [error_of(p, *pair, a, b) for pair in list(zip(got, truth))[:2]]
    assert max(errors) <= tolerance * max(1.0, scale / 20), f"gradients off by {errors}"


def test_the_same_inputs_give_the_same_bits() -> None:
    p = problem((20000, 30000, 768), "bf16", 50.0)
    weights = torch.ones(len(p.u), device=DEVICE), torch.ones(len(p.v), device=DEVICE)
    first, second = ([*p.computed_lse(weights), *p.computed_softmax(weights)] for _ in range(2))
    for x, y in zip(first, second, strict=True):
        assert x is not None and y is not None and torch.equal(x, y)


@only_on_cuda
def test_more_than_two_to_the_thirty_one_numbers_in_one_side() -> None:
    """(3.5 million, 640) has 2.24e9 numbers: an offset held in 32 bits would wrap around."""
    n, width = 3_500_000, 640
    if torch.cuda.mem_get_info()[0] < 30e9:
        pytest.skip("needs 30 GB of device memory")
    u = torch.randn(n, width, device=DEVICE, dtype=torch.bfloat16) / width**0.5
    v = u[-300:].clone()
    scale, weight = torch.tensor(10.0, device=DEVICE), torch.ones(n, device=DEVICE)
    p, tail = Problem(u, v, scale, None), Problem(u[-300:], v, scale, None)
    r, c = p.computed_lse((weight, torch.ones(300, device=DEVICE)))
    assert r is not None and c is not None
    error = float((r[-300:] - tail.log_sum_exps()[0]).abs().amax())
    assert error <= 1e-5, f"the last rows are off by {error:.2e}"
    p.positive, tail.positive = 300 - n, 0
    d_u, _ = p.computed_softmax((weight, None), (r, None), needed=(True, False))
    assert distance(d_u[-300:], tail.softmax_gradients(weight[-300:], None)[0]) <= 6e-3


@only_on_cuda
def test_memory_is_bounded_by_the_panels() -> None:
    """At N = 262144 the score matrix would be 128 GiB."""
    n, width = 262_144, 512
    u, v = (torch.randn(n, width, device=DEVICE).bfloat16() / width**0.5 for _ in range(2))
    grads = torch.zeros(n, width, device=DEVICE), torch.zeros(n, width, device=DEVICE)
    weight = torch.ones(n, device=DEVICE)
    p = Problem(u, v, torch.tensor(10.0, device=DEVICE))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    p.computed_softmax((weight, weight), grads=grads)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= 1 << 30, f"{extra / 2**20:.0f} MiB"


def small_kernels() -> None:
    """Every kernel on a small ragged problem, with and without keys, for a memory checker to watch."""
    for form in ("bf16", "fp32"):
        for keys in (False, True):
            p = problem((252, 507, 123), form, 20.0, keys=keys)
            weights = torch.ones(len(p.u), device=DEVICE), torch.ones(len(p.v), device=DEVICE)
            found = [*p.computed_softmax(weights), *p.computed_sigmoid(-10.0)]
            assert all(bool(x.isfinite().all()) for x in found)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_a_memory_checker_finds_nothing(tool: str) -> None:
    """compute-sanitizer over the small kernels, with a separate allocation for every tensor, so that it sees a step beyond one."""
    command = [sys.executable, "-c", "from tests.loss.triton.test_gpu import small_kernels as run; run(); print('ran')"]
    if not CUDA and tool != "memcheck":
        pytest.skip("without a device there is nothing to watch; running the kernels once is enough")
    if CUDA:
        if which("compute-sanitizer") is None:
            pytest.skip("compute-sanitizer is not installed")
        command = ["compute-sanitizer", "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9", *command]
    variables = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    root = Path(__file__).parents[3]
    done = subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True, timeout=280, check=False)
    printed = done.stdout + done.stderr
    if "Device not supported" in printed:
        pytest.skip("compute-sanitizer does not support this device: " + printed[-200:])
    assert done.returncode == 0 and "ran" in done.stdout, f"exit status {done.returncode}: {printed[-4000:]}"
