"""Where a step's time goes, kernel by kernel, by torch's profiler."""

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

SHOWN = 12
"""Kernels listed one by one; the rest are summed by kind."""
OURS = ("lse_kernel", "softmax_gradient_kernel", "sigmoid_loss_kernel", "sigmoid_gradient_kernel")
PRODUCTS = ("gemm", "xmma", "cutlass", "nvjet", "cublas", "aten::mm", "aten::addmm", "aten::bmm", "aten::matmul")
MEMORY = ("memcpy", "memset", "copy_", "aten::fill_", "aten::zero_", "aten::cat")
REDUCTIONS = ("reduce", "merge_kernel", "logsumexp", "aten::sum", "aten::amax", "softmax", "aten::exp")


def kind(name: str) -> str:
    """`score kernels`: ours, a matrix product with what is done to each tile; `matrix products` of the library; and what goes round."""
    low = name.lower()
    groups = (("score kernels", OURS), ("matrix products", PRODUCTS), ("copies", MEMORY), ("reductions", REDUCTIONS))
    return next((group for group, signs in groups if any(sign in low for sign in signs)), "elementwise and other")


def profiled(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Seconds of one step by kind of kernel and by kernel, on the device; on a CPU by operator, each without those it calls.

    `idle_s` is what of the step's span the device did nothing (launches that came too late).
    """
    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as found:
        step()
        if cuda:
            torch.cuda.synchronize(device)
    entries: dict[str, tuple[int, float]] = {}
    for event in found.key_averages():
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        if on_device == cuda:
            entries[event.key] = (
                event.count,
                1e-6 * (event.self_device_time_total if cuda else event.self_cpu_time_total),
            )
    total = sum(seconds for _, seconds in entries.values())
    kinds: dict[str, float] = {}
    for name, (_, seconds) in entries.items():
        kinds[kind(name)] = kinds.get(kind(name), 0.0) + seconds
    largest = sorted(entries.items(), key=lambda entry: -entry[1][1])[:SHOWN]
    result: dict[str, Any] = {
        "total_s": total,
        "kinds": {name: kinds[name] / total for name in sorted(kinds, key=lambda name: -kinds[name])} if total else {},
        "kernels": [
            {"name": name[:120], "kind": kind(name), "calls": count, "seconds": seconds, "share": seconds / total}
            for name, (count, seconds) in largest
            if seconds
        ],
    }
    if cuda:
        spans = [e.time_range for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        span = 1e-6 * (max(s.end for s in spans) - min(s.start for s in spans)) if spans else 0.0
        result["idle_s"] = max(0.0, span - total)
    return result
