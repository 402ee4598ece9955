"""Optimizers of timm's factory, parameter groups and learning-rate schedules."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import timm.optim
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from clipscale.common.errors import UserError, to_user_error
from clipscale.config.sections import SHARDABLE_OPTIMIZERS, OptimConfig, ScheduleConfig, parse_length

# Optimizer -> the least size of its state for a matrix, in units of the matrix's size.
STATE_SIZES = {
    "adamw": 2, "adam": 2, "nadamw": 2, "adopt": 2, "laprop": 2, "radam": 2, "rmsprop": 2, "lamb": 2,
    "lion": 1, "sgd": 1, "muon": 1, "lars": 1, "adafactorbv": 0.5,
}  # fmt: skip
# timm's names of torch's optimizers that have a fused kernel, also on a CPU.
FUSED = ("adamw", "adam", "adagrad")


def build_optimizer(
    model: nn.Module, config: OptimConfig, *, is_sharded: bool = False, lr_factors: Mapping[str, float] | None = None
) -> torch.optim.Optimizer:
    """The optimizer over the trainable parameters; see `parameter_groups`.

    `is_sharded`: matrices and vectors are sharded, scalars are not. `lr_factors`: factors of the learning rate by the
    parameter's name; 1 for those that are missing.

    Raises UserError for options that the optimizer does not take.
    """
    info = timm.optim.get_optimizer_info(config.name)
    options: dict[str, Any] = dict(config.options)
    if info.has_betas:
        options.setdefault("betas", tuple(config.betas))
    elif config.name == "adafactorbv":
        options.setdefault("beta2_cap", config.betas[1])
    if config.eps is not None and info.has_eps:
        options.setdefault("eps", config.eps)
    if is_sharded and config.name not in SHARDABLE_OPTIMIZERS:
        raise UserError(
            f"optim.name={config.name}: needs whole parameters, launch.parallel=ddp; for shards choose one of "
            f"{', '.join(SHARDABLE_OPTIMIZERS)}"
        )
    if config.name in FUSED and not options.keys() & {"foreach", "differentiable"}:
        options.setdefault("fused", True)  # one kernel for many tensors, without temporary tensors
    groups = [{**group} for group in parameter_groups(model, config, lr_factors or {})]
    with to_user_error(f"optim: {config.name} refuses its settings", "; look at optim.betas, eps, lr and options"):
        optimizer = timm.optim.create_optimizer_v2(
            groups, opt=config.name, lr=config.lr, momentum=config.betas[0], **options
        )
    return fast_muon(optimizer) if isinstance(optimizer, timm.optim.Muon) else optimizer


class FastMuon(torch.optim.Optimizer):
    """timm's Muon, with the same steps and state. Two things are computed differently.

    Embeddings and vectors are updated by torch's fused AdamW, not one by one in Python. On a CPU the iteration of
    matrices runs in float32: many CPUs have no bfloat16, and emulate it thirty times as slowly.

    `fast_muon` makes it.
    """

    def __init__(self, muon: timm.optim.Muon) -> None:
        super().__init__(muon.param_groups, muon.defaults)
        self.muon = muon
        self.adamw = torch.optim.AdamW([torch.zeros(())], fused=True)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        fused = [group for group in self.param_groups if group.get("fused")]
        # Both optimizers use this object's groups and state. They are handed over in every step, because loading a
        # checkpoint replaces them.
        self.muon.param_groups = [group for group in self.param_groups if not group.get("fused")]
        self.adamw.param_groups = [
            self.adamw.defaults | group | {"lr": group["lr"] * group["fallback_lr_scale"]} for group in fused
        ]
        self.muon.state = self.state
        self.adamw.state = self.state
        with Float32OnCpu():
            self.muon.step()
        self.adamw.step()


def fast_muon(muon: timm.optim.Muon) -> FastMuon:
    """timm's Muon as a `FastMuon`. Marks with `fused` the groups that torch's fused AdamW updates.

    With Nesterov momentum none is marked: timm updates these groups by NAdamW, for which torch has no fused kernel.
    """
    for group in muon.param_groups:
        if group.get("use_fallback") and not group["nesterov"]:
            group["fused"] = True
    return FastMuon(muon)


class Float32OnCpu(TorchFunctionMode):
    """In this context, a conversion of a CPU tensor to bfloat16 does nothing."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func is torch.Tensor.to and kwargs.get("dtype") is torch.bfloat16:
            converted = args[0]
            assert isinstance(converted, torch.Tensor)
            if converted.device.type == "cpu":
                kwargs = kwargs | {"dtype": converted.dtype}
        return func(*args, **kwargs)


# Kinds of parameters, in the order of their groups.
MATRIX, EMBEDDING, VECTOR, SCALAR = range(4)


class ParameterGroup(TypedDict):
    """Parameters that an optimizer updates alike, as torch takes them."""

    params: list[nn.Parameter]
    # Their lr_factor, under timm's name of it, which checkpoints have, too.
    lr_scale: float
    weight_decay: float
    # Whether AdamW updates them if the optimizer is Muon.
    use_fallback: NotRequired[bool]


def parameter_groups(model: nn.Module, config: OptimConfig, lr_factors: Mapping[str, float]) -> list[ParameterGroup]:
    """Trainable parameters in four groups: matrices and embeddings with weight decay, vectors and scalars without.

    A group is split further by the `lr_factors` of its parameters.

    Muon updates the matrices, and AdamW the parameters of all other groups, which are marked for it. Muon's orthogonal
    steps suit weights that multiply activations; token embeddings are only looked up. Position embeddings count as
    matrices. Scalars (logit scale and bias) are a group because FSDP2 shards all other parameters, and fused optimizers
    do not mix sharded with whole tensors.
    """
    embeddings = embedding_ids(model)
    split: dict[tuple[int, float], ParameterGroup] = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        kind = parameter_kind(p, is_embedding=id(p) in embeddings)
        lr_factor = lr_factors.get(name, 1.0)
        weight_decay = config.weight_decay if kind in (MATRIX, EMBEDDING) else 0.0
        group = split.setdefault((kind, lr_factor), {"params": [], "lr_scale": lr_factor, "weight_decay": weight_decay})
        if kind != MATRIX:
            group["use_fallback"] = True
        group["params"].append(p)
    return [split[key] for key in sorted(split)]


def embedding_ids(model: nn.Module) -> set[int]:
    """The `id` of each weight that is an embedding of tokens."""
    return {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}


def parameter_kind(p: nn.Parameter, *, is_embedding: bool) -> int:
    """MATRIX, EMBEDDING, VECTOR or SCALAR."""
    if p.ndim < 2:
        return SCALAR if p.ndim == 0 else VECTOR
    return EMBEDDING if is_embedding else MATRIX


def least_state_bytes(model: nn.Module, config: OptimConfig) -> int:
    """A lower bound of the bytes of an optimizer's state for all parameters of a model.

    0 for an optimizer that STATE_SIZES does not have, and without momentum or with further options, which may leave
    parts of the state out. Muon leaves all but matrices to AdamW.
    """
    if config.options or not config.betas[0]:
        return 0
    of_matrix = STATE_SIZES.get(config.name, 0)
    of_others = STATE_SIZES["adamw"] if config.name == "muon" else of_matrix
    embeddings = embedding_ids(model)
    return int(
        sum(
            p.nbytes * (of_matrix if parameter_kind(p, is_embedding=id(p) in embeddings) == MATRIX else of_others)
            for p in model.parameters()
        )
    )


def parse_steps(setting: str, text: str, *, total: int, per_epoch: float | None) -> int:
    """The number of steps in `2000` (steps), `5%` (of the `total` steps) or `0.5ep` (epochs of `per_epoch` steps).

    Raises UserError for other texts, and for epochs if `per_epoch` is None.
    """
    steps, count, unit = parse_length(setting, text)
    if steps:
        return int(steps)
    if unit == "%":
        return round(float(count) / 100 * total)
    if per_epoch is None:
        raise UserError(
            f"{setting}={text}: the number of samples an epoch is not known here; give steps or a percentage"
        )
    return round(float(count) * per_epoch)


@dataclass(frozen=True)
class Schedule:
    """Learning rate as a pure function of the step, so that a resumed run needs no state.

    Steps are counted from 1, from the start of the run.
    """

    # The highest rate.
    peak: float
    # Steps of the whole schedule, of its warm-up, and of its cooldown.
    total: int
    warmup: int
    cooldown: int
    # The rate at the end, as a share of the peak.
    final: float
    # Whether the rate falls along a cosine. If not, the rate stays at the peak until the cooldown.
    is_cosine: bool
    # Steps of the run before the schedule's first one.
    steps_before: int

    @staticmethod
    def build(
        config: ScheduleConfig,
        optim: OptimConfig,
        global_batch: int,
        samples: int,
        epoch_samples: int | None,
        steps_before: int,
    ) -> "Schedule":
        """The schedule of a run of `samples`. Raises UserError.

        `epoch_samples`: samples of an epoch; None if unknown. `steps_before`: see the attribute.
        """
        total = max(1, samples // global_batch)
        per_epoch = None if epoch_samples is None else epoch_samples / global_batch
        warmup = parse_steps("schedule.warmup", config.warmup, total=total, per_epoch=per_epoch)
        cooldown = parse_steps("schedule.cooldown", config.cooldown, total=total, per_epoch=per_epoch)
        return Schedule(
            peak=optim.lr,
            total=total,
            warmup=min(warmup, total),
            cooldown=min(cooldown, total),
            final=config.final,
            is_cosine=config.name == "cosine",
            steps_before=steps_before,
        )

    @property
    def end(self) -> int:
        """The schedule's last step."""
        return self.steps_before + self.total

    def lr(self, step: int) -> float:
        """Learning rate of a step: linear warm-up, then a cosine, or a constant and a cooldown."""
        position = step - 1 - self.steps_before
        if self.warmup and position < self.warmup:
            return self.peak * (position + 1) / self.warmup
        low = self.peak * self.final
        if self.is_cosine:
            progress = (position - self.warmup) / max(1, self.total - self.warmup)
            return low + (self.peak - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        remaining = max(0, self.total - position)  # a run that is given fewer samples may be past its end
        if remaining >= self.cooldown:
            return self.peak
        return low + (self.peak - low) * remaining / self.cooldown


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group: `lr`, times the group's own lr_factor."""
    for group in optimizer.param_groups:
        lr_factor = group.get("lr_scale", 1.0)
        group["lr"] = lr * lr_factor
