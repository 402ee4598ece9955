"""Time, memory, matmuls and error of contrastive losses, beside other people's.

    python benchmarks/loss.py n=16k d=512 methods=infcl,open_clip out=runs/bench
    python benchmarks/loss.py n=8k,64k,1M d=768 dtype=bf16 methods=infcl,open_clip,inf_cl

Methods: presets of conf/loss (infcl, clip, siglip, ...), backends (tiled, dense, triton), torch, compile, and the peers
open_clip, inf_cl, memeff and siglip_kernel. Letters: N pairs, D feature width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import product
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from measure import Meter, Row, counts, is_out_of_memory, kernels, main, ms, spread
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from clipscale import contrastive_loss
from clipscale.common.errors import UserError
from clipscale.common.text import did_you_mean
from clipscale.common.units import format_count
from clipscale.config.presets import conf_dir
from clipscale.loss.reference import dense_contrastive_loss

DEFAULTS = {
    "n": "1k,2k,4k,8k",
    "d": "512",
    "methods": "infcl,dense,open_clip,torch",
    "dtype": "fp32",  # fp32, tf32 (of other methods: ours is IEEE), bf16, fp16
    "device": "auto",
    "repeats": 5,
    "scale": 100.0,  # CLIP's logit scale at the end of training; the sigmoid loss has its own
    "reference": 4096,  # largest N whose error against float64 is measured
    "profile": 0,  # the slowest kernels to record of one more step
    "out": "runs/bench",
}
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# The cosine of an image and its text: with scale 100 and D = 512 a loss of about one at N = 16k.
PAIR_COSINE = 0.2
# Pairs up to which a further step counts FLOPs.
MAX_COUNTED = 2**18
# Units of 2 N N D FLOP that every method is credited with: scores forward; scores again and two gradients backward.
COUNTED_UNITS = 4
# How addmm is counted: torch 2.11 cannot count one with `out`.
ADDMM_FLOPS = {torch.ops.aten.addmm: lambda start, a, b, *rest, **options: 2 * a[0] * a[1] * b[1]}
GEMM = {"cpu": (2048, 4), "cuda": (8192, 32)}  # side and number of the matrix products after each step
SIGLIP_SCALE, SIGLIP_BIAS = 10.0, -10.0

# (image features (N, D), text features (N, D), logit scale ()) -> loss ().
LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Method:
    """A way to compute the loss."""

    # Makes the loss for a job. Imports what it needs.
    build: Callable[[Row], LossFunction]
    package: str = "torch"
    # Kernels for CUDA alone, whose matmuls torch cannot count.
    cuda: bool = False
    # N and D must be multiples of these.
    multiples: tuple[int, int] = (1, 1)
    sigmoid: bool = False


def preset(name: str) -> Method:
    """`loss=NAME`, as conf/loss has it."""
    values = yaml.safe_load((conf_dir() / "loss" / f"{name}.yaml").read_text(encoding="utf-8"))
    options = values.get("loss", values)
    sigmoid = options["objective"] == "sigmoid"
    bias = SIGLIP_BIAS if sigmoid else None
    return Method(lambda job: partial(contrastive_loss, check=False, logit_bias=bias, **options), sigmoid=sigmoid)


def backend(name: str) -> Method:
    return Method(lambda job: partial(contrastive_loss, check=False, backend=name), cuda=name == "triton")


def cross_entropy(u: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """CLIP's loss in three lines of torch, with one matrix of logits."""
    logits = scale * (u @ v.T)
    target = torch.arange(len(u), device=u.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def open_clip(job: Row) -> LossFunction:
    from open_clip.loss import ClipLoss

    # Not the module: torch's FLOP counter hooks into modules, and its hooks refuse autograd.grad.
    return ClipLoss().forward


def inf_cl(job: Row) -> LossFunction:
    from inf_cl import cal_flash_loss as one_sided

    return lambda u, v, scale: (one_sided(u, v, scale=scale).mean() + one_sided(v, u, scale=scale).mean()) / 2


def memeff(job: Row) -> LossFunction:
    from memeff import MemoryEfficientCLIPLoss

    loss = MemoryEfficientCLIPLoss(temperature=1 / job["scale"], normalized_inputs=True, stable=False)
    return lambda u, v, scale: loss(u, v) + 0 * scale  # it has no gradient of the scale


def siglip_kernel(job: Row) -> LossFunction:
    from siglip_kernel import fused_siglip_loss

    bias = torch.tensor(SIGLIP_BIAS, device=job["device"])
    return lambda u, v, scale: fused_siglip_loss(u, v, scale.log(), bias)


METHODS = {path.stem: preset(path.stem) for path in sorted((conf_dir() / "loss").glob("*.yaml"))} | {
    **{name: backend(name) for name in ("dense", "tiled", "triton")},
    "torch": Method(lambda job: cross_entropy),
    "compile": Method(lambda job: torch.compile(cross_entropy, dynamic=False)),
    "open_clip": Method(open_clip, "open_clip"),
    "inf_cl": Method(inf_cl, "inf_cl", cuda=True, multiples=(64, 256)),
    "memeff": Method(memeff, "memeff", cuda=True, multiples=(1, 64)),
    "siglip_kernel": Method(siglip_kernel, "siglip_kernel", cuda=True, sigmoid=True),
}


def plan(settings: SimpleNamespace) -> tuple[str, list[Row]]:
    """The least work first. Raises UserError for a method or a type that is none."""
    methods, dtypes = settings.methods.split(","), settings.dtype.split(",")
    for word, known in (*((name, [*METHODS]) for name in methods), *((dtype, [*DTYPES]) for dtype in dtypes)):
        if word not in known:
            raise UserError(f"{word}: unknown{did_you_mean(word, known)}; there are {', '.join(known)}")
    common = {key: getattr(settings, key) for key in ("device", "repeats", "reference", "profile")}
    cases = sorted(product(counts(settings.n), counts(settings.d), dtypes), key=lambda case: case[0] ** 2 * case[1])
    jobs = []
    for (n, d, dtype), name in product(cases, methods):
        scale = SIGLIP_SCALE if METHODS[name].sigmoid else settings.scale
        jobs.append({"n": n, "d": d, "dtype": dtype, "method": name, "scale": scale, **common})
    return f"loss-{settings.device}", jobs


def measure(**job: Any) -> list[Row]:
    """Memory, matmuls and error of a step; then its time, and the rate of matrix products between the steps."""
    method, device, dtype = METHODS[job["method"]], torch.device(job["device"]), DTYPES[job["dtype"]]
    if method.cuda and device.type != "cuda":
        return [{"status": "not supported", "reason": "its kernels need CUDA"}]
    if job["n"] % method.multiples[0] or job["d"] % method.multiples[1]:
        return [{"status": "not supported", "reason": f"N and D must be multiples of {method.multiples}"}]
    if find_spec(method.package) is None:
        return [{"status": "not installed", "reason": f"install {method.package}"}]
    torch.backends.cuda.matmul.allow_tf32 = job["dtype"] == "tf32"
    loss = method.build(job)
    step(loss, inputs_of(job, min(job["n"], 64)))
    row = facts(loss, method, job)
    side, products = GEMM[device.type]
    a, b, out = (torch.randn(side, side, device=device).to(dtype) for _ in range(3))
    steps, bursts = [], []
    for _ in range(job["repeats"] + 1):
        inputs, meter = inputs_of(job, job["n"]), Meter(device)
        step(loss, inputs, meter)
        steps.append(meter.seconds)
        burst = Meter(device)
        for _ in range(products):
            torch.mm(a, b, out=out)
        burst("burst")
        bursts.append(burst.seconds["burst"])
    del steps[0], bursts[0]  # they warm up
    row |= {f"{part}_s": spread([seconds[part] for seconds in steps]) for part in ("forward", "backward")}
    row["total_s"] = spread([sum(seconds.values()) for seconds in steps])
    row["counted_flops"] = COUNTED_UNITS * 2.0 * job["n"] ** 2 * job["d"]
    row["flops_per_s"] = row["counted_flops"] / row["total_s"]["median"]
    row["gemm_fraction"] = row["flops_per_s"] / (products * 2.0 * side**3 / median(bursts))
    if job["profile"]:
        inputs = inputs_of(job, job["n"])
        row["kernels"] = kernels(lambda: step(loss, inputs), device)[: job["profile"]]
    return [row]


def facts(loss: LossFunction, method: Method, job: Row) -> Row:
    """Growth of memory in a step beyond the gradients of the features, its matmuls, and its error."""
    inputs, meter = inputs_of(job, job["n"]), Meter(torch.device(job["device"]))
    value, grads = step(loss, inputs, meter)
    forward, backward = (meter.peak[part] - meter.before["forward"] for part in ("forward", "backward"))
    gradients = sum(grad.nbytes for grad in grads)
    forward -= gradients if method.sigmoid else 0  # which makes them in the forward pass
    row: Row = {"extra_bytes": max(forward, backward - gradients, 0)}
    if not method.cuda and job["method"] != "compile" and job["n"] <= MAX_COUNTED:
        with FlopCounterMode(display=False, custom_mapping=ADDMM_FLOPS) as counter:
            step(loss, inputs)
        row["units"] = counter.get_total_flops() / (2 * job["n"] ** 2 * job["d"]) or None  # kernels are not counted
    if job["n"] <= job["reference"]:
        row["error"] = error_of(method, value, grads, inputs)
    return row


def inputs_of(job: Row, pairs: int) -> list[Tensor]:
    """Unit rows u and v (pairs, D), <u_i, v_i> near PAIR_COSINE and the rest unrelated, and the scale."""
    generator = torch.Generator(job["device"]).manual_seed(0)
    u, v = (
        F.normalize(torch.randn(pairs, job["d"], generator=generator, device=job["device"]), dim=1) for _ in range(2)
    )
    v = F.normalize(PAIR_COSINE * u + (1 - PAIR_COSINE**2) ** 0.5 * v, dim=1)
    scale = torch.tensor(job["scale"], device=job["device"])
    return [x.requires_grad_() for x in (u.to(DTYPES[job["dtype"]]), v.to(DTYPES[job["dtype"]]), scale)]


def step(
    loss: LossFunction, inputs: Sequence[Tensor], meter: Any = lambda part: None
) -> tuple[Tensor, Sequence[Tensor]]:
    """The value and the gradients."""
    value = loss(*inputs)
    meter("forward")
    grads = torch.autograd.grad(value, inputs)
    meter("backward")
    return value.detach(), grads


def error_of(method: Method, value: Tensor, grads: Sequence[Tensor], inputs: Sequence[Tensor]) -> float | None:
    """Largest relative distance (Frobenius norm) of value and features' gradients from the oracle's in float64.

    None where the oracle, whose memory is several matrices in float64, does not fit.
    """
    u, v = (x.detach().double().requires_grad_() for x in inputs[:2])
    objective, bias = ("sigmoid", SIGLIP_BIAS) if method.sigmoid else ("softmax", 0.0)
    try:
        truth = dense_contrastive_loss(u, v, inputs[2].detach().double(), logit_bias=bias, objective=objective)
        exact = torch.autograd.grad(truth, (u, v))
    except RuntimeError as error:
        if is_out_of_memory(error):
            return None
        raise
    errors = [float((grad.double() - true).norm() / true.norm()) for grad, true in zip(grads, exact)]
    return max(abs(float(value) / float(truth.detach()) - 1), *errors)


COLUMNS = {
    "N": lambda row: format_count(row["n"]),
    "D": lambda row: str(row["d"]),
    "dtype": lambda row: row["dtype"],
    "method": lambda row: row["method"],
    "forward ms": ms("forward_s"),
    "backward ms": ms("backward_s"),
    "total ms": ms("total_s"),
    "TFLOP/s": lambda row: f"{row['flops_per_s'] / 1e12:.3g}",
    "of GEMM": lambda row: f"{row['gemm_fraction']:.0%}",
    "units": lambda row: f"{row['units']:.2f}",
    "extra MiB": lambda row: f"{row['extra_bytes'] / 2**20:,.1f}",
    "error": lambda row: f"{row['error']:.1e}",
}

if __name__ == "__main__":
    main(DEFAULTS, plan, measure, COLUMNS)
