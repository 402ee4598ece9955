"""The oracle: the loss of a whole batch in one graph, written straight from the formulas. Every test compares with it.

It shares no code with the blocks, tiles and exchanges. It holds several N x M matrices.

Letters: N images, M texts, D feature width.
"""

from typing import Unpack

import torch
from torch import Tensor, nn

from clipscale.loss.inputs import LossOptions
from clipscale.loss.objective import OBJECTIVES


def dense_contrastive_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    *,
    logit_bias: Tensor | float = 0.0,
    objective: str = "softmax",
    keys: Tensor | None = None,
    **options: Unpack[LossOptions],
) -> Tensor:
    """`contrastive_loss` of all ranks' batch, in the inputs' precision: text i belongs to image i, and texts beyond
    those are hard negatives. Of the options it takes `similarity`."""
    n, m = len(image_features), len(text_features)
    similarity = options.get("similarity")
    if isinstance(similarity, nn.Module):
        scores = similarity(image_features, text_features)
    else:
        scores = image_features @ text_features.T
    positive = torch.eye(n, m, dtype=torch.bool, device=image_features.device)
    logits = logit_scale * scores
    if OBJECTIVES[objective].needs_bias:
        logits = logits + logit_bias
    if keys is not None:
        logits = logits.masked_fill((keys[:, None] == keys) & ~positive, -torch.inf)
    return OBJECTIVES[objective].dense(logits, positive, n)
