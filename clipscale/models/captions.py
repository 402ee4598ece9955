"""Finds by trial whether a text tower's features depend on how far captions are padded."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from open_clip.transformer import TextTransformer
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from clipscale.data.loader.captions import lengths
from clipscale.loss.machine import float32_matmuls

WORDS = (0, 1, 4, 12, 30)
"""Words of the captions that are tried."""
TOLERANCE = 1e-4
"""Largest difference of two unit features that counts as rounding, in float32."""


def padding(
    tower: nn.Module,
    tokenizer: Callable[[list[str]], Tensor],
    device: torch.device,
    weights: Mapping[str, Tensor] | None = None,
) -> int | str:
    """The padding token, if a float32 tower's unit features stay the same when padding is cut off; else why they may
    not be cut.

    `tower` maps tokens (N, T) to features (N, D). A tower that normalises over a batch's samples is not cut either.
    `weights` by name take the place of the tower's own, which may have no values yet.
    """
    if any(isinstance(module, _BatchNorm) for module in tower.modules()):
        return "the text tower has batch normalisation"
    tokens = tokenizer([" ".join(["cat"] * count) for count in WORDS])
    pad = int(tokens[0, -1])
    widths = lengths(tokens, pad)
    run = tower if weights is None else partial(functional_call, tower, dict(weights))
    with evaluating(tower), torch.no_grad(), float32_matmuls("ieee"):
        whole = run(tokens.to(device))
        for row, (caption, width) in enumerate(zip(tokens, widths.tolist())):
            try:
                cut = run(caption[None, :width].to(device))
            except (RuntimeError, ValueError, IndexError):
                return "the text tower takes only whole contexts"
            if cut.shape != whole[row, None].shape or not (cut - whole[row, None]).abs().max() <= TOLERANCE:
                return "the text tower's features depend on padding"
    return pad


def expected_to_cut(encoder: nn.Module) -> bool:
    """Whether `padding` is expected to find that captions may be cut, by the description of one of open_clip's text
    transformers.

    For `plan`, whose towers have no values. False for all other towers.
    """
    if not isinstance(encoder, TextTransformer) or encoder.cls_emb is not None:
        return False
    return encoder.attn_mask is not None and encoder.pool_type in ("first", "argmax", "eos")


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards each part is in the mode that it was in."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
