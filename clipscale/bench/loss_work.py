"""What the loss benchmark measures in a fresh process: time, memory, matmuls, bytes sent, and error against the float64 oracle.

Letters: N pairs of all ranks, n of this rank, D feature width.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from clipscale.bench.harness import Job, Task
from clipscale.bench.loss_methods import DTYPES, Case, LossFunction, Method, find
from clipscale.bench.memory import is_out_of_memory
from clipscale.bench.worker import Meter, Worker, wait
from clipscale.loss.exchange import Communicator
from clipscale.loss.reference import dense_contrastive_loss

PAIR_COSINE = 0.2
"""Of an image and its text: with scale 100 and D = 512 a loss of about one at N = 16k."""
SMALL = 64
"""Pairs of a rank in the step that warms a method up before its memory is measured."""
GEMM_SIDE = {"cpu": 2048, "cuda": 8192}
PRODUCTS = {"cpu": 4, "cuda": 32}
"""Matrix products of a burst, back to back: a device that lowers its clock under load has lowered it for them too."""


def work(task: Task) -> None:
    job = Job(**task.job)
    if job.ranks > 1:
        backend = "nccl" if job.device == "cuda" else "gloo"
        store = f"file://{task.folder / 'store'}"
        dist.init_process_group(backend, init_method=store, rank=task.rank, world_size=job.ranks)
    LossWorker(job, task.rank, task.leave).work()
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass
class Loss:
    """A method in a case, on one rank."""

    method: Method
    case: Case
    rank: int
    device: torch.device

    def __post_init__(self) -> None:
        scale = self.method.scale or self.case.scale
        self._loss: LossFunction = self.method.build(replace(self.case, scale=scale), self.rank)

    def inputs(self, size: int) -> list[Tensor]:
        """This rank's part of `size` pairs of unit rows, and the logit scale; all want a gradient, but for what is frozen."""
        own = size // self.case.ranks
        u, v = (x[self.rank * own :][:own] for x in unit_pairs(size, self.case.d, self.device))
        u, v = (x.to(DTYPES[self.case.dtype]).clone() for x in (u, v))
        scale = torch.tensor(self.method.scale or self.case.scale, device=self.device)
        u.requires_grad_(not self.method.frozen_images)
        return [u, v.requires_grad_(), scale.requires_grad_(not self.method.frozen_scale)]

    def step(self, inputs: Sequence[Tensor], meter: Meter) -> tuple[Tensor, dict[str, Tensor]]:
        """The value and the gradients."""
        loss = self._loss(*inputs)
        meter("forward")
        grads = gradients(loss, inputs)
        meter("backward")
        return loss.detach(), grads


class LossWorker(Worker):
    """A job's methods in one case, on one rank."""

    def __init__(self, job: Job, rank: int = 0, leave: Any = lambda _: None) -> None:
        super().__init__(job, rank, leave)
        self.case = Case(**job.about["case"])
        if self.device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = self.case.dtype == "tf32"
        self.known = {method.name: method for method in find(job.names)}
        self.losses: dict[str, Loss] = {}
        kind = self.device.type
        self.gemm: dict[str, Any] = {"side": GEMM_SIDE[kind], "products": PRODUCTS[kind], "seconds": []}

    def facts(self) -> dict[str, Any]:
        return {"gemm": self.gemm}

    def variant(self, case: str) -> Loss:
        if case not in self.losses:
            self.losses[case] = Loss(self.known[case], self.case, self.rank, self.device)
        return self.losses[case]

    def attempt(self, name: str, what: Any) -> None:
        """A method that fails on one of several ranks ends the job: the others wait for it in a collective."""
        super().attempt(name, what)
        record = self.record(name)
        if self.case.ranks > 1 and record["status"] in ("failed", "out of memory"):
            self.found = dict.fromkeys(
                self.job.names, record | {"reason": f"{name} stopped the ranks: {record['reason']}"}
            )
            self.leave()
            os._exit(1)

    def agreed(self, value: float) -> float:
        if not dist.is_initialized():
            return value
        found = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.item()

    def meet(self) -> None:
        wait(self.device)
        if dist.is_initialized():
            dist.barrier()

    # ---- what is measured ----

    def probe(self, name: str, size: int) -> None:
        """Memory and bytes of one step after a warm-up; matmuls and error of another."""
        loss, case, record = self.variant(name), self.case, self.record(name)
        for pairs in (min(SMALL * case.ranks, size), *([size] if loss.method.fixed_shape else [])):
            self.seconds(loss, pairs)
        inputs = loss.inputs(size)
        sent, meter = Communicator.bytes_sent, Meter(self.device, self.memory())
        value, grads = loss.step(inputs, meter)
        sent = Communicator.bytes_sent - sent
        forward, backward = (meter.peak[part] - meter.before["forward"] for part in ("forward", "backward"))
        held = sum(grad.nbytes for grad in grads.values())
        if loss.method.objective == "sigmoid":  # whose gradients are made in the forward pass
            forward -= held
        record["memory"][str(size)], record["probe_s"] = meter.growth(), sum(meter.seconds.values())
        record |= {"growth_bytes": meter.growth(), "extra_bytes": max(forward, backward - held, 0)}
        record |= {"sent_bytes": sent if loss.method.own and case.ranks > 1 else None}
        record |= {"units": None, "error": None, "errors": None}
        if loss.method.visible(case):
            with FlopCounterMode(display=False) as counter:
                loss.step(inputs, Meter(self.device))
            record["units"] = counter.get_total_flops() / unit_flops(case)
        if case.n <= self.job.about["reference"] and (loss.method.own or case.ranks == 1):
            record["errors"] = self.errors(loss.method, value, grads, inputs)
            record["error"] = max(record["errors"].values(), default=None)

    def ready(self, case: str) -> None:
        """A whole step warms up, unless the probe was one, and says what the next one takes."""
        record = self.record(case)
        record["size"] = self.case.n
        self.expected[case] = record.get("probe_s") or self.seconds(self.variant(case), self.case.n)

    def measured(self, case: str, meter: Meter) -> None:
        """After every step a burst of square products, begun by all ranks at once. The first burst warms up."""
        shape, dtype = (self.gemm["side"],) * 2, DTYPES[self.case.dtype]
        a, b, out = (torch.randn(shape, device=self.device).to(dtype) for _ in range(3))
        for _ in range(1 if self.gemm["seconds"] else 2):
            self.meet()
            start = time.perf_counter()
            for _ in range(self.gemm["products"]):
                torch.mm(a, b, out=out)
            wait(self.device)
            seconds = time.perf_counter() - start
        self.gemm["seconds"].append(seconds)

    def finish(self) -> None:
        for name in self.job.timed if self.job.about["profile"] else []:
            self.attempt(name, partial(self.profile, name))

    def profile(self, name: str) -> None:
        loss = self.variant(name)
        inputs = loss.inputs(self.case.n)
        self.record(name)["profile"] = profiled(lambda: loss.step(inputs, Meter(self.device)), self.device)

    def errors(
        self, method: Method, value: Tensor, grads: dict[str, Tensor], inputs: Sequence[Tensor]
    ) -> dict[str, float]:
        """Relative distance (Frobenius norm) of value and gradients from the oracle's in float64, on the same rounded features.

        The scale's gradient is a sum over rows of either sign; it is compared with the sum of their absolute values. Empty if the
        oracle, whose memory is several matrices in float64, does not fit: that is no failure of the method.
        """
        if dist.is_initialized() and "scale" in grads:
            dist.all_reduce(grads["scale"])  # its parts sum to the gradient
        u, v = (self.everyone(x.detach()).double().requires_grad_() for x in inputs[:2])
        scale = inputs[2].detach().double().requires_grad_()
        try:
            true_value = dense_contrastive_loss(u, v, scale, logit_bias=method.bias, objective=method.objective)
            true = gradients(true_value, [u, v, scale])
        except RuntimeError as error:
            if is_out_of_memory(error):
                return {}
            raise
        own = len(inputs[0])
        rows = slice(self.rank * own, (self.rank + 1) * own)
        found = {"value": abs(float(value) / float(true_value.detach()) - 1)}
        if "scale" in grads:
            magnitude = float((u.detach() * true["images"]).sum(1).abs().sum() / scale.detach())
            found["scale"] = abs(float(grads["scale"]) - float(true["scale"])) / magnitude
        for name in grads.keys() - {"scale"}:
            expected = true[name][rows]
            found[name] = float((grads[name].double() - expected).norm() / expected.norm())
        return found

    def everyone(self, x: Tensor) -> Tensor:
        """The rows of all ranks."""
        if self.case.ranks == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.case.ranks)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)


def gradients(loss: Tensor, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    wanted = {name: x for name, x in zip(("images", "texts", "scale"), inputs) if x.requires_grad}
    return dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values()))))


def unit_flops(case: Case) -> float:
    """One unit: the multiplications and additions of all scores once."""
    return 2.0 * case.n * case.n * case.d


def unit_pairs(pairs: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Unit rows u and v (pairs, D), float32, the same on every rank, with <u_i, v_i> near PAIR_COSINE and the rest unrelated."""
    generator = torch.Generator(device).manual_seed(0)
    u, v = (F.normalize(torch.randn(pairs, width, generator=generator, device=device), dim=1) for _ in range(2))
    v = F.normalize(PAIR_COSINE * u + (1 - PAIR_COSINE**2) ** 0.5 * v, dim=1)
    return u, v


# ---- where the time goes ----

SHOWN = 12
"""Kernels listed one by one; the rest are summed by kind."""
KINDS = {
    "score kernels": ("lse_kernel", "softmax_gradient_kernel", "special_gradient_kernel", "sigmoid_kernel"),
    "matrix products": ("gemm", "xmma", "cutlass", "nvjet", "cublas", "aten::mm", "aten::addmm", "aten::bmm", "aten::matmul"),
    "copies": ("memcpy", "memset", "copy_", "aten::fill_", "aten::zero_", "aten::cat"),
    "reductions": ("reduce", "logsumexp", "aten::sum", "aten::amax", "softmax", "aten::exp"),
}  # fmt: skip
"""Kind -> what its kernels' names contain. Score kernels are ours, a matrix product with what is done to each tile."""


def kind(name: str) -> str:
    low = name.lower()
    return next((group for group, signs in KINDS.items() if any(s in low for s in signs)), "elementwise and other")


def profiled(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Seconds of one step by kind of kernel and by kernel, on the device; on a CPU by operator, each without those it calls.

    `idle_s`: seconds of the step's span in which the device did nothing (launches that came too late).
    """
    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as found:
        step()
        wait(device)
    attribute, where = "self_device_time_total" if cuda else "self_cpu_time_total", torch.autograd.DeviceType.CUDA
    events = [event for event in found.key_averages() if (event.device_type == where) == cuda]
    seconds = {event.key: 1e-6 * getattr(event, attribute) for event in events}
    total = sum(seconds.values())
    kinds, kernels = Counter[str](), []
    for event in sorted(events, key=lambda event: -seconds[event.key]):
        share = seconds[event.key] / total if total else 0.0
        kinds[kind(event.key)] += share  # type: ignore[assignment]
        entry = {"name": event.key[:120], "kind": kind(event.key), "calls": event.count}
        kernels.append(entry | {"seconds": seconds[event.key], "share": share})
    kernels = [entry for entry in kernels[:SHOWN] if entry["seconds"]]
    result: dict[str, Any] = {"total_s": total, "kinds": dict(kinds.most_common()), "kernels": kernels}
    if cuda:
        spans = [event.time_range for event in found.events() if event.device_type == where]
        span = 1e-6 * (max(s.end for s in spans) - min(s.start for s in spans)) if spans else 0.0
        result["idle_s"] = max(0.0, span - total)
    return result
