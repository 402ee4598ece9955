"""What the gradient cache refuses: arguments, encoders, outputs and losses. Each check raises ValueError."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clipscale.common.modules import is_trainable
from clipscale.step.cache.batch_norm import batch_norms
from clipscale.step.cache.encoder_io import ChunkOutput
from clipscale.step.cache.gradient_sync import is_ddp

# Maps an encoder's output to its tensor.
Representation = Callable[[Any], Tensor]

# ---- arguments of GradCache ----


def checked_chunks(chunks: int | Sequence[int], num_encoders: int) -> list[int]:
    """The argument `chunks` as a size for each encoder."""
    sizes = [*chunks] if isinstance(chunks, Sequence) else [chunks] * num_encoders
    if len(sizes) != num_encoders or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ValueError(f"chunks={chunks!r}: one size of at least 1, or one for each of {num_encoders} encoders")
    return sizes


def checked_keep_bytes(keep_bytes: float | None) -> float | None:
    """The argument `keep_bytes` as it is."""
    if keep_bytes is not None and (not isinstance(keep_bytes, Real) or not keep_bytes >= 0):
        raise ValueError(f"keep_bytes={keep_bytes!r}: give a number of bytes, such as 8 * 2**30, math.inf or None")
    return keep_bytes


def checked_representations(
    representation: Representation | Sequence[Representation | None] | None, num_encoders: int
) -> list[Representation | None]:
    """The argument `representation` as one entry for each encoder."""
    if representation is None or callable(representation):
        functions = [representation] * num_encoders
    else:
        functions = [*representation]
    if len(functions) != num_encoders:
        raise ValueError(
            f"representation= has {len(functions)} functions for {num_encoders} encoders: one, or one each"
        )
    if any(isinstance(function, nn.Module) and is_trainable(function) for function in functions):
        raise ValueError("representation= has trainable parameters: put them into the encoder, which has two passes")
    return functions


def checked_autocast(
    autocast: Callable[[], AbstractContextManager[object]],
) -> Callable[[], AbstractContextManager[object]]:
    """The argument `autocast`, which makes contexts: a single context cannot serve all chunks."""
    if isinstance(autocast, AbstractContextManager) or not callable(autocast):
        raise ValueError(
            f"autocast={autocast!r}: give a function that makes a new context at each call, such as "
            'lambda: torch.autocast("cuda", torch.bfloat16)'
        )
    return autocast


def checked_scaler(scaler: "torch.amp.GradScaler | None") -> "torch.amp.GradScaler | None":
    """The argument `scaler`, a gradient scaler or None."""
    if scaler is not None and not hasattr(scaler, "scale"):
        raise ValueError(f"scaler={scaler!r}: give a gradient scaler, torch.amp.GradScaler(), or None")
    return scaler


# ---- encoders ----


def refuse_batch_norm(encoder: Callable[..., object], num_chunks: int) -> None:
    """Refuse batch normalisation in training mode that does not see the whole batch at once."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    for name, module in batch_norms(encoder).items():
        problem = f"{name} is batch normalisation in training mode, which mixes the samples of a batch"
        if num_chunks > 1:
            raise ValueError(
                f"{problem}: {num_chunks} chunks would be another function; freeze it (.eval()) or use one chunk"
            )
        if world_size > 1 and not isinstance(module, nn.SyncBatchNorm):
            raise ValueError(
                f"{problem}: over {world_size} ranks it would see only a part of them; synchronise it "
                "(nn.SyncBatchNorm, on GPUs) or freeze it (.eval())"
            )


def refuse_static_graph(encoder: Callable[..., object]) -> None:
    """Refuse DDP with static_graph=True, which assumes that every pass uses the same graph."""
    if is_ddp(encoder) and encoder.static_graph:
        raise ValueError(
            "DDP with static_graph=True counts one backward pass for each forward pass, but the first pass of a chunk "
            "has none; leave static_graph out"
        )


# ---- an encoder's output ----


def check_output(representations: object, loss: Tensor | None, num_samples: int, *, is_mapped: bool) -> None:
    """The representations of a chunk are a tensor with a row for each sample, and its own loss is a scalar.

    `is_mapped`: the representations are what `representation=` returned.
    """
    if not isinstance(representations, Tensor):
        source = "representation=" if is_mapped else "an encoder"
        raise ValueError(
            f"{source} returned a {type(representations).__name__}, not a tensor; representation= takes a function "
            "that maps an encoder's output to its tensor, one row for each sample"
        )
    if representations.shape[0] != num_samples:
        raise ValueError(f"an encoder returned {representations.shape[0]} rows for {num_samples} samples")
    if loss is not None and loss.shape != ():
        raise ValueError(f"ChunkOutput: a chunk's loss is a sum over its samples, 0-d, not {tuple(loss.shape)}")


def refuse_graph(out: ChunkOutput) -> None:
    """Refuse a graph in the output of an encoder without trainable parameters: it would be lost."""
    if out.representations.requires_grad or (out.loss is not None and out.loss.requires_grad):
        raise ValueError(
            "a module without trainable parameters returned a tensor that requires a gradient: of an input, or of a "
            "parameter that the module uses but does not list; give a function that calls it, which has two passes"
        )


# ---- losses ----


def check_loss(value: object) -> None:
    """A loss is one number with a graph."""
    if not isinstance(value, Tensor):
        problem = str(value)
    elif value.numel() != 1:
        problem = f"of shape {tuple(value.shape)}"
    elif not value.requires_grad:
        problem = "detached (or computed under torch.no_grad)"
    else:
        return
    raise ValueError(f"the loss is {problem}: give one number with a graph to the representations")


def refuse_scaled(loss: Tensor, scaler: "torch.amp.GradScaler | None") -> None:
    """Refuse a loss that the scaler has scaled already: its gradients would carry the scale twice."""
    if scaler and _is_scaled(loss, scaler):
        raise ValueError("the loss ends in scaler.scale(...), and with scaler= GradCache scales it: return it as it is")


def _is_scaled(loss: Tensor, scaler: "torch.amp.GradScaler") -> bool:
    """Whether the last operation of a loss is a product with the scaler's own tensor, as `scaler.scale` makes it."""
    factor = getattr(loss.grad_fn, "_saved_other", None)
    if not isinstance(factor, Tensor):
        return False
    probe = scaler.scale(torch.ones((), device=loss.device, requires_grad=True))
    scale = getattr(probe.grad_fn, "_saved_other", None)
    return isinstance(scale, Tensor) and scale.data_ptr() == factor.data_ptr()
