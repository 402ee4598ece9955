"""On a CUDA device, at real sizes: every backend against the float64 oracle, bits, and memory; smaller on the CPU
(tests/support).

Letters: N pairs, D feature width.
"""

import pytest
import torch
from torch import Tensor

from clipscale import contrastive_loss
from clipscale.loss.block import Block, BlockSide, LossParameters
from clipscale.loss.objective import OBJECTIVES
from clipscale.loss.runtime import LossRuntime
from clipscale.loss.softmax.kernel import TritonSoftmax
from tests.loss.cases import assert_exact, assert_near_plain_torch, features, oracle, results
from tests.support.device import DEVICE, on_device, only_on_cuda, sized, with_kernels

pytestmark = on_device
BACKENDS = ["dense", "tiled", pytest.param("triton", marks=with_kernels)]


def rows(n: int, m: int, width: int, *, kind: str = "random") -> tuple[Tensor, Tensor]:
    """Unit rows on the device, in float64."""
    u, v = features(n, m, width, kind)
    return u.to(DEVICE), v.to(DEVICE)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_float32_is_exact(objective: str, backend: str) -> None:
    for kind, scale in (("random", 14.3), ("aligned", 100.0), ("low", 100.0)):
        u, v = rows(*sized(3001, 4100, 768), kind=kind)
        true = oracle(u, v, scale, objective=objective)
        actual = results(contrastive_loss, u.float(), v.float(), scale, backend=backend, objective=objective)
        assert_exact(actual, true, scale, 1e-5, (kind, scale, objective, backend))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("objective", ["softmax", "sigmoid"])
def test_half_precision_is_no_further_from_the_truth_than_twice_plain_torch(
    objective: str, backend: str, dtype: torch.dtype
) -> None:
    for width, kind, scale in (
        (512, "aligned", 14.3),
        (1000, "random", 100.0),
        (64, "aligned", 50.0),
        (1280, "low", 100.0),
    ):
        u, v = (x.to(dtype) for x in rows(*sized(4096, 5000, smaller=8), *sized(width, smaller=4), kind=kind))
        actual = results(contrastive_loss, u, v, scale, objective=objective, backend=backend)
        assert_near_plain_torch(actual, u, v, scale, objective=objective)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_inputs_give_the_same_bits_twice(backend: str) -> None:
    u, v = (x.bfloat16() for x in rows(*sized(5000, 6000, 768)))
    first, second = (results(contrastive_loss, u, v, 30.0, backend=backend) for _ in range(2))
    for a, b in zip(first, second):
        assert torch.equal(a, b), f"two runs differ by {float((a - b).abs().max())}"


@only_on_cuda
@pytest.mark.parametrize("backend", ["tiled", "triton"])
def test_extra_memory_is_linear_in_the_batch(backend: str) -> None:
    """Features and their gradients do not count. A 64k x 64k matrix of bfloat16 would take 8 GiB."""
    extras = []
    for n in (2**14, 2**15, 2**16):
        u, v = (torch.randn(n, 768, device="cuda").bfloat16().requires_grad_() for _ in range(2))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        contrastive_loss(u, v, torch.tensor(1.0, device="cuda", requires_grad=True), backend=backend).backward()
        extras.append(torch.cuda.max_memory_allocated() - before - u.nbytes - v.nbytes)
    assert extras[-1] < 2 * 2**30, f"{[x / 2**20 for x in extras]} MiB at N = 16k, 32k, 64k"
    last = extras[2] - extras[1]
    first = extras[1] - extras[0]
    assert last < 2.5 * first + 2**28, f"it grows faster than the batch: {[x / 2**20 for x in extras]} MiB"


@only_on_cuda
def test_more_than_two_to_the_thirty_one_numbers_in_one_side() -> None:
    """(3.5 million, 640) has 2.24e9 numbers: an offset held in 32 bits would wrap around."""
    n = 3_500_000
    width = 640
    m = 300
    if torch.cuda.mem_get_info()[0] < 30e9:
        pytest.skip("needs 30 GB of device memory")
    u = torch.randn(n, width, device=DEVICE, dtype=torch.bfloat16) / width**0.5
    v = u[-m:].clone()
    scale = torch.tensor(10.0, device=DEVICE)
    rows, cols = (BlockSide(x, lse_weight=torch.ones(len(x), device=DEVICE)) for x in (u, v))
    rows.lse = rows.initial_lse()
    cols.lse = cols.initial_lse()
    block = Block(rows, cols, LossParameters(scale, scale), None)
    backend = TritonSoftmax(LossRuntime(), LossRuntime().tile_shape(u.device, u.dtype))
    backend.forward(block)
    cols.lse_weight = None
    rows.grad = rows.zero_grad_buffer()
    backend.backward(block)
    scores = 10.0 * u[-m:].double() @ v.double().T
    assert float((rows.lse[-m:] - scores.logsumexp(1)).abs().max()) <= 5e-5  # 1.9e-5 on an H100
    true = scores.softmax(1) @ v.double()
    assert float((rows.grad[-m:] / 10.0 - true).norm() / true.norm()) <= 6e-3
