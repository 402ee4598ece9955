"""An exponential moving average of the trained weights, which often evaluates better than the last ones."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from clipscale.distributed.fsdp import reshard
from clipscale.distributed.world import copy_into, local


class WeightAverage:
    """a <- d a + (1 - d) w after every step, in float32, with d = min(decay, (1 + n) / (10 + n)) in step n = 1, 2, ...

    The smaller decay of the first steps lets the average forget the initial weights, as in TensorFlow's ExponentialMovingAverage.
    """

    def __init__(self, decay: float, weights: Mapping[str, nn.Parameter]) -> None:
        """`weights` by the model's names, as the optimizer holds them: float32 masters, or shards of FSDP2."""
        self.decay, self.updates, self.weights = decay, 0, weights
        self.values = {name: w.detach().clone().float() for name, w in weights.items()}

    def update(self) -> None:
        """Take in the weights after a step."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        values = [local(self.values[name]) for name in self.weights]
        torch._foreach_lerp_(values, [local(w.detach()).float() for w in self.weights.values()], 1 - decay)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"updates": self.updates, "weights": dict(self.values)}

    def load(self, saved: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint's average; None: from the weights as they are now."""
        self.updates = saved["updates"] if saved else 0
        for name, value in self.values.items():
            copy_into(value, saved["weights"][name] if saved else self.weights[name].detach())

    @contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """The model computes with the averaged weights inside. Takes memory for one more copy of the trained weights."""
        held = {name: p for name, p in model.named_parameters() if name in self.values}
        before = {name: p.detach().clone() for name, p in held.items()}
        self._set(model, held, self.values)
        try:
            yield
        finally:
            self._set(model, held, before)

    def _set(self, model: nn.Module, held: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
        for name, p in held.items():
            local(p.detach()).copy_(local(values[name]))
        reshard(model)  # weights gathered before are old
