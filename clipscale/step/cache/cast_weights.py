"""An encoder's weights in half precision, cast once for all chunks of a step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from torch import Tensor, nn

from clipscale.common.half_precision import CastLayer, HalfWeights
from clipscale.step.cache.gradient_sync import finds_unused, is_collective, supports_no_sync


@dataclass
class CastWeights:
    """An encoder's layers with their weights in half precision, cast once a step.

    Autocast would cast them again for every chunk. The layers that take such weights are in models/linear.py. The
    passes of a step:

    pass of a chunk (see `in_pass`)         weights   their gradient
    first pass, no graph                    cast      none
    first pass, graph kept or measured      cast      a kept graph adds it to `.grad` in its backward pass, later
    replay                                  cast      the backward pass adds it to `.grad`
    last chunk under DDP, with a graph      not cast  autograd writes it, because DDP's hooks see no other gradient

    For example, a weight W of an encoder with two chunks, where the first chunk's graph is kept:

    step begins             casts W to W16
    first pass, chunk 0     reads W16, and keeps a graph that holds W's `.grad`
    first pass, chunk 1     reads W16, without a graph
    replay, chunk 0         runs the kept graph's backward pass, which adds to `.grad`
    replay, chunk 1         reads W16 again, and its backward pass adds to `.grad`
    step ends               drops W16

    `.grad` is the same tensor in the whole step (see `accumulator`), because kept graphs hold it. A weight that no pass
    with a graph has used ends the step without a gradient, as with autograd.
    """

    layers: list[tuple[CastLayer, HalfWeights]] = field(default_factory=list)
    # Each weight's gradient. Kept graphs hold the same tensor, to add to it in their backward pass.
    gradients: dict[Tensor, Tensor] = field(default_factory=dict)
    # For each weight that has no gradient yet: the zeros that stand in for it, and their version when they were made.
    # torch raises a tensor's version with every change.
    zeros: dict[Tensor, tuple[Tensor, int]] = field(default_factory=dict)
    # Whether hooks, such as DDP's, sum the gradients over ranks. They see only what autograd adds.
    has_sync_hooks: bool = False

    def start_step(
        self, encoder: object, autocast: Callable[[], AbstractContextManager[object]], num_chunks: int
    ) -> None:
        """Cast the weights that autocast would cast in every chunk. Casts nothing in three cases:

        - There is only one chunk.
        - FSDP2 gathers the weights. From torch 2.15 on it also casts them. Before, autocast casts them in every chunk.
        - DDP looks for unused parameters, which its hooks must see.
        """
        self.end_step()
        if not isinstance(encoder, nn.Module) or num_chunks == 1 or is_collective(encoder) or finds_unused(encoder):
            return
        self.has_sync_hooks = supports_no_sync(encoder)
        for layer, dtype in layers_to_cast(encoder, autocast):
            weight, bias = layer.weights()
            half_bias = None if bias is None else bias.detach().to(dtype)
            self.layers.append((layer, HalfWeights(weight.detach().to(dtype), half_bias, accumulates=False)))

    def end_step(self) -> None:
        """Drop the cast weights, and the gradients to which nothing has been added."""
        for weight, (zeros, version) in self.zeros.items():
            # Reading the values makes a GPU's host wait. So it is done only for the few with an unchanged version.
            if weight.grad is zeros and zeros._version == version and not zeros.any():
                weight.grad = None
        self.clear()

    def clear(self) -> None:
        """Drop the cast weights, and leave every gradient as it is. Does not use the device: it may have failed."""
        self.layers.clear()
        self.gradients.clear()
        self.zeros.clear()

    @contextmanager
    def in_pass(self, *, builds_graph: bool, is_last_backward: bool) -> Iterator[None]:
        """Context of a pass of one chunk: the layers use their cast weights.

        `builds_graph`: the pass builds a graph, whose backward pass, now or later, adds to the weights' `.grad`.
        `is_last_backward`: that backward pass is the encoder's last one in the step. DDP then needs autograd's own
        gradients, so nothing is cast.
        """
        if builds_graph and is_last_backward and self.has_sync_hooks:
            yield
        elif builds_graph:
            with using_cast_weights(self.layers, accumulates=True), self.accumulating():
                yield
        else:
            with using_cast_weights(self.layers, accumulates=False):
                yield

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """In this context, the `.grad` of each trained weight is its accumulator, which stays the same for the whole
        step.

        DDP may replace `.grad` when the pass begins, and the pass's graph then adds to the new tensor. This is why the
        accumulator is noted after the pass, also after one that fails.
        """
        weights = [layer.weights()[0] for layer, _ in self.layers]
        trained = [weight for weight in weights if weight.requires_grad]
        for weight in trained:
            weight.grad = self.accumulator(weight)
        try:
            yield
        finally:
            self.gradients |= {weight: weight.grad for weight in trained if weight.grad is not None}

    def accumulator(self, weight: Tensor) -> Tensor:
        """The tensor to which a pass adds the weight's gradient, with the present value of `.grad`.

        A caller of `encode`, `backward` and `replay` may set `.grad` to None or to another tensor between them:

        first pass of the step   `.grad`, or zeros if it is None
        later passes             the tensor of the first pass, after the values of another `.grad` have been copied into
                                 it; if `.grad` is None, zeros
        """
        gradient = self.gradients.get(weight)
        if weight.grad is None:
            zeros = torch.zeros_like(weight) if gradient is None else gradient.zero_()
            self.zeros[weight] = zeros, zeros._version
            return zeros
        if gradient is None or weight.grad is gradient:
            return weight.grad
        return gradient.copy_(weight.grad)


@contextmanager
def using_cast_weights(layers: Sequence[tuple[CastLayer, HalfWeights]], *, accumulates: bool) -> Iterator[None]:
    """In this context, the layers use their cast weights. `accumulates`: the gradients of trained ones are added to
    `.grad`."""
    try:
        for layer, half_weights in layers:
            weight, _ = layer.weights()
            layer.half_weights = half_weights._replace(accumulates=accumulates and weight.requires_grad)
        yield
    finally:
        for layer, _ in layers:
            layer.half_weights = None


def layers_to_cast(
    encoder: nn.Module, autocast: Callable[[], AbstractContextManager[object]]
) -> Iterator[tuple[CastLayer, torch.dtype]]:
    """The layers whose weights autocast casts, each with the type that it casts to."""
    dtype_on = cache(partial(autocast_dtype, autocast))
    for layer in encoder.modules():
        if isinstance(layer, CastLayer) and layer.accepts_half_weights:
            weight, _ = layer.weights()
            dtype = dtype_on(weight.device.type)
            if dtype and weight.dtype == torch.float32 and not has_hooks(weight):
                yield layer, dtype


def autocast_dtype(autocast: Callable[[], AbstractContextManager[object]], device: str) -> torch.dtype | None:
    """The half-precision type of an autocast context; None if it casts nothing."""
    with autocast():
        if not torch.is_autocast_enabled(device):
            return None
        return torch.get_autocast_dtype(device)


def has_hooks(weight: Tensor) -> bool:
    """Whether somebody has registered a hook on the weight's gradient."""
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)
