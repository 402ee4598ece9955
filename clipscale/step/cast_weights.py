"""The weights that a step in chunks casts once, for its passes under autocast; see `models/linear.py`."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from clipscale.common.cast_layer import Cast, CastLayer
from clipscale.step.pass_contexts import is_collective


@dataclass
class CastWeights:
    """An encoder's layers and what replaces their weights, from a step's first chunk to its last."""

    layers: list[tuple[CastLayer, Cast]] = field(default_factory=list)
    # The weights' gradients in the last pass.
    totals: dict[Tensor, Tensor] = field(default_factory=dict)
    # Hooks of autograd sum the gradients over ranks, with those of a last chunk.
    sums_by_hooks: bool = False

    def start_step(self, encoder: object, autocast: Callable[[], AbstractContextManager[object]], chunks: int) -> None:
        """Cast the weights that autocast casts, for a step of several chunks. FSDP2 gathers its own."""
        self.end_step()
        if not isinstance(encoder, nn.Module) or chunks == 1 or is_collective(encoder) or finds_unused(encoder):
            return
        self.sums_by_hooks = hasattr(encoder, "no_sync")
        for layer in encoder.modules():
            if isinstance(layer, CastLayer):
                weight, bias = layer.weights()
                dtype = autocast_dtype(autocast, weight.device.type)
                if dtype and weight.dtype == torch.float32 and not has_hooks(weight):
                    half, half_bias = (None if x is None else x.detach().to(dtype) for x in (weight, bias))
                    assert half is not None
                    self.layers.append((layer, Cast(half, half_bias, False)))

    def end_step(self) -> None:
        self.layers.clear()
        self.totals.clear()

    @contextmanager
    def used(self, builds_graph: bool, sync: bool) -> Iterator[None]:
        """Around a pass of a chunk, after whose graph gradients are summed over ranks if `sync`. The graph's backward
        pass, now or later, adds to the weights' `.grad`."""
        layers = [] if builds_graph and sync and self.sums_by_hooks else self.layers
        adds = [builds_graph and layer.weights()[0].requires_grad for layer, _ in layers]
        summed = [layer.weights()[0] for (layer, _), each in zip(layers, adds) if each]
        try:
            for weight in summed:
                weight.grad = self.total(weight)
            for (layer, cast), each in zip(layers, adds):
                layer.cast = cast._replace(adds=each)
            yield
            self.totals |= {weight: weight.grad for weight in summed if weight.grad is not None}
        finally:
            for layer, _ in layers:
                layer.cast = None

    def total(self, weight: Tensor) -> Tensor:
        """The weight's gradient: that of the last pass, to which kept graphs add, with the value of the present one."""
        total = self.totals.get(weight)
        if total is None:
            return torch.zeros_like(weight) if weight.grad is None else weight.grad
        if weight.grad is None:
            return total.zero_()
        return total if weight.grad is total else total.copy_(weight.grad)


def autocast_dtype(autocast: Callable[[], AbstractContextManager[object]], device: str) -> torch.dtype | None:
    """The half-precision type of an autocast context; None: it casts nothing."""
    with autocast():
        if not torch.is_autocast_enabled(device):
            return None
        return torch.get_autocast_dtype(device)


def has_hooks(weight: Tensor) -> bool:
    """Whether a hook waits for the weight's gradient."""
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


def finds_unused(encoder: nn.Module) -> bool:
    """Whether DDP's hooks note in every chunk which parameters have a gradient."""
    return isinstance(encoder, DistributedDataParallel) and encoder.find_unused_parameters
