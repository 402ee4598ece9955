"""The losses that are compared: presets of conf/loss, backends, choices of the Triton kernels, and other people's implementations.

A method imports what it needs when it is built, so that a missing peer costs its own row alone.

Letters: N images and as many texts of all ranks, D feature width.
"""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, cast

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from clipscale.common.errors import UserError
from clipscale.common.units import nearest, split
from clipscale.config.presets import conf_dir, group_options
from clipscale.config.sections import LossConfig
from clipscale.loss.api import KERNELS, configured_loss
from clipscale.loss.triton.tuning import Tiles, Tuning, candidates

LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(image features (n, D), text features (n, D), logit scale ()) -> loss ()."""
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PANEL = re.compile(r"triton-panel-(\d+)([MG])")


@dataclass(frozen=True)
class Case:
    """One comparison: everything about it but the method."""

    n: int
    """Pairs of all ranks."""
    d: int
    dtype: str
    """A key of DTYPES."""
    device: str
    ranks: int
    scale: float


@dataclass(frozen=True)
class Method:
    """One way to compute the loss."""

    name: str
    about: str
    """What it is, with the version where it is somebody else's."""
    build: Callable[[Case, int], LossFunction]
    """Given the case, with the method's own scale if it has one, and this process's rank."""
    package: str | None = None
    """What has to be installed."""
    kernels: bool = False
    """Kernels for CUDA, whose matmuls torch cannot count."""
    kernels_on_cuda: bool = False
    """The same, where there is CUDA; else torch's operators."""
    compiled: bool = False
    """By torch.compile: only a step of the same shape warms it up, and torch cannot count its matmuls."""
    one_rank: bool = False
    sides: int = 1
    """It takes multiples of so many pairs,"""
    width: int = 1
    """and of so many features."""
    objective: str = "softmax"
    bias: float = 0.0
    scale: float | None = None
    """Its own logit scale, where it has one; else the case's."""
    frozen_images: bool = False
    frozen_scale: bool = False
    """Is the scale a plain number to it, which gets no gradient."""
    own: bool = True
    """Ours: gradients sum over the ranks to the gradient."""

    @property
    def installed(self) -> bool:
        return self.package is None or find_spec(self.package) is not None

    def obstacle(self, case: Case) -> str | None:
        """Why it cannot do a case; None where it can."""
        if self.kernels and case.device != "cuda":
            return "its kernels need CUDA"
        if self.compiled and case.device == "cpu" and not any(map(shutil.which, ("g++", "c++", "clang++"))):
            return "torch.compile on the CPU needs a C++ compiler"
        if self.one_rank and case.ranks > 1:
            return "compared on one rank only"
        if case.d % self.width:
            return f"D={case.d} is no multiple of {self.width}"
        return f"N={case.n} is no multiple of {self.sides}" if case.n % self.sides else None

    def visible(self, case: Case) -> bool:
        """Do its matmuls pass through torch, which can count them."""
        return not (self.kernels or self.compiled or (self.kernels_on_cuda and case.device == "cuda"))


# ---- clipscale's own ----


def preset(name: str) -> Method:
    """`loss=NAME` as conf/loss has it."""
    values = yaml.safe_load((conf_dir() / "loss" / f"{name}.yaml").read_text(encoding="utf-8"))
    model, config = values.get("model", {}), LossConfig(**values.get("loss", values))
    about = f"loss={name}: exchange={config.exchange}, backend={config.backend}"
    own = {"scale": model.get("init_scale"), "bias": model.get("init_bias", 0.0)}
    return _own(name, about, config, frozen_images=model.get("freeze_image", False), **own)


def kernel_choice(name: str) -> Method | None:
    """The Triton backend with one of its choices made otherwise; None for another name.

    triton-tiles-128x256x64-8w-3s[-128r]: rows x columns x depth of a tile, warps, stages, registers a thread, in both passes.
    triton-panel-256M: bytes of score gradients at a time. A panel as large as the whole matrix is the design without panels.
    """
    config = LossConfig(backend="triton")
    if name.startswith("triton-tiles-") and (tiles := Tiles.parse(name.removeprefix("triton-tiles-"))):
        shape = f"{tiles.rows} x {tiles.cols} x {tiles.depth}, {tiles.warps} warps, {tiles.stages} stages"
        return _own(name, f"backend=triton with tiles of {shape}", config, Tuning(tiles=tiles))
    if found := PANEL.fullmatch(name):
        about = f"backend=triton with {found[1]} {found[2]}iB of score gradients at a time"
        return _own(name, about, config, Tuning(panel_bytes=int(found[1]) << {"M": 20, "G": 30}[found[2]]))
    return None


def _own(name: str, about: str, config: LossConfig, tuning: Tuning | None = None, **more: Any) -> Method:
    def build(case: Case, rank: int) -> LossFunction:
        own = replace(config, fp32_precision="tf32" if case.dtype == "tf32" else "ieee")
        bias = more.get("bias", 0.0) if config.objective == "sigmoid" else None
        return partial(configured_loss, logit_bias=bias, config=own, check=False, tuning=tuning)

    more |= {"kernels": config.backend in KERNELS, "kernels_on_cuda": config.backend == "auto"}
    return Method(name, about, build, objective=config.objective, **more)


# ---- peers ----


def _open_clip(case: Case, rank: int) -> LossFunction:
    from open_clip.loss import ClipLoss

    alone = case.ranks == 1
    loss = ClipLoss(local_loss=not alone, gather_with_grad=not alone, rank=rank, world_size=case.ranks)
    # Not the module: torch's FLOP counter hooks into modules, and its hooks refuse autograd.grad.
    return cast(LossFunction, loss.forward)


def _inf_cl(case: Case, rank: int) -> LossFunction:
    from inf_cl import cal_flash_loss

    def loss(u: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        return (cal_flash_loss(u, v, scale=scale).mean() + cal_flash_loss(v, u, scale=scale).mean()) / 2

    return loss


def _siglip_kernel(case: Case, rank: int) -> LossFunction:
    from siglip_kernel import fused_siglip_loss

    bias = torch.tensor(preset("siglip").bias, device=case.device)

    def loss(u: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        return cast(Tensor, fused_siglip_loss(u, v, scale.log(), bias))

    return loss


def _memeff(case: Case, rank: int) -> LossFunction:
    from memeff import MemoryEfficientCLIPLoss

    clip_loss = MemoryEfficientCLIPLoss(temperature=1 / case.scale, normalized_inputs=True, stable=False)
    return lambda u, v, scale: cast(Tensor, clip_loss(u, v))


def cross_entropy(u: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """CLIP's loss in three lines of torch, with one matrix of logits."""
    logits = scale * (u @ v.T)
    target = torch.arange(len(u), device=u.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def _version(package: str, distribution: str) -> str:
    return version(distribution) if find_spec(package) else "(not installed)"


def methods() -> dict[str, Method]:
    """All of them, by name."""
    backends = {
        "tiled": "any device, tile by tile",
        "dense": "blocks held whole",
        "triton": "kernels for CUDA",
        "gluon": "warp-specialised kernels for Hopper and Blackwell",
    }
    clip_loss = f"open_clip.loss.ClipLoss of open_clip_torch {_version('open_clip', 'open_clip_torch')}"
    flash_loss = f"inf_cl.cal_flash_loss, both ways, of inf-cl {_version('inf_cl', 'inf-cl')}"
    siglip = preset("siglip")
    its_own: dict[str, Any] = {"objective": siglip.objective, "scale": siglip.scale, "bias": siglip.bias}
    fused = f"siglip_kernel.fused_siglip_loss of siglip-kernel {_version('siglip_kernel', 'siglip-kernel')}; compare with siglip"
    efficient = f"memeff.MemoryEfficientCLIPLoss of memeff {_version('memeff', 'memeff')}; no gradient of the scale"
    peer = partial(Method, own=False)
    alone = partial(peer, one_rank=True)
    kernels = partial(alone, kernels=True)
    found = [
        *(preset(name) for name in group_options()["loss"]),
        *(_own(name, f"backend={name}: {about}", LossConfig(backend=name)) for name, about in backends.items()),
        peer("open_clip", clip_loss, _open_clip, "open_clip"),
        kernels("inf_cl", flash_loss, _inf_cl, "inf_cl", sides=64, width=256),
        kernels("memeff", efficient, _memeff, "memeff", width=64, frozen_scale=True),
        kernels("siglip_kernel", fused, _siglip_kernel, "siglip_kernel", **its_own),
        alone("torch", "torch's cross_entropy of one matrix, both ways", lambda *_: cross_entropy),
        alone(
            "compile",
            "the same under torch.compile",
            lambda *_: torch.compile(cross_entropy, dynamic=False),
            compiled=True,
        ),
    ]
    return {method.name: method for method in found}


def find(names: list[str]) -> list[Method]:
    """The methods of these names. Raises UserError for one that is none."""
    known = methods()
    found = {name: known.get(name) or kernel_choice(name) for name in names}
    for name, method in found.items():
        if method is None:
            raise UserError(
                f"methods={name}: unknown{nearest(name, known)}; there are {', '.join(known)}, triton-tiles-128x256x64-8w-3s and "
                "triton-panel-256M"
            )
    return [method for method in found.values() if method is not None]


def chosen(names: str, device: str, ranks: int) -> list[Method]:
    """The methods of a comma-separated list; `triton-tiles`: every candidate of the tile table.

    Raises UserError for a name that is none.
    """
    if names == "auto":
        names = "clip,openclip,disco,ring,infcl" if ranks > 1 else "infcl,dense,open_clip,torch"
        names += ",inf_cl,memeff,siglip,siglip_kernel" if ranks == 1 and device == "cuda" else ""
    tiles = [f"triton-tiles-{candidate}" for candidate in candidates("half")]
    return find([name for word in split(names) for name in (tiles if word == "triton-tiles" else [word])])
