"""Number formats of a run: autocast, TF32, the storage of frozen towers, and the scaling of the loss in fp16."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Type of autocast."""
LEAST_LOSS_SCALE = 1.0
"""If fp16 gradients overflow even below this loss scale, the training itself diverges."""


class Precision:
    """Autocast and the gradient scaler of a `precision`. Weights, their gradients and the optimizer are float32."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.dtype = DTYPES[name]
        self.device = device
        self.scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None
        if device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = True
            torch.backends.cudnn.allow_tf32 = True

    def autocast(self) -> AbstractContextManager[Any]:
        """A new autocast context for one chunk: its cache of cast weights must not outlive a pass without a graph."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    @property
    def can_lower_loss_scale(self) -> bool:
        return self.scaler is not None and self.scaler.get_scale() >= LEAST_LOSS_SCALE

    def store(self, tower: nn.Module) -> None:
        """Cast the matrices of a frozen tower in place. It computes the same as before, since autocast rounds them
        anyway."""
        if not any(p.requires_grad for p in tower.parameters()):
            for p in tower.parameters():
                p.data = p.data.to(self.dtype) if p.ndim >= 2 else p.data
