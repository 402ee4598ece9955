"""Number formats of a run: what autocast computes in, and whether losses are scaled."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from clipscale.errors import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class PrecisionConfig:
    """Precision of the encoders' arithmetic; weights stay in float32."""

    name: str = "fp32"
    """`fp32`, `bf16` (autocast) or `fp16` (autocast with a gradient scaler)."""
    tf32: bool = True
    """Allow TF32 in float32 matrix products on GPUs that have it."""


class Precision:
    """The settings in use: a fresh autocast context per chunk, the scaler, and the type of the loss's operands."""

    def __init__(self, config: PrecisionConfig, device: torch.device) -> None:
        if config.name not in DTYPES:
            raise UserError(f"precision.name={config.name!r}: choose one of {', '.join(DTYPES)}")
        self.dtype = DTYPES[config.name]
        self.device = device
        self.scaler = torch.amp.GradScaler(device.type) if config.name == "fp16" else None
        if device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = config.tf32
            torch.backends.cudnn.allow_tf32 = config.tf32

    def autocast(self) -> AbstractContextManager[Any]:
        """Autocast for one chunk. Entered anew each time: its cache of cast weights must not outlive a pass without a graph."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)
