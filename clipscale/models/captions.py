"""Finds by trial whether a text tower's features depend on how far captions are padded."""

from collections.abc import Callable

import torch
from open_clip.transformer import TextTransformer
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from clipscale.data.loader.captions import lengths
from clipscale.loss.machine import float32_matmuls

WORDS = (0, 1, 4, 12, 30)
"""Words of the captions that are tried."""
TOLERANCE = 1e-4
"""Largest difference of two unit features that counts as rounding, in float32."""


def padding(tower: nn.Module, tokenizer: Callable[[list[str]], Tensor], device: torch.device) -> int | str:
    """The padding token, if a float32 tower's unit features stay the same without padding; else why it may not be cut.

    `tower` maps tokens (N, T) to features (N, D). A tower that normalises over a batch's samples is not cut either.
    """
    if any(isinstance(module, _BatchNorm) for module in tower.modules()):
        return "the text tower has batch normalisation"
    tokens = tokenizer([" ".join(["cat"] * count) for count in WORDS])
    pad = int(tokens[0, -1])
    widths = lengths(tokens, pad)
    training = tower.training
    tower.eval()
    try:
        with torch.no_grad(), float32_matmuls("ieee"):
            whole = tower(tokens.to(device))
            for row, (caption, width) in enumerate(zip(tokens, widths.tolist())):
                try:
                    cut = tower(caption[None, :width].to(device))
                except (RuntimeError, ValueError, IndexError):
                    return "the text tower takes only whole contexts"
                if cut.shape != whole[row, None].shape or not (cut - whole[row, None]).abs().max() <= TOLERANCE:
                    return "the text tower's features depend on padding"
    finally:
        tower.train(training)
    return pad


def expected_to_cut(encoder: nn.Module) -> bool:
    """What `padding` would find for a text transformer of open_clip; False for any other tower.

    For `plan`, whose towers have no values.
    """
    if not isinstance(encoder, TextTransformer) or encoder.cls_emb is not None:
        return False
    return encoder.attn_mask is not None and encoder.pool_type in ("first", "argmax", "eos")
