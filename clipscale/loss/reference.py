"""The loss of a whole batch in one graph, written straight from the formulas. It is the oracle of the tests, and the
evaluation computes the loss of held-out pairs with it.

It shares no code with the blocks, tiles and exchanges. It holds several N x M matrices.

Letters: N images, M texts, D feature width.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from clipscale.loss.objective import OBJECTIVES


def dense_contrastive_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    *,
    logit_bias: Tensor | float = 0.0,
    objective: str = "softmax",
    keys: Tensor | None = None,
    similarity: nn.Module | Literal["dot"] | None = None,
    captions: int = 1,
) -> Tensor:
    """`contrastive_loss` of all ranks' batch, in the inputs' precision: text j belongs to image j // captions, and
    texts beyond those are hard negatives."""
    n = len(image_features)
    m = len(text_features)
    if isinstance(similarity, nn.Module):
        scores = similarity(image_features, text_features)
    else:
        scores = image_features @ text_features.T
    owner = torch.arange(m, device=image_features.device) // captions
    is_positive = owner == torch.arange(n, device=image_features.device)[:, None]
    logits = logit_scale * scores
    if OBJECTIVES[objective].needs_bias:
        logits = logits + logit_bias
    if keys is not None:
        logits = logits.masked_fill((keys[:, None] == keys.repeat_interleave(captions)) & ~is_positive, -torch.inf)
    return OBJECTIVES[objective].dense_loss(logits, is_positive, captions * n)
