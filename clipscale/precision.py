"""Number formats of a run: what autocast computes in, what weights are held in, and whether losses are scaled."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from clipscale.config.checks import choice
from clipscale.config.sections import PrecisionConfig
from clipscale.errors import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """The settings in use: a fresh autocast context per chunk, the scaler, and the type of the loss's operands.

    Raises UserError for settings that do not go together.
    """

    def __init__(self, config: PrecisionConfig, device: torch.device) -> None:
        choice("precision.name", config.name, DTYPES)
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
        """Autocast for one chunk. Entered anew each time: its cache of cast weights must not outlive a pass without a graph."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def hold(self, tower: nn.Module) -> "MasterWeights | None":
        """Cast, in place, the matrices that the tower is to hold in half precision; float32 copies of them where the optimizer wants some.

        Frozen towers: under autocast their products see the same rounded weights as before.
        """
        frozen = not any(p.requires_grad for p in tower.parameters())
        if self.dtype == torch.float32 or not (frozen or self.half_weights):
            return None
        matrices = {name: p for name, p in tower.named_parameters() if p.ndim >= 2}
        masters = MasterWeights(matrices) if self.master and not frozen else None
        for p in matrices.values():
            p.data = p.data.to(self.dtype)
        return masters


class MasterWeights:
    """float32 copies of one tower's half-precision parameters, for the optimizer.

    After each chunk's backward pass a parameter's gradient moves into its copy's, so that the sum over chunks is a float32 sum. After the
    optimizer's step, `spread` rounds the copies back into the tower.
    """

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        """`parameters`: by name, still in float32."""
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
        """The copies, rounded, into the tower."""
        with torch.no_grad():
            for name, copy in self.copies.items():
                self.held[name].copy_(copy)
