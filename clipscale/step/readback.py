"""Reads a step's results from the device, without waiting for what is queued later."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Readback:
    """Numbers on their way from the device to the host. Reading waits for them, not for what was queued later."""

    # The numbers, in memory of the host.
    values: Tensor
    # The event after which the values are there; None if they are there already.
    arrival: torch.cuda.Event | None = None

    @classmethod
    def start(cls, *scalars: Tensor) -> "Readback":
        """Begin to copy scalars, after what the device has in its queue."""
        return cls.copy(torch.stack([scalar.detach().double() for scalar in scalars]))

    @classmethod
    def copy(cls, values: Tensor) -> "Readback":
        """Begin to copy a tensor, after what the device has in its queue. A tensor of the host is not copied."""
        if values.device.type != "cuda":
            return cls(values)
        on_host = values.to("cpu", non_blocking=True)
        arrival = torch.cuda.Event()
        arrival.record()
        return cls(on_host, arrival)

    @property
    def is_ready(self) -> bool:
        """Whether reading would not wait."""
        return self.arrival is None or self.arrival.query()

    def wait(self) -> Tensor:
        """The values, when they are on the host."""
        if self.arrival is not None:
            self.arrival.synchronize()
        return self.values

    def read(self) -> list[float]:
        """The numbers of `start`, as floats. Waits for them."""
        return [float(value) for value in self.wait().tolist()]
