"""Other people's kernels compute the losses that `bench loss` compares them with: value and gradients against the dense oracle.

On the CUDA device where there is one, else in Triton's interpreter (test_interpreter.py).
"""

import os
from types import SimpleNamespace

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no CUDA device; test_interpreter.py runs these", allow_module_level=True)

from clipscale.bench.loss_methods import Case, find  # noqa: E402
from clipscale.bench.loss_work import Loss, gradients  # noqa: E402
from clipscale.loss.reference import dense_contrastive_loss  # noqa: E402

# Where their arithmetic rounds: memeff and inf-cl multiply float32 in TF32 on a device; siglip-kernel rounds its value to bfloat16.
BARS = {"fp32": 2e-3 if DEVICE == "cuda" else 1e-5, "bf16": 2e-2}


# The interpreter multiplies bfloat16 by its bits, and knows neither inf-cl's assembly nor siglip-kernel's tuning in float32.
EVERYWHERE = [("memeff", "fp32"), ("siglip_kernel", "bf16")]
ON_A_GPU = [("inf_cl", "fp32"), ("inf_cl", "bf16"), ("memeff", "bf16"), ("siglip_kernel", "fp32")]


@pytest.mark.parametrize(("name", "dtype"), EVERYWHERE + (ON_A_GPU if DEVICE == "cuda" else []))
def test_a_peer_computes_the_loss_it_is_compared_as(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (method,) = find([name])
    if not method.installed:
        pytest.skip(f"{method.package} is not installed")
    with monkeypatch.context() as patch:
        if DEVICE == "cpu":  # they insist on a GPU, and ask which
            gpu = SimpleNamespace(multi_processor_count=2, shared_memory_per_multiprocessor=2**17)
            patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
            patch.setattr(torch.cuda, "get_device_properties", lambda *_: gpu)
            patch.setattr(torch.Tensor, "is_cuda", True)
        loss = Loss(method, Case(64, 256, dtype, DEVICE, 1, 20.0), 0, torch.device(DEVICE))
        inputs = loss.inputs(64)
        value = loss._loss(*inputs)
        found = gradients(value, inputs)
    value, exact = value.detach(), [x.detach().double().requires_grad_() for x in inputs]
    true_value = dense_contrastive_loss(*exact, logit_bias=method.bias, objective=method.objective)
    true = gradients(true_value, exact)
    assert abs(float(value) / float(true_value.detach()) - 1) < BARS[dtype]
    assert found.keys() == true.keys() - ({"scale"} if method.frozen_scale else set())
    for side, grad in found.items():
        off = float((grad.double() - true[side]).norm() / true[side].norm())
        assert off < BARS[dtype], f"{side}: {off:.1e}"
