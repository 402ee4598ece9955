"""The memory tracker, and CPU tensors without values that take memory like a GPU's."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clipscale.loss.api import contrastive_loss
from clipscale.loss.runtime import LossRuntime, running_on
from clipscale.loss.triton.tuning import INTERPRETER, TileShape
from clipscale.tools.plan.memory_tracker import FREQUENT, DryRunRuntime, MemoryTracker, cuda_autocast, without_memory
from tests.loss.cases import Tiled


def test_a_storage_counts_once_and_until_its_last_view_is_gone() -> None:
    with MemoryTracker() as memory:
        x = torch.zeros(1000)  # 4000 bytes: 8 x 512
        part = x[:10]
        assert memory.live == 4096
        del x
        assert memory.live == 4096
        y = part + 1
        assert memory.live == 4096 + 512
        del part, y
        assert (memory.live, memory.peak) == (0, 4096 + 512)


@pytest.mark.parametrize(("autocast", "dtype"), [(nullcontext, torch.bfloat16), (cuda_autocast, torch.float32)])
def test_autocast_widens_a_layer_norm_only_on_cuda(autocast: Any, dtype: torch.dtype) -> None:
    with without_memory(), torch.autocast("cpu", dtype=torch.bfloat16), autocast():
        assert F.layer_norm(torch.zeros(4, 64, dtype=torch.bfloat16), (64,)).dtype == dtype


def peak_of_loss(memory: MemoryTracker, rows: int, cols: int, width: int, objective: str, runtime: LossRuntime) -> int:
    u, v = (torch.ones(count, width).requires_grad_() for count in (rows, cols))
    scale, bias = (torch.tensor(value).requires_grad_() for value in (10.0, -10.0))
    memory.take_peak()
    before = memory.live
    runtime.max_partial_bytes = 2**13
    options = {"objective": objective, "backend": "triton", "check": False}
    with running_on(runtime):
        loss = contrastive_loss(u, v, scale, logit_bias=bias, **options)
    loss.backward()
    return memory.take_peak() - before


SMALL = replace(INTERPRETER, panel_bytes=2**15)


class WithoutKernels(Tiled):
    """This machine, with kernels that do nothing: Triton's interpreter takes memory itself."""

    def launch(self, *arguments: Any, **constants: Any) -> None:
        pass


class DryInterpreter(DryRunRuntime):
    def tile_shape(self, device: torch.device, dtype: torch.dtype) -> TileShape:
        return SMALL


@pytest.mark.parametrize("objective", ["softmax", "softmax_image", "sigmoid"])
@pytest.mark.parametrize("shape", [(256, 256, 32), (200, 300, 24), (128, 128, 20)], ids=str)
def test_the_triton_backend_takes_the_buffers_of_a_real_run(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], objective: str
) -> None:
    """The run has real tensors and many small panels."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with MemoryTracker() as memory:
        measured = peak_of_loss(memory, *shape, objective, WithoutKernels(SMALL))
    with without_memory() as memory:
        predicted = peak_of_loss(memory, *shape, objective, DryInterpreter(90))
    assert predicted == pytest.approx(measured, rel=0.01), f"predicted {predicted} bytes, measured {measured}"


def test_views_and_updates_take_no_memory() -> None:
    with without_memory() as tracker:
        x = torch.empty(1000)
        halves = [each for _ in range(2) for each in x.split(500)]
        x += 1
        assert tracker.live == 4096
        assert [half.storage_offset() for half in halves] == [0, 500, 0, 500]
        total = (x * 2).requires_grad_().exp().sum()  # exp saves its result
        assert tracker.live == 3 * 4096 + 512 and total.shape == ()


def test_tensors_of_any_size_take_no_memory() -> None:
    with without_memory() as tracker:
        x = torch.ones(2**45)
        both = x + x
        assert both.shape == (2**45,) and tracker.live == 2 * 4 * 2**45


ARGUMENTS: dict[str, Callable[[Tensor], tuple[Any, ...]]] = {
    "addmm": lambda x: (x[0], x, x.t()),
    "baddbmm": lambda x: (x[None], x[None], x.t()[None]),
    "mm": lambda x: (x, x.t()),
    "linalg_vector_norm": lambda x: (x,),
    "sum": lambda x: (x, [0], True),
    "gelu_backward": lambda x: (x, x),
    **dict.fromkeys(("gelu", "empty_like", "zeros_like"), lambda x: (x,)),
    **dict.fromkeys(("add", "mul", "div", "add_"), lambda x: (x, x[:1])),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frequent_operations_give_what_a_cpu_gives(dtype: torch.dtype) -> None:
    """Shape, strides and type, of transposed operands, too."""
    for operation in sorted(FREQUENT, key=str):
        name = operation.overloadpacket.__name__
        shape = (1, 4, 4) if name == "baddbmm" else (4, 4)
        has_out = operation._overloadname == "out"
        arguments = ARGUMENTS.get(name, lambda x: (x, x))(torch.ones(4, 4, dtype=dtype).t())
        expected = operation(*arguments, **({"out": torch.ones(shape, dtype=dtype)} if has_out else {}))
        with without_memory():
            dry = ARGUMENTS.get(name, lambda x: (x, x))(torch.ones(4, 4, dtype=dtype).t())
            out = operation(*dry, **({"out": torch.ones(shape, dtype=dtype)} if has_out else {}))
            assert out.device == expected.device
        assert (out.shape, out.stride(), out.dtype) == (expected.shape, expected.stride(), expected.dtype), name


def test_each_output_of_an_operation_counts() -> None:
    with MemoryTracker() as memory:
        both = torch.zeros(1000).sort()  # values of 4 bytes and places of 8
        assert memory.live == 4096 + 8192 and len(both) == 2


def test_a_number_that_is_asked_of_a_tensor_without_values_is_a_constant() -> None:
    with without_memory():
        x = torch.zeros(3)
        assert (x.sum().item(), x.long().sum().item(), bool((x == 0).all())) == (1.0, 0, False)
