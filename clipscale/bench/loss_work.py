"""What the loss benchmark measures in a fresh process: time, memory, matmuls, bytes sent, and error against the float64 oracle.

Letters: N pairs of all ranks, n of this rank, D feature width.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from clipscale.bench.harness import Job
from clipscale.bench.loss_methods import DTYPES, Case, LossFunction, Method, find
from clipscale.bench.worker import Meter, Worker, is_out_of_memory, wait
from clipscale.loss.exchange import Communicator
from clipscale.loss.reference import dense_contrastive_loss

PAIR_COSINE = 0.2
"""Of an image and its text: with scale 100 and D = 512 a loss of about one at N = 16k."""
SMALL = 64
"""Pairs of a rank in the step that warms a method up before its memory is measured."""
GEMM_SIDE = {"cpu": 2048, "cuda": 8192}
PRODUCTS = {"cpu": 4, "cuda": 32}
"""Matrix products of a burst, back to back: a device that lowers its clock under load has lowered it for them too."""


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
        self.known = {method.name: method for method in find([*(name for name, _ in job.probed), *job.timed])}
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
        if self.case.ranks > 1 and record["status"] != "ok":
            print(f"{name} stopped the ranks: {record['reason']}", flush=True)  # the reason of all that is left
            os._exit(1)

    def meet(self) -> None:
        if dist.is_initialized():
            dist.barrier()

    # ---- what is measured ----

    def probe(self, name: str, size: int) -> None:
        """Memory and bytes of one step after a warm-up; matmuls and error of another."""
        loss, case, record = self.variant(name), self.case, self.record(name)
        for pairs in (min(SMALL * case.ranks, size), *([size] if loss.method.compiled else [])):
            self.run(loss, pairs)
        inputs = loss.inputs(size)
        sent, meter = Communicator.bytes_sent, Meter(self.device, self.memory())
        value, grads = loss.step(inputs, meter)
        sent = Communicator.bytes_sent - sent
        forward, backward = (meter.peak[part] - meter.before["forward"] for part in ("forward", "backward"))
        held = sum(grad.nbytes for grad in grads.values())
        if loss.method.objective == "sigmoid":  # whose gradients are made in the forward pass
            forward -= held
        record["memory"][str(size)] = meter.growth()
        record["extra_bytes"] = max(forward, backward - held, 0)
        record["sent_bytes"] = sent if loss.method.own and case.ranks > 1 else None
        record |= {"units": None, "error": None, "errors": None}
        if loss.method.visible(case):
            with FlopCounterMode(display=False) as counter:
                loss.step(inputs, Meter(self.device))
            record["units"] = counter.get_total_flops() / unit_flops(case)
        if case.n <= self.job.about["reference"] and (loss.method.own or case.ranks == 1):
            record["errors"] = self.errors(loss.method, value, grads, inputs)
            record["error"] = max(record["errors"].values(), default=None)

    def ready(self, case: str) -> None:
        """A whole step warms up, unless the probe was one."""
        record = self.record(case)
        record["size"] = self.case.n
        if not record["memory"]:
            self.run(self.variant(case), self.case.n)

    def measured(self, case: str, meter: Meter) -> None:
        """After every step a burst of square products, begun by all ranks at once. The first burst warms up."""
        shape, dtype = (self.gemm["side"],) * 2, DTYPES[self.case.dtype]
        a, b, out = (torch.randn(shape, device=self.device).to(dtype) for _ in range(3))
        for _ in range(1 if self.gemm["seconds"] else 2):
            wait(self.device)
            self.meet()
            start = time.perf_counter()
            for _ in range(self.gemm["products"]):
                torch.mm(a, b, out=out)
            wait(self.device)
            seconds = time.perf_counter() - start
        self.gemm["seconds"].append(seconds)

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
