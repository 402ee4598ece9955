"""What surrounds a pass of a chunk: how its gradients are summed over ranks, batch normalisation, and cast weights."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from clipscale.common.half_precision import Cast, CastLayer
from clipscale.common.modules import is_batch_norm
from clipscale.step.cache.encoder_io import ChunkOutput

# ---- sums of gradients over ranks ----


def is_ddp(encoder: object) -> TypeGuard[DistributedDataParallel]:
    """Whether the encoder is under DDP."""
    return isinstance(encoder, DistributedDataParallel)


class GradientSync(Protocol):
    """An encoder that sums its gradients over ranks in its own way, as clipscale's `ShardedTower` does.

    Its forward pass counts as a collective, unless it has an attribute `forward_is_collective = False`.
    """

    def gradient_sync(self, is_last_backward: bool) -> AbstractContextManager[None]:
        """Around each pass of a chunk. `is_last_backward`: whether the encoder's last backward pass of the step runs
        inside."""


def syncs_itself(encoder: object) -> TypeGuard[GradientSync]:
    """Whether the encoder has a `gradient_sync`, perhaps of the module that it wraps."""
    return hasattr(encoder, "gradient_sync")


class HasNoSync(Protocol):
    """A wrapper with a context in which a pass does not sum gradients, such as DDP.

    Another one than DDP may decide in the forward pass whether the backward pass sums, so its last chunk's graph is
    never kept.
    """

    def no_sync(self) -> AbstractContextManager[None]: ...


def offers_no_sync(encoder: object) -> TypeGuard[HasNoSync]:
    """Whether the encoder has a `no_sync`.

    Hooks on its gradients are then taken to sum them over ranks, except for passes inside `no_sync`, as DDP's do.
    """
    return hasattr(encoder, "no_sync")


def can_sum_after_kept_graph(encoder: object) -> bool:
    """Whether the backward pass of a graph that was built inside `no_sync` can still sum gradients over ranks.

    DDP can be armed again: see `rearm_ddp_sync`. Another wrapper may have decided in its forward pass not to sum.
    """
    return is_ddp(encoder) or syncs_itself(encoder) or not offers_no_sync(encoder)


def is_collective(encoder: Callable[..., object]) -> bool:
    """Whether a forward pass gathers weights, as FSDP2's does, so that all ranks must run equally many passes.

    False for synchronised batch normalisation, although it communicates: `short_memory_policy` gives it `RAISE`.
    """
    stated: bool | None = getattr(encoder, "forward_is_collective", None)
    if stated is not None:
        return stated
    # An encoder with a `gradient_sync` of its own is assumed to gather weights.
    return isinstance(encoder, FSDPModule) or syncs_itself(encoder)


@contextmanager
def sync_context(encoder: Callable[..., object], *, is_last_backward: bool) -> Iterator[None]:
    """Around the pass of a chunk. `is_last_backward`: whether the encoder's last backward pass of the step runs inside.

    Who reads it, and when:

    DDP                     in a forward pass (see `rearm_ddp_sync`): if true, the next backward pass sums gradients
    FSDP2's `fully_shard`   in the backward pass, which sums if it is true
    a `gradient_sync`       decides itself. `ShardedTower` sums after every backward pass; if it is true, its weights
                            are then sharded again, in ZeRO's stage 2 too
    """
    if syncs_itself(encoder):
        with encoder.gradient_sync(is_last_backward):
            yield
    elif isinstance(encoder, FSDPModule):
        encoder.set_requires_gradient_sync(is_last_backward)
        try:
            yield
        finally:
            encoder.set_requires_gradient_sync(True)
    elif offers_no_sync(encoder) and not is_last_backward:
        with encoder.no_sync():
            yield
    else:
        yield


def rearm_ddp_sync(encoder: Callable[..., object], out: ChunkOutput) -> ChunkOutput:
    """Re-arm DDP for an `out` computed under `no_sync`: a backward pass from the returned output sums gradients.

    DDP decides in a forward pass whether the next backward pass sums. So `out` passes through DDP again, with the
    identity in the place of the wrapped module.
    """
    if not is_ddp(encoder):
        return out
    module = encoder.module
    encoder.module = nn.Identity()
    try:
        return encoder(out)
    finally:
        encoder.module = module


# ---- batch normalisation ----


def batch_norms(encoder: Callable[..., object]) -> dict[str, nn.Module]:
    """The encoder's batch normalisations in training mode, by name. They mix samples and update running statistics."""
    modules = encoder.named_modules() if isinstance(encoder, nn.Module) else ()
    return {name: module for name, module in modules if is_batch_norm(module) and module.training}


def snapshot_batch_norm(encoder: Callable[..., object]) -> Callable[[], None]:
    """Copy the present statistics of batch normalisation. Returns a function that restores them."""
    buffers = [buffer for module in batch_norms(encoder).values() for buffer in module.buffers()]
    before = [b.clone() for b in buffers]

    def restore() -> None:
        for buffer, value in zip(buffers, before, strict=True):
            # By `data`, so that autograd does not see the change: another tower's kept graph may hold the buffer.
            buffer.data.copy_(value)

    return restore


@contextmanager
def batch_norm_preserved(encoder: Callable[..., object]) -> Iterator[None]:
    """Restores the statistics afterwards: only the first pass updates them."""
    restore = snapshot_batch_norm(encoder)
    try:
        yield
    finally:
        restore()


# ---- weights in half precision ----


@dataclass
class CastWeights:
    """An encoder's layers with their weights in half precision, cast once a step: autocast casts them in every chunk.

    The layers that take such weights are in models/linear.py. The passes of a step:

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

    `.grad` is the same tensor in the whole step (see `accumulator`), because kept graphs hold it.
    """

    layers: list[tuple[CastLayer, Cast]] = field(default_factory=list)
    # Each weight's gradient. Kept graphs hold the same tensor, to add to it in their backward pass.
    gradients: dict[Tensor, Tensor] = field(default_factory=dict)
    # Whether hooks, such as DDP's, sum the gradients over ranks. They see only what autograd adds.
    has_sync_hooks: bool = False

    def start_step(
        self, encoder: object, autocast: Callable[[], AbstractContextManager[object]], num_chunks: int
    ) -> None:
        """Cast the weights that autocast would cast in every chunk. Casts nothing in three cases:

        - There is only one chunk.
        - FSDP2 gathers the weights. From torch 2.15 on it casts them then; before, autocast casts them in every chunk.
        - DDP looks for unused parameters, which its hooks must see.
        """
        self.end_step()
        if not isinstance(encoder, nn.Module) or num_chunks == 1 or is_collective(encoder) or finds_unused(encoder):
            return
        self.has_sync_hooks = offers_no_sync(encoder)
        for layer, dtype in layers_to_cast(encoder, autocast):
            weight, bias = layer.weights()
            half_bias = None if bias is None else bias.detach().to(dtype)
            self.layers.append((layer, Cast(weight.detach().to(dtype), half_bias, accumulates=False)))

    def end_step(self) -> None:
        self.layers.clear()
        self.gradients.clear()

    @contextmanager
    def in_pass(self, *, builds_graph: bool, is_last_backward: bool) -> Iterator[None]:
        """Around a pass of one chunk: the layers use their cast weights.

        `builds_graph`: the pass builds a graph, whose backward pass, now or later, adds to the weights' `.grad`.
        `is_last_backward`: that backward pass is the encoder's last one in the step. DDP then needs autograd's own
        gradients, so nothing is cast.
        """
        if builds_graph and is_last_backward and self.has_sync_hooks:
            yield
        elif builds_graph:
            with casting(self.layers, accumulates=True), self.accumulating():
                yield
        else:
            with casting(self.layers, accumulates=False):
                yield

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Inside, the `.grad` of each trained weight is its accumulator, which stays the same for the whole step.

        It is noted after the pass, even if that fails: DDP may replace `.grad` when the pass begins, and the pass's
        graph holds the new one.
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
        if gradient is None:
            return torch.zeros_like(weight) if weight.grad is None else weight.grad
        if weight.grad is None:
            return gradient.zero_()
        return gradient if weight.grad is gradient else gradient.copy_(weight.grad)


@contextmanager
def casting(layers: Sequence[tuple[CastLayer, Cast]], *, accumulates: bool) -> Iterator[None]:
    """Inside, the layers use their cast weights. `accumulates`: the gradients of trained ones are added to `.grad`."""
    try:
        for layer, cast in layers:
            weight, _ = layer.weights()
            layer.cast = cast._replace(accumulates=accumulates and weight.requires_grad)
        yield
    finally:
        for layer, _ in layers:
            layer.cast = None


def layers_to_cast(
    encoder: nn.Module, autocast: Callable[[], AbstractContextManager[object]]
) -> Iterator[tuple[CastLayer, torch.dtype]]:
    """The layers whose weights autocast casts, each with the type that it casts to."""
    for layer in encoder.modules():
        if isinstance(layer, CastLayer) and layer.takes_cast:
            weight, _ = layer.weights()
            dtype = autocast_dtype(autocast, weight.device.type)
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


def finds_unused(encoder: nn.Module) -> bool:
    """Whether DDP notes in every chunk, by its hooks, which parameters have a gradient."""
    return is_ddp(encoder) and encoder.find_unused_parameters
