"""The oracle of the distillation: `distillation_loss` of a whole batch in one graph, straight from its formula.

It shares no code with the blocks, tiles and exchanges.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def dense_distillation_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    teachers: Sequence[tuple[Tensor, Tensor, float]],
    *,
    keys: Tensor | None = None,
    similarity: nn.Module | None = None,
) -> Tensor:
    """`distillation_loss` of all ranks' batch, with weights 0 and 1: the cross-entropy to the teachers alone."""
    scores = similarity(image_features, text_features) if similarity else image_features @ text_features.T
    masked = torch.zeros_like(scores, dtype=torch.bool)
    if keys is not None:
        masked = (keys[:, None] == keys) & ~torch.eye(len(keys), dtype=torch.bool)
    logits = (logit_scale * scores).masked_fill(masked, -torch.inf)
    value = scores.new_zeros(())
    for dim in (0, 1):
        probabilities = [(t * a @ b.T).masked_fill(masked, -torch.inf).softmax(dim) for a, b, t in teachers]
        log_p = logits.log_softmax(dim).masked_fill(masked, 0)
        value = value - (torch.stack(probabilities).mean(0) * log_p).sum(dim).mean() / 2
    return value
