"""Number formats of a run: autocast, TF32, the type of frozen weights, and the loss scale of fp16."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from clipscale.common.modules import is_trainable
from clipscale.distributed.weight_types import cast_product_weights_

# Type of autocast.
AUTOCAST_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# If fp16 gradients overflow even below this loss scale, training has diverged.
MIN_LOSS_SCALE = 1.0


@dataclass
class Precision:
    """Autocast and the gradient scaler of a run. Trained weights, gradients and optimizer state are float32."""

    # The type of autocast.
    dtype: torch.dtype
    device: torch.device
    scaler: torch.amp.GradScaler | None = None

    @classmethod
    def set_up(cls, name: str, device: torch.device) -> "Precision":
        """The precision of this name. Allows TF32 on CUDA, in the whole process."""
        if device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = True
            torch.backends.cudnn.allow_tf32 = True
        return cls(AUTOCAST_DTYPES[name], device, torch.amp.GradScaler(device.type) if name == "fp16" else None)

    def autocast(self) -> AbstractContextManager[object]:
        """A new autocast context for each pass.

        Autocast caches casts until its context ends. So a shared one would give the second pass the casts of the first,
        which have no graph.
        """
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    @property
    def can_lower_loss_scale(self) -> bool:
        """Whether the next step can meet an overflow of fp16 with a lower loss scale."""
        return self.scaler is not None and self.scaler.get_scale() >= MIN_LOSS_SCALE

    def cast_frozen_(self, *towers: nn.Module) -> None:
        """Cast the weights of matrix products in place, in frozen towers only.

        Features stay the same: autocast would round these weights anyway.
        """
        for tower in towers:
            if not is_trainable(tower):
                cast_product_weights_(tower, self.dtype)
