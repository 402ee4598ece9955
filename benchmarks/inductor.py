"""What inductor's fused kernels of a tower's blocks read and write on a GPU, by its own count, without a GPU.

Blocks are compiled as `clipscale/step/compiled.py` compiles them, on tensors without memory. torch's compiler traces
them as on a CPU, with CUDA's autocast; the graphs are then moved to a CUDA device that does not exist, and inductor
fuses and schedules them for one of the properties below. No code is generated. Parts of inductor that this uses are
private: another version of torch may need other ones.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._dynamo.device_interface import CudaInterface
from torch._functorch.aot_autograd import make_boxed_func
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from clipscale.step.compiled import innermost_blocks
from clipscale.step.precision import Precision
from clipscale.tools.plan.memory_tracker import cuda_autocast

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
# Inductor splits reductions by the number of multiprocessors.
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, warp_size=32, total_memory=80 << 30,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, regs_per_multiprocessor=65536,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, L2_cache_size=50 << 20,
)  # fmt: skip
# Parts of the names of library kernels, our own sum of weight gradients among them.
PRODUCTS = "mm", "scaled_dot_product", "convolution", "add_weight_grad"


@dataclass
class Fused:
    """Fused kernels of the compiled graphs that have run: their number and bytes in forward and backward passes."""

    kernels: int = 0
    # Calls of library kernels, such as matrix products and attention, which nothing else counts here.
    library_calls: int = 0
    bytes: dict[str, int] = field(default_factory=lambda: {"forward": 0, "backward": 0})
    # The kernels of each pass's first graph: the pass, the operations that a kernel computes, its bytes.
    groups: list[tuple[str, str, int]] = field(default_factory=list)


@contextmanager
def as_if_there_were_a_gpu() -> Iterator[None]:
    def always(value: Any) -> Any:
        return staticmethod(lambda *arguments, **keywords: value)

    answers = {
        "is_available": True,
        "current_device": 0,
        "get_device_properties": H100,
        "get_compute_capability": 90,
    }
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(CudaInterface, **{name: always(answer) for name, answer in answers.items()}))
        stack.enter_context(patch.object(CudaInterface.Worker, "get_device_properties", always(H100)))
        stack.enter_context(patch("torch._inductor.scheduler.has_triton", lambda: True))
        stack.enter_context(patch("torch.cuda.get_device_properties", lambda *_: H100))
        stack.enter_context(patch("torch.cuda.get_device_capability", lambda *_: (9, 0)))
        stack.enter_context(patch("torch.cuda.current_device", lambda: 0))
        yield


def scheduled(graph: torch.fx.GraphModule, inputs: list[Any], is_backward: bool) -> tuple[list[tuple[str, int]], int]:
    """The operations and bytes of each kernel that inductor would write for a graph on a GPU. Library kernels, such as
    products and attention, are not among them, and are the second result: their number. Changes the graph."""
    mode: Any = detect_fake_mode(inputs)
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": CUDA}

    def moved(x: Any) -> Any:
        return FakeTensor(mode, torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), CUDA)

    with torch.no_grad(), mode:
        there = [moved(x) if isinstance(x, Tensor) else x for x in inputs]
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*there)
    with V.set_fake_mode(mode), V.set_debug_handler(DebugContext()), as_if_there_were_a_gpu():
        compile_fx._recursive_post_grad_passes(graph, is_inference=False)
        compile_fx.record_original_output_strides(graph)
        lowering = GraphLowering(graph, example_inputs=there, is_backward=is_backward)
        with V.set_graph_handler(lowering):
            lowering.run(*there)
            lowering._update_scheduler()
            fused = [
                (operations_of(kernel), kernel.get_read_write_buffers_sizes())
                for kernel in lowering.scheduler.nodes
                if not is_product(kernel) and kernel.get_read_write_buffers_sizes()
            ]
            return fused, sum(map(is_product, lowering.scheduler.nodes))


def is_product(kernel: Any) -> bool:
    """A matrix product or attention."""
    name = str(getattr(kernel.node, "python_kernel_name", ""))
    return kernel.is_extern() and any(part in name for part in PRODUCTS)


def operations_of(kernel: Any) -> str:
    origins = {origin.target for part in kernel.get_nodes() if part.node for origin in part.node.get_origins()}
    packets = {getattr(origin, "overloadpacket", origin) for origin in origins}
    views = {"view", "reshape", "permute", "unsqueeze", "squeeze", "expand", "getitem", "as_strided", "select"}
    return " ".join(sorted({getattr(packet, "__name__", str(packet)) for packet in packets} - views))


def counting(fused: Fused) -> Callable[..., Any]:
    """An `inner_compile` of inductor that counts kernels when they run, and runs graphs operation by operation."""

    def inner_compile(graph: torch.fx.GraphModule, inputs: list[Any], **settings: Any) -> Any:
        is_backward = bool(settings.get("is_backward"))
        name = "backward" if is_backward else "forward"
        kernels, library_calls = scheduled(torch.fx.GraphModule(graph, copy.deepcopy(graph.graph)), inputs, is_backward)
        if name not in {each[0] for each in fused.groups}:
            fused.groups += [(name, operations, size) for operations, size in kernels]

        def run(*arguments: Any) -> Any:
            fused.kernels += len(kernels)
            fused.library_calls += library_calls
            fused.bytes[name] += sum(size for _, size in kernels)
            return graph.forward(*arguments)

        return make_boxed_func(run)

    return inner_compile


class Call(nn.Module):
    """A block with what a tower gave it besides its first input."""

    def __init__(self, block: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        super().__init__()
        self.block, self.keywords = block, keywords
        self.first = inputs[0].detach().requires_grad_()
        self.rest = inputs[1:]

    def forward(self, first: Tensor) -> Tensor:
        return self.block(first, *self.rest, **self.keywords)


def block_calls(tower: nn.Module, encoder: nn.Module, inputs: Tensor, precision: str) -> list[Call]:
    """The calls of a tower's blocks in a forward pass."""
    calls: list[Call] = []

    def note(block: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        calls.append(Call(block, inputs, keywords))

    hooks = [block.register_forward_pre_hook(note, with_kwargs=True) for block in innermost_blocks(encoder)]
    with torch.no_grad(), cuda_autocast(), Precision.set_up(precision, CPU).autocast():
        tower(inputs)
    for hook in hooks:
        hook.remove()
    return calls


def fused_blocks(calls: list[Call], precision: str) -> Fused:
    """What blocks read and write compiled, each in a graph of its own. Inside of a FakeTensorMode, of which the inputs
    and parameters are."""
    fused = Fused()
    backend = partial(compile_fx.compile_fx, inner_compile=counting(fused))
    torch._dynamo.reset()
    with warnings.catch_warnings(action="ignore"):
        for call in calls:
            call.block.compile(backend=backend, dynamic=False)
            with cuda_autocast(), Precision.set_up(precision, CPU).autocast():
                out = call(call.first)
            out.backward(torch.empty_like(out))
            call.zero_grad()
            call.block._compiled_call_impl = None
    return fused
