"""What a plain step's operations compute and move, counted without a device, and the time that follows: a roofline.

    python benchmarks/traffic.py models=vit-b16,vit-l14 precision=bf16

Forward and backward pass of both towers run operation by operation on tensors without memory, as a GPU would be asked
to. Matrix products and attention count by their FLOP; everything else by the bytes that it reads and writes, each
operand once. Of two chunk sizes the slope is what a sample costs. At least so long takes a sample:

    FLOP / (rate of matrix products) + bytes / (rate of copies)

Compiled: the blocks' bytes are counted in inductor's fused kernels (`inductor.py`), the rest of a tower stays eager.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from measure import Row, main, model_preset
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from clipscale.models.towers import ClipModel, build_model
from clipscale.step.precision import Precision
from clipscale.tools.plan.memory_tracker import cuda_autocast, without_memory

DEFAULTS = {
    "models": "vit-b32,vit-b16,vit-l14,vit-h14,siglip-b16",  # presets of conf/model
    "precision": "bf16",  # or fp16, fp32
    "tflops": 785.0,  # rate of a matrix product, 10^12 FLOP/s: one H100's, measured (docs/benchmarks/gpu)
    "tbs": 3.0,  # rate of a copy, 10^12 bytes/s read and written: the same
    "out": "runs/bench",
}
CHUNKS = 8, 16
# Inductor fuses by size, too.
COMPILED_CHUNKS = 256, 512
CPU = torch.device("cpu")
# Operations beside products, by kind; all others are `other`.
KINDS = {
    "gelu": ("gelu", "gelu_backward", "sigmoid", "silu"),
    "norm": ("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm"),
    "sum": ("sum", "mean"),
    "copy": ("_to_copy", "copy_", "clone", "cat", "stack", "_unsafe_index", "constant_pad_nd", "slice_backward"),
    "add": ("add", "add_", "mul", "mul_", "addcmul", "addcmul_"),
}


def kind_of(name: str) -> str:
    return next((kind for kind, names in KINDS.items() if name in names), "other")


class Counter(TorchDispatchMode):
    """`flop` of matrix products and attention; `moved`: bytes of everything else by kind; views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.flop = 0
        self.moved: dict[str, int] = defaultdict(int)
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        if func.is_view or packet.__name__ == "_unsafe_view" or not tensors or func.namespace != "aten":
            return out
        self.operations += 1
        if packet in flop_registry:
            self.flop += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        else:
            # An operand that is written in place is read and written.
            self.moved[kind_of(packet.__name__)] += sum(x.numel() * x.element_size() for x in tensors)
        return out


def counted(tower: nn.Module, inputs: Tensor, precision: str) -> Counter:
    with Counter() as counter, cuda_autocast(), Precision.set_up(precision, CPU).autocast():
        features = tower(inputs)
    upstream = torch.empty_like(features)
    with counter:
        features.backward(upstream)
    tower.zero_grad()  # the first gradients of a step are not added to others
    return counter


def compiled(clip: ClipModel, precision: str) -> Row:
    """Counts for one sample: MB of each tower in its blocks, eager and fused, by pass; kernels of a chunk's blocks; and
    MB of the kernels of one block of the image tower. `clip` has no values; call it inside of its FakeTensorMode."""
    from inductor import block_calls, fused_blocks  # it loads torch's compiler, and chunks.py compiles nothing

    towers: Row = {}
    kernels = 0
    for name, tower in (("image", clip.image), ("text", clip.text)):
        fused = []
        for size in COMPILED_CHUNKS:
            calls = block_calls(tower, tower.encoder, random_inputs(clip, size)[name], precision)
            fused.append(fused_blocks(calls, precision))
        eager = [
            sum(sum(counted(call, call.first, precision).moved.values()) for call in calls)
            for size in CHUNKS
            if (calls := block_calls(tower, tower.encoder, random_inputs(clip, size)[name], precision))
        ]
        less, more = fused
        samples = COMPILED_CHUNKS[1] - COMPILED_CHUNKS[0]
        towers[name] = {
            "eager": round((eager[1] - eager[0]) / (CHUNKS[1] - CHUNKS[0]) / 1e6, 1),
            **{each: round((more.bytes[each] - less.bytes[each]) / samples / 1e6, 1) for each in more.bytes},
        }
        kernels += more.kernels
        if name == "image":
            groups = [(each, what, round(size / COMPILED_CHUNKS[1] / 1e6, 2)) for each, what, size in more.groups]
    return {"blocks": towers, "kernels": kernels, "groups": [group for group in groups if group[2] >= 0.1]}


def random_inputs(clip: ClipModel, size: int) -> dict[str, Tensor]:
    side = clip.image_size
    return {
        "image": torch.empty(size, 3, side, side, dtype=torch.uint8),
        "text": torch.empty(size, clip.context_length, dtype=torch.long),
    }


def measure(model: str, precision: str, tflops: float, tbs: float) -> list[Row]:
    """Counts for one sample: GFLOP, MB by kind, operations of a chunk, and milliseconds; the same compiled."""
    counts = {}
    config = model_preset(model)
    with without_memory():
        clip = build_model(config)
        for size in CHUNKS:
            inputs = random_inputs(clip, size)
            counts[size] = [
                counted(clip.image, inputs["image"], precision),
                counted(clip.text, inputs["text"], precision),
            ]
    less, more = (counts[size] for size in CHUNKS)
    samples = CHUNKS[1] - CHUNKS[0]
    flop = sum(b.flop - a.flop for a, b in zip(less, more, strict=True)) / samples
    towers: Row = {}
    for tower, a, b in zip(("image", "text"), less, more, strict=True):
        towers[tower] = {kind: round((b.moved[kind] - a.moved[kind]) / samples / 1e6, 1) for kind in (*KINDS, "other")}
    moved = {kind: towers["image"][kind] + towers["text"][kind] for kind in (*KINDS, "other")}
    total = sum(moved.values())
    least = flop / (1e9 * tflops) + total / (1e3 * tbs)
    row: Row = {"gflop": round(flop / 1e9, 2), "mb": round(total, 1), "mb_by_kind": moved, "mb_by_tower": towers}
    row |= {"operations": sum(each.operations for each in more), "least_ms": round(least, 4)}
    with torch.device("meta"):
        clip = build_model(config)
    with FakeTensorMode(allow_non_fake_inputs=True):  # torch compiles nothing under a mode that counts
        row["compiled"] = compiled(clip.to_empty(device=CPU), precision)
    saved = sum(each["eager"] - each["forward"] - each["backward"] for each in row["compiled"]["blocks"].values())
    row["compiled"] |= {"mb": round(total - saved, 1), "least_ms": round(least - saved / (1e3 * tbs), 4)}
    return [row]


def plan(settings: SimpleNamespace) -> tuple[str, list[Row]]:
    common = {key: value for key, value in vars(settings).items() if key not in ("models", "out")}
    return "traffic", [{"model": name, **common} for name in settings.models.split(",")]


COLUMNS = {
    "model": lambda row: row["model"],
    "GFLOP": lambda row: f"{row['gflop']:.1f}",
    "MB": lambda row: f"{row['mb']:.0f}",
    **{kind: lambda row, kind=kind: f"{row['mb_by_kind'][kind]:.0f}" for kind in (*KINDS, "other")},  # type: ignore[misc]
    "operations": lambda row: str(row["operations"]),
    "samples/s at most": lambda row: f"{1e3 / row['least_ms']:,.0f}",
    "MB compiled": lambda row: f"{row['compiled']['mb']:.0f}",
}

if __name__ == "__main__":
    main(DEFAULTS, plan, measure, COLUMNS)
