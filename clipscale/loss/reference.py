"""The oracle: the loss of a whole batch in one graph, written straight from the formulas. Every test compares with it.

It shares no code with the blocks, tiles and exchanges. It holds several N x M matrices.

Letters: N images, M texts, D feature width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def dense_contrastive_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    *,
    logit_bias: Tensor | float = 0.0,
    objective: str = "softmax",
    similarity: str | nn.Module = "dot",
    keys: tuple[Tensor, Tensor] | None = None,
    shared: str = "mask",
    captions: int = 1,
) -> Tensor:
    """`contrastive_loss` of all ranks' batch, in the inputs' precision: text j belongs to image j // captions, and
    texts beyond those are hard negatives."""
    n, m = len(image_features), len(text_features)
    pairs = similarity if isinstance(similarity, nn.Module) else lambda u, v: u @ v.T
    scores = pairs(image_features, text_features)
    owner = torch.arange(m, device=image_features.device) // captions
    positive = owner[None, :] == torch.arange(n, device=image_features.device)[:, None]
    equal = torch.zeros_like(positive)
    if keys is not None and shared != "ignore":
        equal = keys[0][:, None] == keys[1][None, :]
    left_out = equal & ~positive if shared == "mask" else torch.zeros_like(positive)
    positive = positive | equal if shared == "positive" else positive

    if objective == "sigmoid":
        logits = logit_scale * scores + logit_bias
        terms = F.binary_cross_entropy_with_logits(logits, positive.to(logits.dtype), reduction="none")
        return terms.masked_fill(left_out, 0).sum() / n
    logits = (logit_scale * scores).masked_fill(left_out, -torch.inf)
    image_loss = one_sided(logits, positive)
    text_loss = one_sided(logits.T[: captions * n], positive.T[: captions * n])
    return {"softmax": (image_loss + text_loss) / 2, "softmax_image": image_loss, "softmax_text": text_loss}[objective]


def one_sided(scores: Tensor, positive: Tensor) -> Tensor:
    """The mean over rows of the log-sum-exp less the mean of the positives' scores (SupCon, arXiv 2004.11362, eq. 2).

    scores and positive (bool): (N, M)."""
    positives = scores.masked_fill(~positive, 0).sum(1) / positive.sum(1)
    return (scores.logsumexp(1) - positives).mean()
