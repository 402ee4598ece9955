"""Saves and restores the state of torch's random number generators, to repeat a computation with the same numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor


class RandomStateDict(TypedDict):
    """`RandomState` in a checkpoint."""

    cpu: Tensor
    cuda: Tensor | None


@dataclass
class RandomState:
    """The default generators of the CPU and of one GPU. Dropout and torch.compile's seeds draw from them."""

    cpu: Tensor
    # None if no GPU is in use.
    cuda: Tensor | None
    # The GPU; None for the current one.
    device: torch.device | None = None

    @staticmethod
    def now(device: torch.device | None = None) -> "RandomState":
        """The present state of the CPU, and of `device`; without it, of the current GPU if one is in use."""
        on_gpu = torch.cuda.is_initialized() if device is None else device.type == "cuda"
        return RandomState(
            torch.get_rng_state(), torch.cuda.get_rng_state(device or "cuda") if on_gpu else None, device
        )

    def state_dict(self) -> RandomStateDict:
        """The states in a checkpoint: `RandomState.from_state_dict` reads them."""
        return {"cpu": self.cpu, "cuda": self.cuda}

    @staticmethod
    def from_state_dict(state: RandomStateDict) -> "RandomState":
        return RandomState(state["cpu"], state["cuda"])

    def restore(self) -> None:
        """Continue from this state."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device or "cuda")

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restores this state afterwards."""
        try:
            yield
        finally:
            self.restore()
