"""An exponential moving average of the trained weights, which often evaluates better than the last ones."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from clipscale.common.record import Record
from clipscale.distributed.fsdp import reshard
from clipscale.distributed.world import local


class WeightAverage:
    """a <- d a + (1 - d) w after every step, in float32, with d = min(decay, (1 + n) / (10 + n)) in step n = 1, 2, ...

    The smaller decay of the first steps lets the average forget the initial weights, as in TensorFlow's
    ExponentialMovingAverage.
    """

    def __init__(self, decay: float, model: nn.Module) -> None:
        """Of the model's trained parameters, in shards where these are."""
        self.decay, self.updates, self.model = decay, 0, model
        self.weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.values = {name: p.detach().clone() for name, p in self.weights.items()}

    def update(self) -> None:
        """Take in the weights after a step."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        values = [local(self.values[name]) for name in self.weights]
        torch._foreach_lerp_(values, [local(w.detach()) for w in self.weights.values()], 1 - decay)

    def state_dict(self) -> Record:
        """What a checkpoint holds."""
        return {"updates": self.updates, "weights": dict(self.values)}

    def load(self, saved: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint's average; None: from the weights as they are now."""
        self.updates = saved["updates"] if saved else 0
        for name, value in self.values.items():
            local(value).copy_(local(saved["weights"][name] if saved else self.weights[name].detach()))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model computes with the averaged weights inside. Takes memory for one more copy of them."""
        before = {name: p.detach().clone() for name, p in self.weights.items()}
        self._set(self.values)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, values: Mapping[str, Tensor]) -> None:
        for name, p in self.weights.items():
            local(p.detach()).copy_(local(values[name]))
        reshard(self.model)  # weights gathered before are old
