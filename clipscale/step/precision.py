"""Number formats of a run: of autocast, of the weights, and the scaling of the loss in fp16."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from clipscale.common.errors import UserError
from clipscale.config.sections import PrecisionConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Type of autocast."""
LEAST_LOSS_SCALE = 1.0
"""If fp16 gradients overflow even below this loss scale, the training itself diverges."""


class Precision:
    """Autocast, the gradient scaler and the type of the weights. Raises UserError for settings that contradict each other."""

    def __init__(self, config: PrecisionConfig, device: torch.device) -> None:
        if config.weights != "fp32" and (config.weights, config.name) != ("bf16", "bf16"):
            raise UserError(
                f"precision.weights={config.weights} with precision.name={config.name}: bf16 weights go with precision=bf16; "
                "else leave precision.weights=fp32"
            )
        self.dtype = DTYPES[config.name]
        self.device = device
        self.half_weights = config.weights == "bf16"
        self.master = self.half_weights and config.master
        self.scaler = torch.amp.GradScaler(device.type) if config.name == "fp16" else None
        if device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = config.tf32
            torch.backends.cudnn.allow_tf32 = config.tf32

    def autocast(self) -> AbstractContextManager[Any]:
        """A new autocast context for one chunk: its cache of cast weights must not outlive a pass without a graph."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    @property
    def loss_scale(self) -> float:
        """The factor of the loss and its gradients; 1 without a scaler."""
        return self.scaler.get_scale() if self.scaler else 1.0

    @property
    def can_lower_loss_scale(self) -> bool:
        """Whether a lower loss scale may remove an overflow."""
        return self.scaler is not None and self.loss_scale >= LEAST_LOSS_SCALE

    def hold(self, tower: nn.Module, *, sharded: bool = False) -> "MasterWeights | None":
        """Cast the tower's matrices in place, if the settings hold them in half precision; returns float32 copies for the optimizer.

        A frozen tower computes the same as before, since autocast rounds its matrices anyway. One that FSDP2 shards (`sharded`) keeps
        float32 shards, which are cast when they are gathered.
        """
        frozen = not any(p.requires_grad for p in tower.parameters())
        if self.dtype == torch.float32 or not (frozen or (self.half_weights and not sharded)):
            return None
        matrices = {name: p for name, p in tower.named_parameters() if p.ndim >= 2}
        masters = MasterWeights(matrices) if self.master and not frozen else None
        for p in matrices.values():
            p.data = p.data.to(self.dtype)
        return masters


class MasterWeights:
    """float32 copies of one tower's half-precision parameters, for the optimizer.

    Each chunk's gradient of a parameter moves to its copy, so that the sum over chunks is a float32 sum. After the optimizer's step,
    `spread` rounds the copies into the tower.
    """

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        """`parameters` by name, still in float32."""
        self.held = parameters
        self.copies = {name: nn.Parameter(p.detach().clone()) for name, p in parameters.items() if p.requires_grad}
        self.of = {id(parameters[name]): copy for name, copy in self.copies.items()}
        for name in self.copies:
            parameters[name].register_post_accumulate_grad_hook(self.collect)

    def collect(self, parameter: Tensor) -> None:
        copy, gradient = self.of[id(parameter)], parameter.grad
        assert gradient is not None
        copy.grad = gradient.to(copy.dtype) if copy.grad is None else copy.grad.add_(gradient)
        parameter.grad = None

    def spread(self) -> None:
        """Round the copies into the tower."""
        with torch.no_grad():
            for name, copy in self.copies.items():
                self.held[name].copy_(copy)

    def load(self, values: dict[str, Tensor]) -> None:
        """Set copies and tower to float32 values, by name."""
        with torch.no_grad():
            for name, value in values.items():
                self.copies[name].copy_(value)
        self.spread()
