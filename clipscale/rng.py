"""The state of the random numbers that a computation draws from, so that it can be repeated with the same ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class RandomState:
    """The default generators of the CPU and of one GPU: what dropout, and torch.compile's own seeds, draw from."""

    cpu: Tensor
    cuda: Tensor | None
    """None where no GPU is in use."""
    device: torch.device | None = None
    """The GPU; None: the current one."""

    @staticmethod
    def now(device: torch.device | None = None) -> "RandomState":
        """The state as it is; of the current GPU, where there is one in use, unless another device is named."""
        on_gpu = torch.cuda.is_initialized() if device is None else device.type == "cuda"
        return RandomState(
            torch.get_rng_state(), torch.cuda.get_rng_state(device or "cuda") if on_gpu else None, device
        )

    def restore(self) -> None:
        """Go on from this state."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device or "cuda")

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Afterwards go on from this state, whatever was drawn within."""
        try:
            yield
        finally:
            self.restore()
