"""What the loss benchmark measures, in fresh processes: `python -m clipscale.bench.loss_work FOLDER RANK` does the job in FOLDER.

Letters: N pairs of all ranks, n of this rank, D feature width.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from clipscale.bench.loss_methods import DTYPES, Case, LossFunction, Method, methods, variant
from clipscale.bench.loss_profile import profiled
from clipscale.bench.memory import DeviceMemory, HostMemory, bound_memory, is_out_of_memory
from clipscale.bench.processes import job_in, leave
from clipscale.loss.exchange import Communicator
from clipscale.loss.reference import dense_contrastive_loss

PAIR_COSINE = 0.2
"""Of an image and its text: with scale 100 and D = 512 a loss of about one at N = 16k."""
SMALL = 64
"""Pairs of a rank in the step that warms a method up."""
GEMM_SIDE = {"cpu": 2048, "cuda": 8192}
PRODUCTS = {"cpu": 4, "cuda": 32}
"""Matrix products of a burst, back to back: a device that lowers its clock under load has lowered it for them too."""
PANEL_SIDE = {"cpu": 2048, "cuda": 16384}
"""Rows and columns of the matrix product that is of the loss's own shape: (rows, D) times (D, columns)."""


@dataclass
class Job:
    """What one process, or one set of ranks, is to do."""

    case: Case
    probed: list[str] = field(default_factory=list)
    """Methods whose memory, error, matmuls and bytes are wanted."""
    timed: list[str] = field(default_factory=list)
    """Methods whose time is wanted, in turns; those that failed when probed are left out."""
    repeats: int = 0
    reference: int = 0
    """Largest N that is compared with the oracle."""
    memory: int | None = None
    """Bytes that a process on the CPU may take beyond what torch itself takes."""
    threads: int | None = None
    """Of a process; None: torch's choice."""
    profile: bool = False
    """One more step of each method under torch's profiler."""


def main(folder: Path, rank: int) -> int:
    record = job_in(folder)
    job = Job(**record | {"case": Case(**record["case"])})
    work = Work(job, rank, folder / "store")
    complete = work.do()
    leave(folder, work.answer(), rank)
    if not complete:
        os._exit(1)  # without a farewell: the other ranks are waiting for this one
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


class RankStoppedError(Exception):
    """A method failed on this rank, so that this rank and the others are no longer in step."""


class Work:
    """A job on one rank."""

    def __init__(self, job: Job, rank: int, store: Path) -> None:
        self.job, self.case, self.rank = job, job.case, rank
        if job.threads is not None:
            torch.set_num_threads(job.threads)
        self.device = torch.device("cpu")
        if self.case.device == "cuda":
            self.device = torch.device("cuda", rank)
            torch.cuda.set_device(self.device)
            torch.backends.cuda.matmul.fp32_precision = "tf32" if self.case.dtype == "tf32" else "ieee"
        if self.case.ranks > 1 and not dist.is_initialized():
            backend = "nccl" if self.case.device == "cuda" else "gloo"
            dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=self.case.ranks)
        variants = {name: variant(name) for name in (*job.probed, *job.timed)}
        self.known = methods() | {name: method for name, method in variants.items() if method is not None}
        self.losses: dict[str, LossFunction] = {}
        self.found: dict[str, dict[str, Any]] = {}
        self.gemm_s: list[float] = []
        """Seconds of bursts of square products, one after each step that was timed."""
        self.panel_s: list[float] = []
        """The same of products of the loss's own shape."""

    def do(self) -> bool:
        """The whole job; False where several ranks had to stop before its end."""
        if self.case.device == "cpu" and self.job.memory is not None:
            bound_memory(self.job.memory)
        try:
            for name in self.job.probed:
                self.attempt(name, self.probe)
            if self.job.timed:
                self.rounds()
            for name in self.job.timed if self.job.profile else []:
                if self.found[name]["status"] == "ok":
                    self.attempt(name, self.profile)
        except RankStoppedError:
            for record in self.found.values():
                if record["status"] == "ok":
                    record |= {
                        "status": "failed",
                        "reason": "another method failed and stopped the ranks",
                        "traceback": "",
                    }
            return False
        return True

    def answer(self) -> dict[str, Any]:
        panel = {"rows": self.panel_side, "width": self.case.d, "seconds": self.panel_s}
        gemm = {"side": self.gemm_side, "products": self.products, "seconds": self.gemm_s, "panel": panel}
        return {"methods": self.found, "gemm": gemm, "threads": torch.get_num_threads()}

    def attempt(self, name: str, what: Callable[[Method], dict[str, Any]]) -> None:
        """`what(method)` into the record of the method, or why there is nothing."""
        record = self.found.setdefault(name, {"status": "ok"})
        try:
            record |= what(self.known[name])
        except Exception as error:
            status = "out of memory" if is_out_of_memory(error) else "failed"
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            record |= {"status": status, "reason": reason[:300], "traceback": traceback.format_exc()}
            if self.case.ranks > 1:
                raise RankStoppedError from error

    # ---- what is measured ----

    def probe(self, method: Method) -> dict[str, Any]:
        """Memory and bytes of one step after a warm-up; matmuls and error of another."""
        case = self.case
        for pairs in (min(SMALL * case.ranks, case.n), *([case.n] if method.whole_warmup else [])):
            self.step(method, self.inputs(method, pairs))
        inputs = self.inputs(method, case.n)
        memory = DeviceMemory(self.device) if self.device.type == "cuda" else HostMemory()
        sent = Communicator.bytes_sent
        loss = self.loss_of(method)(*inputs)
        forward = memory.growth()
        grads = self.gradients(loss, inputs)
        held = sum(grad.nbytes for grad in grads.values())
        backward = memory.growth()
        sent = Communicator.bytes_sent - sent
        del loss, grads
        found: dict[str, Any] = {
            "growth_bytes": max(forward, backward),
            "extra_bytes": max(forward, backward - held, 0),
            "sent_bytes": sent if method.own and case.ranks > 1 else None,
            "units": None,
            "error": None,
            "errors": None,
        }
        if method.visible(case):
            with FlopCounterMode(display=False) as counter:
                self.step(method, inputs)
            found["units"] = counter.get_total_flops() / unit_flops(case)
        if case.n <= self.job.reference and (method.own or case.ranks == 1):
            found["errors"] = self.errors(method, *self.step(method, inputs), inputs)
            found["error"] = max(found["errors"].values(), default=None)
        return found

    def rounds(self) -> None:
        """Forward and backward seconds of every method in turns, and after each of a burst of square products and one of panels.

        A first round warms up and is not kept; it is left out where the same process has probed every method over the whole batch.
        Every second round goes backwards through the methods.
        """
        names = [name for name in self.job.timed if self.found.setdefault(name, {"status": "ok"})["status"] == "ok"]
        square = [torch.randn(self.gemm_side, self.gemm_side, device=self.device).to(self.dtype) for _ in "ab"]
        panel = [torch.randn(self.panel_side, self.case.d, device=self.device).to(self.dtype) for _ in "ab"]
        self.burst(*square), self.burst(panel[0], panel[1].T)
        inputs = {name: self.inputs(self.known[name], self.case.n) for name in names}
        for number in range(int(set(names) <= set(self.job.probed)), self.job.repeats + 1):
            for name in names if number % 2 else reversed(names):
                if self.found[name]["status"] == "ok":
                    self.attempt(name, partial(self.timed, inputs[name], number > 0))
                if number:
                    self.gemm_s.append(self.burst(*square))
                    self.panel_s.append(self.burst(panel[0], panel[1].T))

    def burst(self, a: Tensor, b: Tensor) -> float:
        """Seconds of `products` products of two matrices, begun by all ranks at once."""
        out = torch.empty(len(a), b.shape[1], dtype=a.dtype, device=self.device)
        start = self.now(together=True)
        for _ in range(self.products):
            torch.mm(a, b, out=out)
        return self.now() - start

    def profile(self, method: Method) -> dict[str, Any]:
        inputs = self.inputs(method, self.case.n)
        return {"profile": profiled(lambda: self.step(method, inputs), self.device)}

    def timed(self, inputs: Sequence[Tensor], keep: bool, method: Method) -> dict[str, Any]:
        start = self.now(together=True)
        loss = self.loss_of(method)(*inputs)
        middle = self.now()
        self.gradients(loss, inputs)
        stop = self.now()
        record = self.found[method.name]
        times = [(middle - start, stop - middle)] if keep else []
        return {
            "forward_s": record.get("forward_s", []) + [forward for forward, _ in times],
            "backward_s": record.get("backward_s", []) + [backward for _, backward in times],
        }

    def now(self, together: bool = False) -> float:
        """Seconds, once the device has done all that was asked of it; `together`: once all ranks have come."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if together and dist.is_initialized():
            dist.barrier()
        return time.perf_counter()

    # ---- what is computed ----

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.case.dtype]

    @property
    def gemm_side(self) -> int:
        return GEMM_SIDE[self.case.device]

    @property
    def products(self) -> int:
        return PRODUCTS[self.case.device]

    @property
    def panel_side(self) -> int:
        return min(PANEL_SIDE[self.case.device], self.case.n)

    def loss_of(self, method: Method) -> LossFunction:
        if method.name not in self.losses:
            self.losses[method.name] = method.build(self.case, self.rank)
        return self.losses[method.name]

    def inputs(self, method: Method, pairs: int) -> list[Tensor]:
        """This rank's part of `pairs` pairs of unit rows, and the logit scale; all want a gradient, but for frozen images."""
        own = pairs // self.case.ranks
        u, v = (x[self.rank * own :][:own].to(self.dtype) for x in unit_pairs(pairs, self.case, self.device))
        scale = torch.tensor(self.scale_of(method), device=self.device)
        return [u.clone().requires_grad_(not method.frozen_images), v.clone().requires_grad_(), scale.requires_grad_()]

    def scale_of(self, method: Method) -> float:
        return self.case.scale if method.scale is None else method.scale

    def gradients(self, loss: Tensor, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        wanted = {name: x for name, x in zip(("images", "texts", "scale"), inputs) if x.requires_grad}
        return dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values()))))

    def step(self, method: Method, inputs: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        loss = self.loss_of(method)(*inputs)
        return loss.detach(), self.gradients(loss, inputs)

    def errors(
        self, method: Method, value: Tensor, grads: dict[str, Tensor], inputs: Sequence[Tensor]
    ) -> dict[str, float]:
        """Relative distance (Frobenius norm) of value and gradients from the oracle's in float64, on the same rounded features.

        The scale's gradient is a sum over rows of either sign; its yardstick is the sum of their absolute values. Empty where the
        oracle, whose memory is several matrices in float64, does not fit: that is no failure of the method.
        """
        if dist.is_initialized():
            dist.all_reduce(grads["scale"])  # shares
        u, v = (self.everyone(x.detach()).double().requires_grad_() for x in inputs[:2])
        scale = inputs[2].detach().double().requires_grad_()
        try:
            true_value = dense_contrastive_loss(u, v, scale, logit_bias=method.bias, objective=method.objective)
            true = self.gradients(true_value, [u, v, scale])
        except RuntimeError as error:
            if is_out_of_memory(error):
                return {}
            raise
        own = len(inputs[0])
        rows = slice(self.rank * own, (self.rank + 1) * own)
        yardstick = float((u.detach() * true["images"]).sum(1).abs().sum() / scale.detach())
        found = {
            "value": abs(float(value) / float(true_value.detach()) - 1),
            "scale": abs(float(grads["scale"]) - float(true["scale"])) / yardstick,
        }
        for name in ("images", "texts"):
            if name in grads:
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


def unit_flops(case: Case) -> float:
    """One unit: the multiplications and additions of all scores once."""
    return 2.0 * case.n * case.n * case.d


def unit_pairs(pairs: int, case: Case, device: torch.device) -> tuple[Tensor, Tensor]:
    """Unit rows u and v (pairs, D), float32, the same on every rank, with <u_i, v_i> near PAIR_COSINE and the rest unrelated."""
    generator = torch.Generator(device).manual_seed(0)
    u, v = (F.normalize(torch.randn(pairs, case.d, generator=generator, device=device), dim=1) for _ in range(2))
    v = F.normalize(PAIR_COSINE * u + (1 - PAIR_COSINE**2) ** 0.5 * v, dim=1)
    return u, v


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
